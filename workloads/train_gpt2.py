"""Training a GPT-2 of nanoGPT's size (6 layers, 6 heads, width 384) on text that ships with Python.

The text is that of Python's own help topics, byte by byte: 8 sequences of 128 bytes a step. AdamW and clipping as
nanoGPT's train_shakespeare_char has them, without its dropout. The loss is that of transformers' GPT2LMHeadModel.
"""

import functools
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def loss(model, batch):
    return model(input_ids=batch, labels=batch).loss


def workload(seed: int = 0) -> dict:
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    where = torch.randint(len(text) - 128, (24, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=384, n_layer=6, n_head=6, use_cache=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return {
        "model": GPT2LMHeadModel(config),
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
        "loss": loss,
        "data": [torch.stack([text[start : start + 128] for start in starts]) for starts in where.tolist()],
        "steps": 12,
        "max_grad_norm": 1.0,
        "name": "train_gpt2",
    }
