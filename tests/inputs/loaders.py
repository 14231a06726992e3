"""Pipelines whose cost is known: they merely wait, or count. Targets of the tests beside this file."""

import hashlib
import io
import itertools
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info


class Rows(Dataset):
    def __init__(self, item, count=256):
        self.item, self.count = item, count

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return self.item(row)


def one(row):
    return torch.ones(4)


def throw_away(row):
    assert len(b"x" * (40 << 20)) == 40 << 20  # so large that the C library always hands it back
    return torch.ones(4)


def wasteful():
    return DataLoader(Rows(throw_away), batch_size=2)


def wait(row):
    time.sleep(0.004)
    return torch.ones(4)


def waiting():
    """32 ms of waiting a batch beside a step of 20 ms."""
    return DataLoader(Rows(wait, 4096), batch_size=8), lambda batch: time.sleep(0.02)


def quick():
    return DataLoader(Rows(one), batch_size=8), lambda batch: time.sleep(0.15)


def named(row):
    return {"x": torch.ones(4), "y": row}


def taken_apart():
    """A step that takes the labels out of its batch."""
    return DataLoader(Rows(named), batch_size=8), lambda batch: batch.pop("y").sum()


def number():
    return 3


def raising():
    raise KeyError("x")


def leaving():
    raise SystemExit(3)


def empty():
    return DataLoader([])


def broken(row):
    if row == 137:
        raise ValueError("cannot be read")
    return torch.ones(1)


def bad_item():
    return DataLoader(Rows(broken), batch_size=16)


def once():
    class Once(IterableDataset):
        rows = iter(range(64))

        def __iter__(self):
            return self.rows

    return DataLoader(Once(), batch_size=4)


def bad_stream():
    class Stream(IterableDataset):
        def __iter__(self):
            return map(broken, range(256))

    return DataLoader(Stream(), batch_size=16)


def hanging(row):
    if get_worker_info() is not None:
        Path(os.environ["MARK"]).write_text(str(os.getpid()))
        time.sleep(300)
    return torch.ones(1)


def hangs():
    return Rows(hanging)


def dying(row):
    if get_worker_info() is not None:
        os._exit(3)
    return torch.ones(1)


def dies():
    return Rows(dying)


def killed(row):
    if get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    return torch.ones(1)


def is_killed():
    return Rows(killed)


def no_memory(row):
    if get_worker_info() is not None:
        raise MemoryError
    return torch.ones(1)


def out_of_memory():
    return Rows(no_memory)


def large(row):
    return torch.ones(4 << 20, dtype=torch.uint8)


def larger_than_shm():
    """8 MiB a batch."""
    return DataLoader(Rows(large), batch_size=2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(200).float())


class Nested(IterableDataset):
    """Reads from a loader that has a worker of its own."""

    def __iter__(self):
        return iter(DataLoader(Stream(), batch_size=None, num_workers=1))


def nested():
    return DataLoader(Nested(), batch_size=8)


class Shared(IterableDataset):
    """Splits itself among the workers, as it should."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return itertools.islice(iter(torch.arange(200).float()), first, None, step)


def hashed(row):
    """Nearly all of it in one built-in function."""
    return float(hashlib.pbkdf2_hmac("sha256", b"%d" % row, b"", 5_000)[0])


def slow(row):
    total = 0
    for i in range(20000):
        total += i
    return torch.ones(1)


class Big(Rows):
    def __init__(self):
        super().__init__(one)
        self.names = [f"a name that is some characters long, number {i}" for i in range(200_000)]

    def __getitem__(self, row):
        return len(self.names[(row * 781) % 200_000])


class Leaking(Rows):
    def __init__(self):
        super().__init__(one)
        self.kept = []

    def __getitem__(self, row):
        self.kept.append(bytes(64_000))
        return row


class Caching(Rows):
    """Keeps each row once: no leak."""

    def __init__(self):
        super().__init__(one)
        self.kept = {}

    def __getitem__(self, row):
        return self.kept.setdefault(row, bytes(64_000))[0]


class Pictures(Rows):
    """JPEG files of 640 x 480 made 128 x 96."""

    def __init__(self, draft=False, kind="JPEG"):
        from PIL import Image

        super().__init__(one, 24)
        file = io.BytesIO()
        Image.effect_noise((640, 480), 40).convert("RGB").save(file, kind)
        self.file, self.draft = file.getvalue(), draft

    def __getitem__(self, row):
        from PIL import Image

        with Image.open(io.BytesIO(self.file)) as image:
            if self.draft:
                image.draft("RGB", (160, 120))
            return torch.frombuffer(bytearray(image.resize((128, 96)).tobytes()), dtype=torch.uint8)


class Batched(Rows):
    def __getitems__(self, rows):
        return [self.item(row) for row in rows]


class WrongBatched(Rows):
    def __getitems__(self, rows):
        return [self.item(row + 1) for row in rows]


def row_number(row):
    return torch.tensor([float(row)])


def in_memory():
    return TensorDataset(torch.arange(64.0).view(32, 2), torch.arange(32))
