"""What a command draws into one file: the page, or its chart alone, by the file's suffix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from fettle.errors import UsageError
from fettle.files import check_writable, write_bytes, write_text
from fettle.page import theme
from fettle.page.blocks import Figure
from fettle.page.shell import draw

_SUFFIXES = (".html", ".png", ".svg")


def check_path(path: Path) -> None:
    """Raises `UsageError` for a suffix that is not drawn, or a place that cannot be written."""
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"{path}: the report is written as .html, .png or .svg")
    check_writable(path)


def write(path: Path, page: Callable[[], str], chart: Callable[[], theme.Spec]) -> None:
    """Write the page (.html, needs no network) or the chart alone (.png, .svg), whole or not at all."""
    check_path(path)
    if path.suffix == ".html":
        write_text(path, page())
    else:
        write_bytes(path, draw(chart(), path.suffix.removeprefix("."), 640))


def write_pictures(figures: Iterable[Figure], folder: Path) -> list[Path]:
    """Write every chart to `folder` as PNG and as SVG, and return the paths of both."""
    written = []
    for figure in figures:
        drawing, picture = (folder / f"{figure.name}{suffix}" for suffix in (".svg", ".png"))
        write_text(drawing, figure.svg())
        write_bytes(picture, theme.png(figure.spec, 640))
        written += [picture, drawing]
    return written
