"""Incremental detokenization: tokens in, whole characters out, and none of those that may begin a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BEFORE = 6
"""Tokens of the prompt that are decoded with the first new ones: whether a space stands between depends on them."""


class Detokenizer:
    """One text. Its pieces add up to the decoded text, cut before the first of the stop strings."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = tokenizer.decode, stop
        self._ids = list(prompt[-_BEFORE:])
        self._sent = len(self._ids)
        """How many of them are sent already; the characters of the others depend on them."""
        self._held = ""
        """What may be the beginning of a stop string."""
        self.stopped = False
        """Whether a stop string was met."""

    def add(self, token: int) -> str:
        """The characters that are certain now."""
        self._ids.append(token)
        before, whole = self._decode(self._ids[: self._sent]), self._decode(self._ids)
        # A character may take several tokens: until it is whole, it is decoded as the replacement character.
        if len(whole) <= len(before) or whole.endswith("\ufffd"):
            return ""
        self._ids, self._sent = self._ids[self._sent :], len(self._ids) - self._sent
        return self._certain(whole[len(before) :])

    def end(self) -> str:
        """The text has ended: what was held back."""
        if self.stopped:
            return ""
        before, whole = self._decode(self._ids[: self._sent]), self._decode(self._ids)
        passed = self._certain(whole[len(before) :])
        held, self._held = self._held, ""
        return passed if self.stopped else passed + held

    def _certain(self, text: str) -> str:
        """What of the text no stop string can take any more."""
        if not self._stop:
            return text
        text = self._held + text
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        most = min(len(text), max(map(len, self._stop)) - 1)
        held = next((n for n in range(most, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
