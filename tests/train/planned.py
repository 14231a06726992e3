"""Small training workloads for the planner's tests; the last ones go wrong on purpose, on rank 1."""

import dataclasses
import functools
import os
import signal
import time

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def workload(loss=loss_of):
    batch = (torch.randn(128, 16), torch.randint(0, 4, (128,)))
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    return {"model": Net(), "optimizer": optimizer, "loss": loss, "data": [batch]}


def counted():
    """Its samples are tokens, say, of which each row has sixteen."""
    return {**workload(), "samples": 16 * 128}


@dataclasses.dataclass
class Labelled:
    images: torch.Tensor
    labels: torch.Tensor


def labelled():
    """Its batch is an object that torch does not know as a tree."""
    made = workload(lambda model, batch: nn.functional.cross_entropy(model(batch.images), batch.labels))
    return {**made, "data": [Labelled(*batch) for batch in made["data"]]}


def llama():
    return _decoder("Llama")


def qwen():
    """Its queries and keys are normalised head by head."""
    return _decoder("Qwen3", head_dim=16)


def _decoder(name, **sizes):
    import transformers

    config = getattr(transformers, f"{name}Config")(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, use_cache=False, tie_word_embeddings=True, **sizes,
    )  # fmt: skip
    ids = torch.randint(0, 256, (8, 32))
    batch = {"input_ids": ids, "labels": ids}
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-3)
    return {"model": getattr(transformers, f"{name}ForCausalLM")(config), "optimizer": optimizer,
            "loss": lambda m, b: m(**b).loss, "data": [batch], "max_grad_norm": 1.0}  # fmt: skip


def _on_rank_1(act):
    def loss(model, batch):
        if os.environ.get("RANK") == "1":
            act()
        return loss_of(model, batch)

    return workload(loss)


def raises():
    def act():
        raise ValueError("a bad row")

    return _on_rank_1(act)


def dies():
    return _on_rank_1(lambda: os.kill(os.getpid(), signal.SIGSEGV))


def hangs():
    return _on_rank_1(lambda: time.sleep(600))


def out_of_memory():
    return _on_rank_1(lambda: torch.empty(1 << 50, dtype=torch.uint8))


def needs_values():
    return workload(lambda model, batch: loss_of(model, batch) * float(batch[0].sum() > 0))
