"""BERT-base encoder (Devlin et al. 2018): 109 million parameters, 8 sequences of up to 128 tokens with their masks.

The configuration is the default of transformers' BertConfig, which is google-bert/bert-base-uncased. Random weights.
"""

import torch
from transformers import BertConfig, BertModel


def batch(rows: int = 8, length: int = 128) -> dict[str, torch.Tensor]:
    lengths = torch.randint(length // 4, length + 1, (rows, 1))
    lengths[0] = length  # one full row: the batch is as long as its longest sequence
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": torch.randint(1000, 30522, (rows, length)) * mask, "attention_mask": mask}


def workload() -> dict:
    torch.manual_seed(0)
    return {
        "model": BertModel(BertConfig()),
        "inputs": [batch() for _ in range(4)],
        "check_inputs": [batch() for _ in range(2)],
        "name": "bert-base",
    }
