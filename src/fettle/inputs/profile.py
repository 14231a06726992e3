"""Where a row's time goes, by Python's profiler, and what Pillow was made to do for it."""

from __future__ import annotations

import contextlib
import cProfile
import io
import math
import pstats
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from fettle.errors import is_program
from fettle.inputs.lint import ROWS, Lint, rows_of
from fettle.patches import replaced
from fettle.procs.limits import scheduled_s

_LEAST_S = 2e-4
"""A row that takes less is not worth a profile."""
_PICTURES = 8
_LARGEST_PICTURE = 32 << 20
Place = tuple[str, int, str]


@dataclass
class Pictures:
    """What Pillow did: sizes decoded, how much smaller the result was made, and some of the files."""

    decoded: list[tuple[int, int]] = field(default_factory=list)
    shrunk: list[tuple[float, tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    """Factor by which a picture was made smaller each way, from which size, to which."""
    files: list[tuple[bytes, str]] = field(default_factory=list)


def profile_rows(loader: DataLoader[Any]) -> list[Lint]:
    """The function that takes most of a row's time, and pictures decoded larger than they are used."""
    profiler = cProfile.Profile()
    with _watch_pillow() as pictures:
        rows = rows_of(loader, ROWS)
        count, wall_s, busy_s = 0, 0.0, 0.0
        while True:
            began, used, queued = time.perf_counter(), time.thread_time(), scheduled_s()[1]
            profiler.enable()
            try:
                pair = next(rows, None)
            finally:
                profiler.disable()
            wall_s += time.perf_counter() - began
            busy_s += time.thread_time() - used + scheduled_s()[1] - queued
            if pair is None:
                break
            count += 1
    lints = [slow_function(profiler, count, waits=busy_s < 0.5 * wall_s), decoded_too_large(pictures, count)]
    return [item for item in lints if item is not None]


def slow_function(profiler: cProfile.Profile, count: int, *, waits: bool) -> Lint | None:
    """The function with the largest time of its own, where that is 40% of a row's time or more; whether it computes, or
    `waits` for files, a network or a clock."""
    stats: dict[Place, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    own = {place: row[2] for place, row in stats.items() if row[2] > 0 and not _is_ours(place)}
    total = sum(own.values())
    if not count or not own or total / count < _LEAST_S:
        return None
    place, spent = max(own.items(), key=lambda item: item[1])
    if spent < 0.4 * total:
        return None
    # A built-in function says little without the line of the user that led to it.
    caller = _users_caller(stats, place)
    where = _name(place) if caller is None or caller == place else f"{_name(place)}, called from {_name(caller)}"
    others = sorted(((time, other) for other, time in own.items() if other != place), reverse=True)[:2]
    rest = "; then " + ", ".join(f"{_name(other)} {time / total:.0%}" for time, other in others) if others else ""
    evidence = f"{spent / total:.0%} of {total / count * 1e3:.3g} ms a row, over {count} rows{rest}"
    if waits:
        return Lint(
            "row-waits", f"Most of a row's time is spent waiting in {where}.", evidence,
            "fetch rows concurrently (a thread pool in the dataset's __getitems__), or ahead of time: more workers, a "
            "larger prefetch_factor, a copy on a local disk",
        )  # fmt: skip
    return Lint(
        "slow-transform", f"Most of a row's time goes into {where}.", evidence,
        "make that faster first: do it once beforehand, on whole batches, or in fewer steps",
    )  # fmt: skip


def decoded_too_large(pictures: Pictures, count: int) -> Lint | None:
    """Pictures decoded whole and then made much smaller; for JPEG, what the decoder's own scaling would save."""
    if not pictures.shrunk or not pictures.decoded:
        return None
    factor = statistics.median(item[0] for item in pictures.shrunk)
    if factor < 2:
        return None
    _, source, wanted = sorted(pictures.shrunk)[len(pictures.shrunk) // 2]
    each = source[0] * source[1] / max(1, wanted[0] * wanted[1])
    evidence = (
        f"{len(pictures.shrunk)} pictures over {count} rows, typically {source[0]} x {source[1]} made "
        f"{wanted[0]} x {wanted[1]}: {each:.0f} pixels decoded for each one used"
    )
    advice = "store them once in about the size that is used"
    if jpeg := [data for data, kind in pictures.files if kind in ("JPEG", "MPO")]:
        scale = 2 ** min(3, int(math.log2(factor)))
        whole, draft = _decode_s(jpeg, 1), _decode_s(jpeg, scale)
        evidence += (
            f"; decoding takes {whole * 1e3:.3g} ms, {draft * 1e3:.3g} ms at 1/{scale} in draft mode "
            f"(median of {len(jpeg)} files)"
        )
        advice = (
            f"image.draft('RGB', (w // {scale}, h // {scale})) before the first access decodes a JPEG at 1/{scale} of "
            "its size, or store the pictures smaller"
        )
    return Lint("decoded-too-large", "Pictures are decoded larger than they are used.", evidence, advice)


def _decode_s(files: list[bytes], scale: int) -> float:
    """Median seconds to decode, each file the better of two."""
    from PIL import Image

    times = []
    for data in files:
        tries = []
        for _ in range(2):
            began = time.perf_counter()
            with Image.open(io.BytesIO(data)) as image:
                if scale > 1:
                    image.draft("RGB", (image.width // scale, image.height // scale))
                image.load()
            tries.append(time.perf_counter() - began)
        times.append(min(tries))
    return statistics.median(times)


@contextlib.contextmanager
def _watch_pillow() -> Iterator[Pictures]:
    """Pillow's `load` and `resize` take notes inside the block; nothing where Pillow is not used."""
    pictures = Pictures()
    try:
        from PIL import Image, ImageFile
    except ImportError:
        yield pictures
        return

    def load(original: Any) -> Any:
        def loading(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, "tile", None):  # else it is decoded already
                pictures.decoded.append(self.size)
                if len(pictures.files) < _PICTURES:
                    _keep_file(self, pictures)
            return original(self, *args, **kwargs)

        return loading

    def resize(original: Any) -> Any:
        def resizing(self: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
            self.load()  # `resize` would: the picture's size is known only then
            box = kwargs.get("box") or (args[1] if len(args) > 1 else None)
            source = (box[2] - box[0], box[3] - box[1]) if box else self.size
            if len(size) == 2 and min(size) > 0:
                pictures.shrunk.append((min(source[0] / size[0], source[1] / size[1]), tuple(source), tuple(size)))
            return original(self, size, *args, **kwargs)

        return resizing

    with replaced(ImageFile.ImageFile, "load", load), replaced(Image.Image, "resize", resize):
        yield pictures


def _keep_file(image: Any, pictures: Pictures) -> None:
    """The encoded picture, read from the file that it is about to be decoded from."""
    file: Any = getattr(image, "fp", None)
    with contextlib.suppress(Exception):
        place = file.tell()
        file.seek(0)
        data = file.read(_LARGEST_PICTURE + 1)
        file.seek(place)
        if len(data) <= _LARGEST_PICTURE:
            pictures.files.append((data, str(image.format)))


def _users_caller(stats: dict[Place, Any], place: Place) -> Place | None:
    """Up the callers that took most of the time, the first that is a line of the user's own file."""
    here = place
    for _ in range(12):
        if is_program(here[0]):
            return here
        callers: dict[Place, Any] = stats[here][4] if here in stats else {}
        if not callers:
            return None
        here = max(callers.items(), key=lambda item: item[1][3])[0]
    return None


def _is_ours(place: Place) -> bool:
    return place[0].startswith(__file__.rpartition("/")[0])


def _name(place: Place) -> str:
    return f"{place[2]} at {place[0].rpartition('/')[2]}:{place[1]}" if place[1] else place[2].strip("<>")
