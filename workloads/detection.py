"""Detection: a ResNet (transformers' RTDetrResNetBackbone of basic blocks, at half its width), a feature pyramid and
the heads of CenterNet (Zhou et al. 2019: Objects as Points), on images of several sizes with pre- and post-processing,
trained here on shapes that are drawn.

A call takes images of different sizes. They are resized to one size, detected at once, and what scored is given back as
boxes in the pixels of each image. (RT-DETR's own transformer did not learn in the minutes that a workload may take.)

Weights are trained when they are first asked for (about three minutes of one core; `python workloads/detection.py`
does only that) and kept in the cache folder. The metric is the F1 of boxes of the right kind that overlap a drawn one
by half of their union, on images that neither training nor calibration has seen.
"""

import json
import math
import random
import time

import torch
from _shared import training_precision, with_weights
from PIL import Image, ImageDraw
from torch import nn
from transformers import RTDetrResNetBackbone, RTDetrResNetConfig

KINDS = ("circle", "square", "triangle", "star")
SIZE = 256
"""What every image is resized to, in both directions."""


def polygon(kind: str, left: float, top: float, side: float) -> list:
    """Corners of a shape within a square."""
    if kind == "triangle":
        return [(left, top + side), (left + side / 2, top), (left + side, top + side)]
    middle = (left + side / 2, top + side / 2)
    reach = [side / 2 if corner % 2 == 0 else side / 5 for corner in range(10)]
    turns = [math.pi * (corner / 5 - 0.5) for corner in range(10)]
    return [(middle[0] + r * math.cos(a), middle[1] + r * math.sin(a)) for r, a in zip(reach, turns, strict=True)]


def picture(seed: int, height: int, width: int) -> tuple:
    """An image, 3 x height x width from 0 to 1, and its shapes: kind, left, top, right, bottom in pixels."""
    draw = random.Random(seed)
    image = Image.new("RGB", (width, height), tuple(draw.randint(0, 255) for _ in range(3)))
    ink, found = ImageDraw.Draw(image), []
    for _ in range(draw.randint(2, 8)):
        ends = [draw.uniform(0, side) for side in (width, height, width, height)]
        ink.line(ends, tuple(draw.randint(0, 255) for _ in range(3)), 2)
    for _ in range(draw.randint(2, 9)):
        side = draw.uniform(0.12, 0.4) * min(height, width)
        left, top = draw.uniform(0, width - side), draw.uniform(0, height - side)
        box = (left, top, left + side, top + side)
        if any(left < b[3] and b[1] < box[2] and top < b[4] and b[2] < box[3] for b in found):
            continue
        kind, colour = draw.randrange(len(KINDS)), tuple(draw.randint(0, 255) for _ in range(3))
        if KINDS[kind] == "circle":
            ink.ellipse(box, fill=colour, outline=(0, 0, 0))
        elif KINDS[kind] == "square":
            ink.rectangle(box, fill=colour, outline=(0, 0, 0))
        else:
            corners = polygon(KINDS[kind], left, top, side)
            ink.polygon(corners, fill=colour, outline=(0, 0, 0))
            xs, ys = zip(*corners, strict=True)
            box = (min(xs), min(ys), max(xs), max(ys))
        found.append((kind, *box))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(height, width, 3)
    noise = torch.randn(height, width, 3, generator=torch.Generator().manual_seed(seed))
    return (pixels / 255 + 0.03 * noise).clamp(0, 1).permute(2, 0, 1), found


def pixels_of(images: list) -> torch.Tensor:
    """Images of several sizes as one batch of one size."""
    resize = [nn.functional.interpolate(image[None], (SIZE, SIZE), mode="bilinear", antialias=True) for image in images]
    return torch.cat(resize)


class Detector(nn.Module):
    """Pixels, rows x 3 x height x width, to an answer for each 8 x 8 of them: rows x 8 x height / 8 x width / 8. The
    first four are logits of a shape's middle, one a kind; then the middle's place in the cell, and the logarithms of
    the shape's width and height over 32 pixels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width]
        self.backbone = RTDetrResNetBackbone(
            RTDetrResNetConfig(
                embedding_size=width, hidden_sizes=sizes, depths=[2, 2, 2, 2], layer_type="basic",
                out_features=["stage2", "stage3", "stage4"],
            )
        )  # fmt: skip
        self.across = nn.ModuleList(nn.Conv2d(size, 3 * width, 1) for size in sizes[1:])
        self.head = nn.Sequential(
            nn.Conv2d(3 * width, 3 * width, 3, padding=1, bias=False), nn.BatchNorm2d(3 * width), nn.ReLU(),
            nn.Conv2d(3 * width, len(KINDS) + 4, 1),
        )  # fmt: skip
        nn.init.constant_(self.head[-1].bias[: len(KINDS)], -4.0)

    def forward(self, pixels):
        fine, middle, coarse = self.backbone(pixels).feature_maps
        found = self.across[2](coarse)
        for features, across in ((middle, self.across[1]), (fine, self.across[0])):
            found = nn.functional.interpolate(found, scale_factor=2.0) + across(features)
        return self.head(found)


@torch.no_grad()
def detect(model: nn.Module, *images: torch.Tensor) -> dict:
    """The shapes in each image, and the answers of the network they were made of."""
    answers = model.detector(pixels_of(list(images)))
    # as text, since their number may differ from that of another run, which is for the metric to judge
    return {"answers": answers, "found": json.dumps(found_in(answers.float().cpu(), images))}


def found_in(answers: torch.Tensor, images: tuple, least: float = 0.3) -> list:
    """Kind, left, top, right and bottom in pixels of every middle that scored more than its neighbours, by image."""
    scores = answers[:, : len(KINDS)].sigmoid()
    peak = (scores == nn.functional.max_pool2d(scores, 3, 1, 1)) & (scores > least)
    across, down = answers.shape[-1], answers.shape[-2]
    found: list[list] = [[] for _ in images]
    for row, kind, y, x in peak.nonzero().tolist():
        height, width = images[row].shape[-2:]
        inside_x, inside_y, wide, tall = answers[row, len(KINDS) :, y, x].tolist()
        half = [2 * math.exp(min(size, 3.0)) for size in (wide, tall)]  # half of 32 pixels are two cells
        edges = [x + inside_x - half[0], y + inside_y - half[1], x + inside_x + half[0], y + inside_y + half[1]]
        scale = [width / across, height / down] * 2
        found[row].append((kind, *(round(edge * each, 1) for edge, each in zip(edges, scale, strict=True))))
    return found


def overlap(one: tuple, other: tuple) -> float:
    """Intersection over union of two boxes."""
    sides = [max(0.0, min(one[at + 2], other[at + 2]) - max(one[at], other[at])) for at in (0, 1)]
    both = sides[0] * sides[1]
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return both / max(1e-9, sum(areas) - both)


def right(found: list, drawn: list) -> int:
    """How many of the boxes found are a drawn one's, each of which counts once."""
    left, count = list(drawn), 0
    for kind, *box in found:
        match = [item for item in left if item[0] == kind and overlap(tuple(box), item[1:]) >= 0.5]
        if match:
            left.remove(match[0])
            count += 1
    return count


def loss_of(answers: torch.Tensor, drawn: list, sizes: list) -> torch.Tensor:
    """CenterNet's: focal loss of the middles, L1 of places and sizes where a shape's middle is."""
    rows, _, down, across = answers.shape
    heat, chosen, wanted = torch.zeros(rows, len(KINDS), down, across), [], []
    for row, (found, (height, width)) in enumerate(zip(drawn, sizes, strict=True)):
        for kind, *box in found:
            left, top, right, bottom = (
                edge / each for edge, each in zip(box, [width / across, height / down] * 2, strict=True)
            )
            x, y = (left + right) / 2, (top + bottom) / 2
            column, line = min(int(x), across - 1), min(int(y), down - 1)
            spread = max(0.5, min(right - left, bottom - top) / 6)
            far = (torch.arange(down)[:, None] - line) ** 2 + (torch.arange(across) - column) ** 2
            heat[row, kind] = heat[row, kind].maximum((-far / (2 * spread**2)).exp())
            chosen.append((row, line, column))
            wanted.append([x - column, y - line, math.log((right - left) / 4), math.log((bottom - top) / 4)])
    logits = answers[:, : len(KINDS)].float()
    scores, place = logits.sigmoid(), torch.tensor(chosen).T
    yes = (1 - scores) ** 2 * nn.functional.logsigmoid(logits) * (heat == 1)
    no = (1 - heat) ** 4 * scores**2 * nn.functional.logsigmoid(-logits)
    off = answers[place[0], len(KINDS) :, place[1], place[2]].float() - torch.tensor(wanted)
    return -(yes + no).sum() / len(chosen) + off.abs().mean()


def train(model: nn.Module, steps: int = 300, rows: int = 8) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    draw, begun = random.Random(0), time.perf_counter()
    model.train()
    for step in range(steps):
        sizes = [(draw.randint(200, 640), draw.randint(200, 640)) for _ in range(rows)]
        some = [picture(1_000_000 + step * rows + row, *size) for row, size in enumerate(sizes)]
        with training_precision():
            answers = model(pixels_of([image for image, _ in some]))
        loss = loss_of(answers, [found for _, found in some], sizes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49 or step == 9:
            print(f"{step + 1}: {loss:.4f}, {time.perf_counter() - begun:.0f} s", flush=True)


def trained() -> Detector:
    """The model with its weights, which are trained if they are not in the cache folder."""
    torch.manual_seed(0)
    model = Detector()
    return with_weights(model, train, "detection-1")


def pipeline(model: Detector, rows: int, device: str, name: str) -> dict:
    """Batches of so many images."""
    draw = random.Random(1)
    drawn = [
        [picture(number * rows + row, draw.randint(200, 640), draw.randint(200, 640)) for row in range(rows)]
        for number in range(8)
    ]
    batches = [tuple(image.to(device) for image, _ in some) for some in drawn]

    def f1(run) -> float:
        count = found_count = drawn_count = 0
        for some, batch in zip(drawn[4:], batches[4:], strict=True):
            for found, (_, shapes) in zip(json.loads(run(*batch)["found"]), some, strict=True):
                count += right(found, shapes)
                found_count, drawn_count = found_count + len(found), drawn_count + len(shapes)
        return 2 * count / (found_count + drawn_count)

    return {
        "model": nn.ModuleDict({"detector": model}).to(device),
        "inputs": batches[:4],
        "check_inputs": batches[4:6],
        "call": detect,
        "parts": ["detector"],
        "metric": f1,
        "name": name,
        "samples": rows,
    }


def workload(device: str = "cpu") -> dict:
    """Eight images of 200 to 640 pixels a side."""
    return pipeline(trained(), 8, device, "detection")


def small(device: str = "cpu") -> dict:
    """The same model on two images."""
    return pipeline(trained(), 2, device, "detection-small")


if __name__ == "__main__":
    trained()
