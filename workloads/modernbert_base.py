"""ModernBERT-base encoder (Warner et al. 2024): 149 million parameters, one text of 2,048 tokens.

The configuration is the default of transformers' ModernBertConfig, which is answerdotai/ModernBERT-base: two of three
layers see 64 tokens to each side. Random weights.
"""

import torch
from transformers import ModernBertConfig, ModernBertModel


def batch(length: int = 2048) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(1000, 50000, (1, length))}


def workload() -> dict:
    torch.manual_seed(0)
    return {
        "model": ModernBertModel(ModernBertConfig()),
        "inputs": [batch() for _ in range(4)],
        "check_inputs": [batch() for _ in range(2)],
        "name": "modernbert-base",
    }
