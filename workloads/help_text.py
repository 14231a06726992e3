"""A Llama of 8 layers that writes Python's help texts byte by byte, and a draft of 2 layers that guesses what it will.

Both are trained alike when they are first asked for (about three minutes of two cores; `python workloads/help_text.py`
does only that) and kept in the cache folder. Text is what ships with Python as `pydoc_data`; of each topic the last
tenth is held out, and prompts and texts are from there.
"""

import time
from pydoc_data.topics import topics

import torch
from _shared import training_precision, with_weights
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, ROWS, LENGTH = 200, 24, 192


def split() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The bytes to train on, and the last tenth of each topic."""
    found = [torch.tensor(list(topics[name].encode())) for name in sorted(topics)]
    cuts = [len(text) * 9 // 10 for text in found]
    train = torch.cat([text[:cut] for text, cut in zip(found, cuts, strict=True)])
    return train, [text[cut:] for text, cut in zip(found, cuts, strict=True)]


def llama(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM) -> None:
    text, _ = split()
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS, pct_start=0.1)
    began = time.perf_counter()
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=draw)
        batch = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        with training_precision():
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1}: {loss.item():.3f} nats a byte, {time.perf_counter() - began:.0f} s", flush=True)


def workload() -> dict:
    model, draft = (with_weights(llama(layers), train, f"help-text-{layers}") for layers in (8, 2))
    _, held = split()
    longest = sorted(held, key=len, reverse=True)
    return {
        "model": model,
        "draft": draft,
        "inputs": [text[None, :length] for text, length in zip(longest, (64, 128, 256), strict=False)],
        "check_inputs": [text[None, :length] for text, length in zip(longest[3:], (64, 128), strict=False)],
        "texts": [text[None, :256] for text in longest[5:9]],
        "new_tokens": 64,
        "name": "help-text",
    }


if __name__ == "__main__":
    workload()
