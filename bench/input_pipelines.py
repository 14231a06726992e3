"""Four input pipelines for bench/input_pipeline.py, made from nothing but what lies here: no network, no data set.

The steps of the first three stand for an accelerator's: the processor is free meanwhile.
"""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Jpegs(Dataset):
    """JPEG files in memory, decoded with Pillow and cut to 224 x 224."""

    def __init__(self, count: int = 96) -> None:
        from PIL import Image

        draw = np.random.default_rng(0)
        self.files = []
        for _ in range(count):
            rough = draw.integers(0, 255, (12, 16, 3), dtype=np.uint8)
            picture = Image.fromarray(rough).resize((640, 480), Image.Resampling.BICUBIC)
            file = io.BytesIO()
            picture.save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        with Image.open(io.BytesIO(self.files[row % len(self.files)])) as picture:
            pixels = np.asarray(picture.convert("RGB"))[128:352, 208:432]
        return torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1), row % 10


class Transformed(Dataset):
    """Small pictures under augmentations: noise, a rotation by resampling, colour, normalisation."""

    def __init__(self) -> None:
        self.pictures = np.random.default_rng(0).random((256, 3, 96, 96), dtype=np.float32)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, row: int) -> torch.Tensor:
        draw = np.random.default_rng(row)
        picture = self.pictures[row % 256] + draw.normal(0, 0.05, (3, 96, 96)).astype(np.float32)
        angle = float(draw.uniform(-0.3, 0.3))
        y, x = np.mgrid[-1:1:96j, -1:1:96j]
        turned_x, turned_y = x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)
        columns = np.clip((turned_x + 1) * 47.5, 0, 95).astype(np.int64)
        lines = np.clip((turned_y + 1) * 47.5, 0, 95).astype(np.int64)
        picture = picture[:, lines, columns] * draw.uniform(0.8, 1.2, (3, 1, 1)).astype(np.float32)
        return torch.from_numpy((picture - picture.mean()) / (picture.std() + 1e-6))


class Texts(Dataset):
    """Texts cut into word pieces by a tokenizer that was trained on the sentences beside the workloads."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        self.lines = (Path(__file__).parent.parent / "workloads" / "sentences.txt").read_text("utf-8").splitlines()
        self.tokenizer = Tokenizer(models.BPE(unk_token="?"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["?"], show_progress=False)
        self.tokenizer.train_from_iterator(self.lines, trainer)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, row: int) -> torch.Tensor:
        draw = np.random.default_rng(row)
        text = " ".join(self.lines[i] for i in draw.integers(0, len(self.lines), int(draw.integers(20, 60))))
        return torch.tensor(self.tokenizer.encode(text).ids)


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    """One batch, padded to its longest row."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def decode():
    """Decoding is what takes the time."""
    return DataLoader(Jpegs(), batch_size=16, shuffle=True), lambda batch: time.sleep(0.004)


def transform():
    """Augmentations are what take the time."""
    return DataLoader(Transformed(), batch_size=32, shuffle=True), lambda batch: time.sleep(0.004)


def tokenise():
    """Cutting texts into word pieces is what takes the time."""
    return DataLoader(Texts(), batch_size=32, shuffle=True, collate_fn=pad), lambda batch: time.sleep(0.004)


def memory():
    """Rows that lie in memory: nothing to win by workers."""
    rows = torch.randn(50_000, 64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows, torch.arange(50_000)), batch_size=64, shuffle=True)
