"""What pages are built of, as data: `blocks.html.j2` makes HTML of it, and escapes every text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from fettle.page import theme


@dataclass(frozen=True)
class Figure:
    """One chart, ready to be drawn anywhere."""

    name: str
    """Short, for file names and anchors."""
    title: str
    alt: str
    """What it shows, in words."""
    spec: theme.Spec
    """Vega-Lite, without a configuration, as wide as what holds it."""

    def svg(self, width: int = 640) -> str:
        """As a light SVG."""
        return theme.svg(self.spec, width)

    def png(self, width: int = 640) -> bytes:
        """As a light PNG at twice the resolution."""
        return theme.png(self.spec, width)


@dataclass(frozen=True)
class Still:
    """A chart for a page without scripts."""

    alt: str
    drawings: Mapping[str, str]
    """SVG for wide and for narrow screens, in light and in dark."""


def still(alt: str, draw: Callable[[bool], theme.Spec], wide: int = 800, narrow: int = 300) -> Still:
    """Draw a chart for every screen; `draw` is told whether it is narrow."""
    places = [(tone, name) for tone in ("light", "dark") for name in ("wide", "narrow")]
    return Still(
        alt,
        {
            f"{tone} {name}": theme.svg(draw(name == "narrow"), wide if name == "wide" else narrow, dark=tone == "dark")
            for tone, name in places
        },
    )


@dataclass(frozen=True)
class Cell:
    """One cell of a table, or one line of a list. Where there is nothing but its text, a string does."""

    text: str
    whole: str = ""
    """The whole text where that was cut, shown by pointing at it."""
    code: bool = False
    rest: str = ""
    """What follows the code."""
    tag: str = ""
    """A status, by which it is coloured: winner, rejected, over, failed."""
    notes: Sequence[str] = ()
    """Smaller lines below."""
    bar: float | None = None
    """A share that is drawn below, 0 to 100."""
    stack: Sequence[str] = ()
    """Lines that unfold."""


Row = Sequence[Cell | str]


@dataclass(frozen=True)
class Table:
    """Rows under named columns."""

    columns: Sequence[str]
    rows: Sequence[Row]
    numbers: Collection[str] = ()
    """Columns that hold numbers."""
    caption: str = ""
    more: int = 0
    """Rows that are not shown."""
    kinds: Sequence[str] = ()
    """By row: a status, by which it is coloured (winner, failed), or nothing."""
    stack: bool = False
    """Whether on a phone a row's cells stand below each other."""
