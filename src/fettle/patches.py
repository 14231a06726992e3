"""Methods of other libraries, replaced for as long as they are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is ``wrap(owner.name)`` inside the block; what was inherited is inherited again afterwards."""
    own = vars(owner).get(name)  # as it is stored: a static method, say
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if own is not None:
            setattr(owner, name, own)
        else:
            delattr(owner, name)
