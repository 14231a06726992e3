"""Training a small BERT (BertConfig, 4 layers of width 384) on sentences of different lengths.

It learns to tell which of the sentences beside this file are told in the past tense by a rough rule (a word ends in
"ed"). Words are numbered in order of appearance. 16 sentences a batch, padded to the longest of each batch, so that
the shapes differ; dropout as published.
"""

import functools
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification


def loss(model, batch):
    return model(**batch).loss


def workload(seed: int = 0) -> dict:
    texts = (Path(__file__).parent / "sentences.txt").read_text("utf-8").splitlines()
    known: dict[str, int] = {"": 0}
    words = [text.lower().rstrip(".").split() for text in texts]
    rows = [torch.tensor([known.setdefault(word, len(known)) for word in row]) for row in words]
    labels = torch.tensor([any(word.endswith("ed") for word in row) for row in words]).long()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    data = []
    for part in order.split(16):
        tokens = torch.nn.utils.rnn.pad_sequence([rows[i] for i in part], batch_first=True)
        data.append({"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels[part]})
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(known), hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536
    )
    return {
        "model": BertForSequenceClassification(config),
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-4),
        "loss": loss,
        "data": data,
        "steps": 12,
        "name": "train_bert",
    }
