"""Attention with a decomposed relative-position bias tile by tile, beside SDPA with the bias written out.

    python bench/tiled_attention.py --json tiled_attention.json

SAM ViT-B's global attention: 12 heads, 64 x 64 tokens, 64 channels, float32 and bfloat16. Each way has a process of its
own, and they make one call each in turn; the memory is the peak above what the process held before its first call.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from fettle.machine import this_machine


def worker(way: str, kind: str) -> None:
    """A timed call for every line that is read: seconds, and bytes of the peak above what there was before."""
    import torch

    from fettle.techniques._tiled_attention import tiled_attention

    torch.manual_seed(0)
    dtype = getattr(torch, kind)
    query, key, value = (torch.randn(1, 12, 4096, 64, dtype=dtype) for _ in range(3))
    rows, columns = (torch.randn(1, 12, 4096, 64, dtype=dtype) for _ in range(2))

    def written_out() -> torch.Tensor:
        bias = (rows[..., :, None] + columns[..., None, :]).flatten(-2)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, bias, scale=0.125)

    def tiled() -> torch.Tensor:
        return tiled_attention(query, key, value, rows, columns, 0.125)

    run = {"written out": written_out, "tiled": tiled}[way]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.inference_mode():
        for _ in sys.stdin:
            start = time.perf_counter()
            found = run()
            seconds = time.perf_counter() - start
            peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            print(json.dumps([seconds, peak, float(found.float().norm())]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--worker", nargs=2)
    asked = parser.parse_args()
    if asked.worker:
        return worker(*asked.worker)
    ways = [(way, kind) for kind in ("float32", "bfloat16") for way in ("written out", "tiled")]
    running = {
        way: subprocess.Popen([sys.executable, __file__, "--json=-", "--worker", *way],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for way in ways
    }  # fmt: skip
    seen: dict[tuple[str, str], list[list[float]]] = {way: [] for way in ways}
    for _ in range(asked.rounds + 1):  # the first is no figure
        for way in random.sample(ways, len(ways)):
            questions, answers = running[way].stdin, running[way].stdout
            assert questions
            assert answers
            questions.write("\n")
            questions.flush()
            seen[way].append(json.loads(answers.readline()))
    rows = []
    for way, found in seen.items():
        running[way].communicate()
        rows.append({
            "way": way[0], "type": way[1], "seconds": [one[0] for one in found[1:]], "peak_bytes": found[-1][1],
            "norm": found[-1][2],
        })  # fmt: skip
        print(*way, f"{statistics.median(rows[-1]['seconds']):.3f} s, {found[-1][1] / 2**20:.0f} MiB, {found[-1][2]}")
    asked.json.write_text(json.dumps({"machine": this_machine().summary, "ways": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
