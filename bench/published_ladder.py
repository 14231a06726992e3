"""Draw Segment Anything's ladder as measured on a GPU beside the one that was published.

    python bench/published_ladder.py       # docs/pictures/sam-ladder.png

Published: images a second of ViT-B, batch 8, on an A100, from `experiments/results.csv` of
https://github.com/pytorch-labs/segment-anything-fast (2023), whose first step is float32. Ours is
`bench/results/nvidia-h200/ladder-segment_anything-eight.json`. Other GPU, other images, other prompts: what can be
compared is what each step is worth over the model as given.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from fettle.measure import Interval
from fettle.page import drawn
from fettle.studies.ladder_chart import figure
from fettle.studies.outcome import Rung

HERE = Path(__file__).parent
PUBLISHED = {"float32": 12.12, "bfloat16": 39.78, "compiled": 54.71, "SDPA": 73.16, "fused attention": 85.54,
             "images of one batch nested": 92.12, "int8": 90.35, "2:4 sparse": 81.49}  # fmt: skip
STEPS = ("float32", "SDPA, float32", "bfloat16", "compiled", "fused attention", "exported, CUDA graphs", "prompts too")
"""Ours, in the order of the file."""
PHOTOGRAPHS = 8


def rungs() -> list[Rung]:
    """What was measured on the GPU; of each ratio the lowest and highest round."""
    found = json.loads((HERE / "results" / "nvidia-h200" / "ladder-segment_anything-eight.json").read_text())
    return [
        Rung(
            label, recipe, True, "measured", "",
            Interval(statistics.median(one["speedups"]), min(one["speedups"]), max(one["speedups"])),
            PHOTOGRAPHS / statistics.median(one["seconds"]), one["peak_bytes"], 1 - one["metric"],
        )
        for label, (recipe, one) in zip(STEPS, found["recipes"].items(), strict=True)
    ]  # fmt: skip


def main() -> None:
    published = {step: speed / PUBLISHED["float32"] for step, speed in PUBLISHED.items()}
    made = figure("ladder", "Segment Anything, ViT-B, eight photographs at once", rungs(), published)
    assert made is not None
    drawn.write(HERE.parent / "docs" / "pictures" / "sam-ladder.png", str, lambda: made.spec, 720)
    print(made.alt)


if __name__ == "__main__":
    main()
