"""What pages are built of, as data: `blocks.html.j2` makes HTML of it, and escapes every text; and `clean`, which makes
text that came from a model, an exception or a file fit for a terminal, a page and a picture."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

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


@dataclass(frozen=True)
class Still:
    """A chart for a page without scripts."""

    alt: str
    drawings: Mapping[str, str]
    """SVG for wide and for narrow screens, in light and in dark."""


def still(alt: str, draw: Callable[[bool], theme.Spec], wide: int = 800) -> Still:
    """Draw a chart for every screen; `draw` is given whether it is narrow."""
    drawings = {
        f"{tone} {name}": theme.svg(draw(name == "narrow"), width, dark=tone == "dark")
        for tone in ("light", "dark")
        for name, width in (("wide", wide), ("narrow", 300))
    }
    return Still(alt, drawings)


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

    @classmethod
    def of(
        cls, rows: Sequence[Mapping[str, Cell | str]], words: Collection[str], kinds: Sequence[str] = (),
        stack: bool = False,
    ) -> Table:  # fmt: skip
        """Of rows that name their columns, which are numbers but for the `words`."""
        columns = list(rows[0]) if rows else []
        numbers = [name for name in columns if name not in words]
        return cls(columns, [list(row.values()) for row in rows], numbers, kinds=kinds, stack=stack)


_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
T = TypeVar("T")


def clean(value: T) -> T:
    """The same data with every unfit character in every string replaced; line ends and tabs stay.

    Escape sequences would reach the reader's terminal, and a control character in a chart's text ends the process that
    draws it (vl-convert aborts on text that XML cannot hold).
    """
    made: object = value
    if isinstance(value, str):
        made = _UNFIT.sub("\ufffd", value.replace("\r\n", "\n"))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        changed = {name: clean(item) for name, item in fields.items() if not isinstance(item, (int, float, type(None)))}
        made = dataclasses.replace(value, **changed)
    elif isinstance(value, Mapping):
        made = {clean(key): clean(item) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        made = [clean(item) for item in value]
        made = tuple(made) if isinstance(value, tuple) else made
    return made  # type: ignore[return-value]
