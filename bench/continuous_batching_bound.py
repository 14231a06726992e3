"""What bounds continuous batching over batch by batch: the engine's own costs, and both policies simulated with them.

    python bench/continuous_batching_bound.py --json continuous_batching_bound.json

Model, texts and both policies are those of `generation_serving.py`. Timed on the engine are a step by its rows and by
what they keep, and prompts by their tokens. Simulated are the policies with these times and nothing else, so that a
ratio is the most that this engine could reach; and once more with a part of the times changed, which shows what it
lies at.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
from pathlib import Path

import torch
from generation_serving import asked, model_of, packaged

from fettle.machine import this_machine
from fettle.package.manifest import open_package
from fettle.slo import text_simulation
from fettle.slo.text_costs import calibrate_texts
from fettle.slo.text_simulation import Tables, simulate_texts

PROMPT, WHOLE, CHUNK, BATCHES = 200, 456, 128, 60


def ratio_of(tables: Tables, streams: int) -> tuple[float, float]:
    """Tokens a second of texts that join as others leave, and how many times as many that is as batch by batch."""
    texts = [(len(prompt), most) for prompt, most in itertools.islice(asked(0), BATCHES * streams)]

    def seconds(some: list[tuple[int, int]]) -> float:
        prompts, outputs = zip(*some, strict=True)
        return simulate_texts([0.0] * len(some), prompts, outputs, streams, CHUNK, tables).busy_s

    batches = [texts[begin : begin + streams] for begin in range(0, len(texts), streams)]
    together = seconds(texts)
    return sum(most for _, most in texts) / together, sum(map(seconds, batches)) / together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--recipe", default="", help="such as weights=int8-blocks")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--json", type=Path, default=Path("continuous_batching_bound.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        packaged(model_of(given.layers, given.width, "cpu", "float32"), Path(scratch) / "m", given.recipe)
        costs = calibrate_texts(
            open_package(Path(scratch) / "m"), most=max(given.streams), prompt=PROMPT, whole=WHOLE,
            threads=torch.get_num_threads(), on_progress=lambda text: print(text, file=sys.stderr),
        )  # fmt: skip
    if costs.failures:
        sys.exit(str(costs.failures))
    text_simulation.REQUEST_S = 0.0  # there is no client
    all_of_it = dataclasses.replace(Tables.of(costs, WHOLE, CHUNK), spread=[1.0])
    steps = all_of_it.writing[1:]  # by rows, by what the longest keeps
    changed = {
        "all as timed": all_of_it,
        "prompts in no time": dataclasses.replace(all_of_it, prompts=[0.0] * (CHUNK + 1), looking_s=0.0),
        "steps as if little were kept": dataclasses.replace(all_of_it, writing=[[], *([s[0]] * len(s) for s in steps)]),
        "steps as of one row": dataclasses.replace(all_of_it, writing=[[], *[steps[0]] * len(steps)]),
    }
    timed = {
        name: [{**{field: getattr(cell, field) for field in ("rows", "new", "kept")}, "ms": seconds * 1e3}
               for cell, seconds in cells]
        for name, cells in (("steps", costs.writing), ("prompts", costs.prompts))
    }  # fmt: skip
    for name, rows in timed.items():
        for cell in rows:
            print(f"{name}: {cell['rows']:2} rows, {cell['new']:3} tokens after {cell['kept']:3}, {cell['ms']:7.2f} ms")
    found = []
    for streams, (name, tables) in itertools.product(given.streams, changed.items()):
        rate, ratio = ratio_of(tables, streams)
        found.append({"streams": streams, "times": name, "tokens_per_s": rate, "ratio_to_batch_by_batch": ratio})
        print(f"{streams:2} streams, {name:28} {rate:8.1f} tokens/s  {ratio:5.2f}x batch by batch")
    settings = {key: value for key, value in vars(given).items() if key != "json"}
    data = {"machine": this_machine().summary, "settings": settings, **timed, "simulated": found}
    given.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
