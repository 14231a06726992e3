"""Products in blocks (`fettle.kernels.block_products`) beside what they are limited by and what torch has.

    python bench/block_products.py --json bench/results/block_products.json

For one row, as in a step of decoding, the weights are read from memory: told is what the kernel reads a second as a
share of what a sum over half a GiB reads, measured in turn with it. There are so many copies of each layer that no
cache holds them. For 64 rows, as in a prompt, its time stands beside those of torch's product in float32 and bfloat16.
All ways take turns, and each figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fettle.kernels import block_products, packed_blocks
from fettle.machine import this_machine

LAYERS = {
    "SmolLM2-135M, keys or values": (192, 576), "SmolLM2-135M, queries": (576, 576),
    "SmolLM2-135M, gate and up": (3072, 576), "SmolLM2-135M, down": (576, 1536), "SmolLM2-135M, head": (49152, 576),
    "GPT-2, queries, keys and values": (2304, 768), "GPT-2, up": (3072, 768), "GPT-2, down": (768, 3072),
    "GPT-2, head": (50257, 768), "Llama-7B, down": (4096, 11008),
}  # fmt: skip
"""Outputs and inputs of a layer."""
_BYTES = 256 << 20
"""What the copies of a layer take in float32 at least: more than any cache holds in 4 bits."""
_SUMMED = 512 << 20


def measured(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of each way, in turn."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number:  # the first warms up
                took[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in took.items()}


def layer(outputs: int, inputs: int, rounds: int) -> dict[str, Any]:
    multiply, copies = block_products(), max(1, -(-_BYTES // (4 * outputs * inputs)))
    weight, vector = torch.randn(outputs, inputs), torch.randn(_SUMMED // 4)
    one, many = torch.randn(1, inputs), torch.randn(64, inputs)
    packed = {bits: [packed_blocks(weight, bits) for _ in range(copies)] for bits in (8, 4)}
    plain = [weight.clone() for _ in range(copies)]
    half, halves = weight.bfloat16(), many.bfloat16()

    def all_of(bits: int) -> Callable[[], Any]:
        return lambda: [multiply(one, *pair, outputs) for pair in packed[bits]]

    few = measured({
        "sum": vector.sum, "8 bits": all_of(8), "4 bits": all_of(4),
        "float32": lambda: [torch.nn.functional.linear(one, each) for each in plain],
    }, rounds)  # fmt: skip
    read = _SUMMED / few["sum"]
    sizes = {bits: copies * sum(part.numel() * part.element_size() for part in packed[bits][0]) for bits in (8, 4)}
    wide = measured({
        "8 bits": lambda: multiply(many, *packed[8][0], outputs),
        "4 bits": lambda: multiply(many, *packed[4][0], outputs),
        "float32": lambda: torch.nn.functional.linear(many, weight),
        "bfloat16": lambda: torch.nn.functional.linear(halves, half),
    }, 3 * rounds)  # fmt: skip
    return {
        "outputs": outputs, "inputs": inputs, "sum_gb_per_s": read / 1e9,
        "one_row_us": {name: few[name] / copies * 1e6 for name in ("8 bits", "4 bits", "float32")},
        "share_of_sum": {f"{bits} bits": sizes[bits] / few[f"{bits} bits"] / read for bits in (8, 4)},
        "64_rows_us": {name: seconds * 1e6 for name, seconds in wide.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {}
    for name, shape in LAYERS.items():
        found[name] = one = layer(*shape, given.rounds)
        shares = ", ".join(f"{bits} {share:.0%}" for bits, share in one["share_of_sum"].items())
        times = ", ".join(f"{way} {time:.0f}" for way, time in one["64_rows_us"].items())
        print(f"{name} {shape}: one row reads {shares} of {one['sum_gb_per_s']:.1f} GB/s; 64 rows in us: {times}")
    if given.json:
        data = {"machine": this_machine().summary, "threads": torch.get_num_threads(), "layers": found}
        given.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
