"""The state file: what a server serves, for its next start."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.files import read_bytes, write_text

log = logging.getLogger("fettle.serve")


class Remembered(msgspec.Struct, frozen=True):
    """A model in the state file."""

    versions: dict[str, str] = {}
    """The folder of each version's package."""
    default: str = ""
    weights: dict[str, float] = {}
    shadow: str = ""
    changed: dict[str, dict[str, Any]] = {}
    """Settings of a version that were set while it ran."""

    def only(self, numbers: set[str]) -> Remembered:
        """These versions, without how requests are divided among them."""
        return Remembered(
            {number: folder for number, folder in self.versions.items() if number in numbers},
            changed={number: settings for number, settings in self.changed.items() if number in numbers},
        )


@dataclass
class StateFile:
    """Where to remember what is served; nowhere without a path."""

    path: Path | None
    starting: bool = False
    """Whether it is still being read: nothing is written to it meanwhile."""
    lost: dict[str, Remembered] = field(default_factory=dict)
    """Versions in it that this start could not load: they stay there for the next one."""

    def read(self) -> dict[str, Remembered]:
        """What it says was served; empty where there is none. Raises `UsageError` for a damaged one."""
        if self.path is None or not self.path.exists():
            return {}
        try:
            return msgspec.json.decode(read_bytes(self.path), type=dict[str, Remembered])
        except ValueError as error:
            raise UsageError(f"the state file {self.path} cannot be read: move it away to start afresh") from error

    def write(self, served: Mapping[str, Remembered]) -> None:
        """Keep what is served, and what was lost."""
        if self.path is None or self.starting:
            return
        state = dict(served)
        for name, lost in self.lost.items():
            now = state.get(name, Remembered())
            still = lost.only(set(lost.versions) - set(now.versions))
            versions, changed = still.versions | now.versions, still.changed | now.changed
            state[name] = msgspec.structs.replace(now, versions=versions, changed=changed)
        try:
            write_text(self.path, json.dumps(msgspec.to_builtins(state), indent=1) + "\n")
        except UsageError as error:  # a full disk must not stop the serving
            log.error("what is served could not be remembered: %s", error)

    def forget(self, name: str, number: str | None) -> bool:
        """Give up a lost version, or all of a model; whether there were any."""
        lost = self.lost.pop(name, Remembered())
        left = lost.only({one for one in lost.versions if number not in (None, one)})
        if left.versions:
            self.lost[name] = left
        return len(left.versions) < len(lost.versions)
