"""Text that came from a model, an exception or a file, made fit for a terminal, a page and a picture.

Escape sequences would reach the reader's terminal, and a control character in a chart's text ends the process that
draws it (vl-convert aborts on text that XML cannot hold), so both are replaced before anything is drawn.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TypeVar

_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
T = TypeVar("T")


def clean(value: T) -> T:
    """The same data with every unfit character in every string replaced; line ends and tabs stay."""
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
    return made  # type: ignore[return-value]
