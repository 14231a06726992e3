"""What `attention=windowed` saves of a long text, beside SDPA and FlexAttention as transformers has them.

    python bench/windowed_attention.py --json bench/results/windowed_attention_CPU.json

Six layers of ModernBERT-base (two of three see 64 tokens to each side) and of a Gemma 3 with 4 heads of 256 (five of
six see the 512 tokens before), random weights, float32. In a round each way reads each text once, in random order.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
from transformers import Gemma3TextConfig, Gemma3TextModel, ModernBertConfig, ModernBertModel

from fettle.machine import this_machine
from fettle.techniques.attention import set_attention, set_windowed_attention

WAYS = ("sdpa", "windowed", "flex_attention")


def modernbert() -> torch.nn.Module:
    return ModernBertModel(ModernBertConfig(num_hidden_layers=6))


def gemma() -> torch.nn.Module:
    config = Gemma3TextConfig(
        vocab_size=1000, hidden_size=1152, intermediate_size=6912, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512, use_cache=False,
    )  # fmt: skip
    return Gemma3TextModel(config)


MODELS = {"modernbert": modernbert, "gemma": gemma}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path, default=Path("windowed_attention.json"))
    given = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for name in given.models:
        model = MODELS[name]().eval()
        for tokens in given.tokens:
            ids = torch.randint(1, 1000, (1, tokens))

            def call(way: str, model: torch.nn.Module = model, ids: torch.Tensor = ids) -> tuple[float, torch.Tensor]:
                set_windowed_attention(model) if way == "windowed" else set_attention(model, way)
                began = time.perf_counter()
                with torch.inference_mode():
                    answer = model(ids).last_hidden_state
                return (time.perf_counter() - began) * 1e3, answer

            wanted = call("sdpa")[1]
            errors = {way: float((call(way)[1] - wanted).norm() / wanted.norm()) for way in given.ways}  # compiles
            took: dict[str, list[float]] = {way: [] for way in given.ways}
            for _ in range(given.rounds):
                for way in random.sample(given.ways, len(given.ways)):
                    took[way].append(call(way)[0])
            for way in given.ways:
                ratios = sorted(sdpa / own for sdpa, own in zip(took["sdpa"], took[way], strict=True))
                row = {"model": name, "tokens": tokens, "way": way, "ms": statistics.median(took[way]),
                       "over_sdpa": statistics.median(ratios), "of_rounds": [ratios[0], ratios[-1]],
                       "error": errors[way]}  # fmt: skip
                rows.append(row)
                print(f"{name:16} {tokens:5} {way:15} {row['ms']:8.1f} ms  {row['over_sdpa']:.2f}x "
                      f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]  error {errors[way]:.1e}", flush=True)  # fmt: skip
            given.json.write_text(json.dumps({"machine": this_machine().summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
