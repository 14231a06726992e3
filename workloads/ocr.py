"""Reading a page: text detector, boxes by host code, crops of different widths, a CRNN that reads them: a pipeline of
two parts, trained here on pages that are rendered from fonts.

The detector is a small feature pyramid that says for each 4 x 4 pixels whether they lie within a word; its connected
regions are the words (as in DBNet, without the learned threshold). Each word is cut out, made 32 pixels high and read
by convolutions and an LSTM in both directions, whose symbols are decoded by CTC. All crops of a page are one batch, as
wide as the widest; a mask says where a row ends, and each row is read as it would be alone.

Weights are trained when they are first asked for (about three minutes of one core; `python workloads/ocr.py` does only
that) and kept in the cache folder. Pages are text out of Python's own documentation in DejaVu, with noise, shades and
letters of different sizes; the metric is 1 - the character error rate on pages that neither training nor
calibration has seen.
"""

import random
import re
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from _shared import errors, training_precision, with_weights
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage
from torch import nn

SYMBOLS = "\0abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;()_-'\""
"""What is read; the first is CTC's blank."""
HEIGHT, MARGIN, INSIDE = 32, 0.2, 0.12
"""Height of a crop; shares of a word's height that its region leaves out above and below, and at both ends."""


def block(before: int, after: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU())


class Detector(nn.Module):
    """Pages, rows x 1 x height x width, to logits of a word at each 4 x 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.quarter = nn.Sequential(block(1, 16, 2), block(16, 32, 2), block(32, 32))
        self.eighth = nn.Sequential(block(32, 64, 2), block(64, 64))
        self.sixteenth = nn.Sequential(block(64, 96, 2), block(96, 96))
        self.across = nn.ModuleList(nn.Conv2d(width, 64, 1) for width in (96, 64, 32))
        self.head = nn.Sequential(block(64, 32), nn.Conv2d(32, 1, 1))

    def forward(self, pages):
        quarter = self.quarter(pages)
        eighth = self.eighth(quarter)
        found = self.across[0](self.sixteenth(eighth))
        for finer, across in ((eighth, self.across[1]), (quarter, self.across[2])):
            found = nn.functional.interpolate(found, scale_factor=2.0) + across(finer)
        return self.head(found)[:, 0]


class Recogniser(nn.Module):
    """Crops, rows x 1 x 32 x width, and a mask, rows x width, to logits, rows x width / 4 x symbols.

    Where a row's mask is 0 nothing of it is seen: a row has the answer that it has alone.
    """

    def __init__(self, widths: tuple = (32, 64, 128, 128, 192), hidden: int = 128) -> None:
        super().__init__()
        pools = [(2, 2), (2, 2), (1, 1), (2, 1), (2, 1)]
        self.blocks = nn.ModuleList(block(*pair) for pair in pairwise((1, *widths)))
        self.pools = nn.ModuleList(nn.MaxPool2d(pool) for pool in pools)
        self.onward = nn.LSTM(widths[-1], hidden, batch_first=True)
        self.backward = nn.LSTM(widths[-1], hidden, batch_first=True)
        self.head = nn.Linear(2 * hidden, len(SYMBOLS))

    def forward(self, crops, mask):
        x, seen = crops, mask[:, None, None].to(crops.dtype)
        for convolve, pool in zip(self.blocks, self.pools, strict=True):
            x = pool(convolve(x) * seen)
            seen = seen[..., pool.kernel_size[1] - 1 :: pool.kernel_size[1]]  # what the pooling saw whole
        x = x.mean(2).transpose(1, 2)
        place = torch.arange(x.shape[1], device=x.device)
        lengths = (mask.sum(1) // 4)[:, None]
        turned = torch.where(place < lengths, lengths - 1 - place, place)[:, :, None]
        onward, _ = self.onward(x)
        back, _ = self.backward(x.gather(1, turned.expand(x.shape)))
        return self.head(torch.cat([onward, back.gather(1, turned.expand(back.shape))], -1))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.detector, self.recogniser = Detector(), Recogniser()


@torch.no_grad()
def read(model: nn.Module, page: torch.Tensor) -> dict:
    """The text of a page, 1 x 1 x height x width between 0 (paper) and 1 (ink), line by line, and what it came of."""
    scores = model.detector(page)
    boxes = boxes_of(scores[0].float().cpu())
    if not boxes:
        return {"scores": scores, "boxes": "", "text": ""}
    crops, mask = cut(page, boxes)
    logits = model.recogniser(crops, mask)
    words = decode(logits.argmax(-1).cpu(), (mask.sum(1) // 4).tolist())
    lines = lines_of(boxes)
    text = "\n".join(" ".join(words[place] for place in line if words[place]) for line in lines)
    # boxes as text, since their number may differ from that of another run, which is for the metric to judge
    return {"scores": scores, "boxes": str(boxes), "text": text}


def boxes_of(scores: torch.Tensor) -> list:
    """Left, top, right and bottom of the words, in pixels: the connected regions of scores above 0, grown by what the
    regions leave out."""
    regions, _ = ndimage.label((scores > 0).numpy())
    found = []
    for rows, columns in ndimage.find_objects(regions):
        top, bottom, left, right = (4 * edge for edge in (rows.start, rows.stop, columns.start, columns.stop))
        if bottom - top < 8 or right - left < 4:
            continue
        height = (bottom - top) / (1 - 2 * MARGIN)
        up, out = round(MARGIN * height), round(INSIDE * height) + 1
        limits = (4 * scores.shape[1], 4 * scores.shape[0])
        found.append((max(0, left - out), max(0, top - up), min(limits[0], right + out), min(limits[1], bottom + up)))
    return found


def cut(page: torch.Tensor, boxes: list) -> tuple:
    """The words of a page as one batch, 32 pixels high and padded to the widest, and where each row has something."""
    crops = []
    for left, top, right, bottom in boxes:
        width = 4 * max(2, round((right - left) * HEIGHT / (bottom - top) / 4))
        size = (HEIGHT, min(width, 640))
        crop = page[:, :, top:bottom, left:right]
        crops.append(nn.functional.interpolate(crop, size, mode="bilinear", antialias=True)[0])
    widest = max(crop.shape[-1] for crop in crops)
    batch = page.new_zeros(len(crops), 1, HEIGHT, widest)
    mask = torch.zeros(len(crops), widest, dtype=torch.bool, device=page.device)
    for row, crop in enumerate(crops):
        batch[row, :, :, : crop.shape[-1]] = crop
        mask[row, : crop.shape[-1]] = True
    return batch, mask


def decode(symbols: torch.Tensor, lengths: list) -> list:
    """CTC's best path: repetitions are one symbol, blanks are none."""
    found = []
    for row, length in zip(symbols.tolist(), lengths, strict=True):
        kept = [now for before, now in pairwise([0, *row[:length]]) if now != before and now != 0]
        found.append("".join(SYMBOLS[symbol] for symbol in kept))
    return found


def lines_of(boxes: list) -> list:
    """Numbers of the boxes line by line, from left to right."""
    lines: list[list[int]] = []
    for place in sorted(range(len(boxes)), key=lambda place: boxes[place][1] + boxes[place][3]):
        _, top, _, bottom = boxes[lines[-1][0]] if lines else (0, -1, 0, -1)
        if top <= (boxes[place][1] + boxes[place][3]) / 2 < bottom:
            lines[-1].append(place)
        else:
            lines.append([place])
    return [sorted(line, key=lambda place: boxes[place][0]) for line in lines]


# -- pages -----------------------------------------------------------------------------------------------------------


def fonts() -> list:
    """DejaVu's files: matplotlib's, else the system's."""
    found = find_spec("matplotlib")
    folders = [Path(found.origin).parent / "mpl-data/fonts/ttf"] if found and found.origin else []
    folders += [Path("/usr/share/fonts"), Path("/usr/local/share/fonts"), Path.home() / ".fonts"]
    for folder in folders:
        if files := sorted(path for path in folder.rglob("DejaVuS*.ttf") if "Display" not in path.name):
            return files
    raise SystemExit("no DejaVu fonts: pip install matplotlib")


def vocabulary() -> list:
    from pydoc_data.topics import topics

    words = {word for text in topics.values() for word in text.split() if 2 <= len(word) <= 16}
    return sorted(word for word in words if set(word) <= set(SYMBOLS) and re.search(r"\w\w", word))


def render(seed: int, height: int, width: int) -> tuple:
    """A page as a tensor, 1 x height x width, its text, and its words with their boxes."""
    draw, words, files = random.Random(seed), vocabulary(), fonts()
    paper = draw.randint(200, 255)
    image = Image.new("L", (width, height), paper)
    ink, found, lines, top = ImageDraw.Draw(image), [], [], draw.randint(8, 24)
    while True:
        font = ImageFont.truetype(str(draw.choice(files)), draw.randint(20, 34))
        above, below = font.getmetrics()
        tall = above + below
        if top + tall > height - 8:
            break
        left, line, shade = draw.randint(8, 40), [], draw.randint(0, 90)
        gap = round(tall * draw.uniform(0.4, 0.7))
        while True:
            word = draw.choice(words)
            if draw.random() < 0.2:
                word = "".join(draw.choice(SYMBOLS[1:63]) for _ in range(draw.randint(2, 9)))
            right = left + round(font.getlength(word))
            if right > width - 8:
                break
            ink.text((left, top), word, fill=shade, font=font)
            found.append((word, (left, top, right, top + tall)))
            line.append(word)
            left = right + gap
        lines.append(" ".join(line))
        top += tall + round(tall * draw.uniform(0.05, 0.5))
    noise = torch.Generator().manual_seed(seed)
    page = 1 - torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(1, height, width) / 255
    page = page + draw.uniform(0.01, 0.06) * torch.randn(page.shape, generator=noise)
    page = page + torch.linspace(0, draw.uniform(-0.1, 0.1), width)
    return page.clamp(0, 1), "\n".join(line for line in lines if line), found


def regions(found: list, height: int, width: int) -> torch.Tensor:
    """What the detector should say of a page: 1 within words, without the share of their height that is left out."""
    wanted = torch.zeros(height // 4, width // 4)
    for _, (left, top, right, bottom) in found:
        up, inside = MARGIN * (bottom - top), INSIDE * (bottom - top)
        rows = slice(round((top + up) / 4), round((bottom - up) / 4))
        columns = slice(round((left + inside) / 4), max(round((left + inside) / 4) + 1, round((right - inside) / 4)))
        wanted[rows, columns] = 1
    return wanted


# -- training --------------------------------------------------------------------------------------------------------


def learn(model: nn.Module, steps: int, rate: float, loss) -> None:
    """AdamW over so many batches, in bfloat16 where it is faster; `loss(step)` makes a batch and judges it."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    model.train()
    begun = time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        with training_precision():
            value = loss(step)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49 or step == 9:
            print(f"{type(model).__name__} {step + 1}: {value:.4f}, {time.perf_counter() - begun:.0f} s", flush=True)
    model.eval()


def train(model: Reader, detector_steps: int = 160, recogniser_steps: int = 560, rows: int = 32) -> None:
    draw = random.Random(0)

    def detector_loss(step: int) -> torch.Tensor:
        some = [render(10_000 + 3 * step + row, 320, 320) for row in range(3)]
        wanted = torch.stack([regions(found, 320, 320) for _, _, found in some])
        logits = model.detector(torch.stack([page for page, _, _ in some])).float()
        return nn.functional.binary_cross_entropy_with_logits(logits, wanted)

    pool: list[tuple[str, torch.Tensor]] = []

    def recogniser_loss(step: int) -> torch.Tensor:
        page_number = 50_000 + step
        while len(pool) < 8 * rows:  # words of several pages beside one another
            page, _, found = render(page_number, 480, 480)
            page_number += 1_000_000
            for word, box in found:
                # as unsteady as the detector's boxes are
                tall = box[3] - box[1]
                left, top, right, bottom = (
                    round(edge + draw.gauss(0, 0.05) * tall + grow * 0.06 * tall)
                    for edge, grow in zip(box, (-1, -1, 1, 1), strict=True)
                )
                pool.append((word, (page, (max(0, left), max(0, top), min(480, right), min(480, bottom)))))
        draw.shuffle(pool)
        some = sorted((pool.pop() for _ in range(2 * rows)), key=lambda item: len(item[0]))
        some, rest = some[:rows], some[rows:]
        if step % 2:
            some, rest = rest, some
        pool.extend(rest)
        cuts = [cut(page[None], [box]) for _, (page, box) in some]
        widest = max(crop.shape[-1] for crop, _ in cuts)
        crops = torch.cat([nn.functional.pad(crop, (0, widest - crop.shape[-1])) for crop, _ in cuts])
        mask = torch.cat([nn.functional.pad(one, (0, widest - one.shape[-1])) for _, one in cuts])
        logits = model.recogniser(crops, mask).float().log_softmax(-1).transpose(0, 1)
        wanted = torch.tensor([SYMBOLS.index(letter) for word, _ in some for letter in word])
        sizes = torch.tensor([len(word) for word, _ in some])
        return nn.functional.ctc_loss(logits, wanted, mask.sum(1) // 4, sizes, zero_infinity=True)

    learn(model.detector, detector_steps, 4e-3, detector_loss)
    learn(model.recogniser, recogniser_steps, 4e-3, recogniser_loss)


def trained() -> Reader:
    """The model with its weights, which are trained if they are not in the cache folder."""
    torch.manual_seed(0)
    model = Reader()
    return with_weights(model, train, "ocr-1")


def pipeline(height: int, width: int, device: str, name: str) -> dict:
    model = trained().to(device)
    pages = [render(seed, height, width) for seed in range(8)]
    batches = [(page[None].to(device),) for page, _, _ in pages]

    def letters_read(run) -> float:
        judged = list(zip(batches, pages, strict=True))[4:]
        wrong = sum(errors(run(*batch)["text"], text) for batch, (_, text, _) in judged)
        return 1 - wrong / sum(len(text) for _, (_, text, _) in judged)

    return {
        "model": model,
        "inputs": batches[:4],
        "check_inputs": batches[4:6],
        "call": read,
        "parts": ["detector", "recogniser"],
        "metric": letters_read,
        "name": name,
        "samples": 1,
    }


def workload(device: str = "cpu") -> dict:
    """Pages of 960 x 704 pixels, about 110 words each."""
    return pipeline(960, 704, device, "ocr")


def small(device: str = "cpu") -> dict:
    """The same model on pages of 256 x 320."""
    return pipeline(256, 320, device, "ocr-small")


if __name__ == "__main__":
    trained()
