"""What rows of a snapshot share: stacks, their frames, and tags, each kept once under a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fettle.memory.snapshot import Frame, Ints

NO_FRAMES: list[object] = []
_MAX_FRAMES = 512
_MAX_TEXT = 1024


class Shared:
    """The tables of one snapshot while it is read. `spend` is told how many things were met, and may refuse more."""

    def __init__(self, spend: Callable[[int], None]) -> None:
        self.spend = spend
        self.stacks: dict[tuple[Frame, ...], int] = {(): 0}
        self.tags: dict[str, int] = {"": 0}
        self._stack_by_id: dict[int, int] = {id(NO_FRAMES): 0}
        self._frames: dict[Frame, Frame] = {}
        self._frame_by_id: dict[int, Frame] = {}
        self._keep: list[object] = [NO_FRAMES]  # what the tables know by id() must stay alive

    def event_stacks(self, events: list[Any]) -> Ints:
        """Frame lists are shared between events: look each up once, by identity."""
        known = self._stack_by_id
        out = []
        for event in events:
            frames = event.get("frames", NO_FRAMES)
            number = known.get(id(frames))
            out.append(self.stack(frames) if number is None else number)
        return np.array(out, np.int64)

    def row_tags(self, rows: list[Any]) -> Ints:
        out = []
        for row in rows:
            tag = row.get("category") or row.get("user_metadata") or ""
            if not isinstance(tag, str):
                tag = ""
            number = self.tags.get(tag)
            out.append(self.tags.setdefault(clean(tag), len(self.tags)) if number is None else number)
        return np.array(out, np.int64)

    def stack(self, frames: object) -> int:
        """The number of a stack, by identity first and by content second."""
        number = self._stack_by_id.get(id(frames))
        if number is not None:
            return number
        if not isinstance(frames, list):
            return 0
        inner = frames[:_MAX_FRAMES]
        self.spend(len(inner))
        number = self.stacks.setdefault(tuple(map(self.frame, inner)), len(self.stacks))
        self._stack_by_id[id(frames)] = number
        self._keep.append(frames)
        return number

    def frame(self, raw: object) -> Frame:
        known = self._frame_by_id.get(id(raw))
        if known is not None:
            return known
        fields: dict[Any, Any] = raw if isinstance(raw, dict) else {}
        name, filename, line = fields.get("name"), fields.get("filename"), fields.get("line")
        frame = Frame(
            clean(name) if isinstance(name, str) else "?",
            clean(filename).replace("\\", "/") if isinstance(filename, str) else "??",
            line if isinstance(line, int) and is_small(line) else 0,
        )
        frame = self._frames.setdefault(frame, frame)
        self._frame_by_id[id(raw)] = frame
        self._keep.append(raw)
        return frame


def is_small(value: object) -> bool:
    return isinstance(value, int) and -(1 << 62) < value < (1 << 62)


def clean(text: str) -> str:
    """Text from outside goes to terminals and pages: no control characters, no lone surrogates, bounded length."""
    text = text[:_MAX_TEXT]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() and not 0xD800 <= ord(c) < 0xE000 else "\ufffd" for c in text)
