"""What the process that runs one setting is asked, and what it answers."""

from __future__ import annotations

import msgspec

from fettle.inputs.lint import Lint
from fettle.inputs.setting import Setting
from fettle.procs.child import Request


class Describe(Request, tag="facts"):
    """What does the target make? Answered by `Facts`; the plain loop over it is left open."""

    target: str
    device: str


class Open(Request):
    """Make the pipeline under a setting."""

    target: str
    setting: Setting
    device: str


class TakeSlice(Request, tag="slice"):
    """Run what is open for a while. Answered by a `Slice`."""

    seconds: float


class TimeStep(Request, tag="step"):
    """How long does a step take without loading? Answered in seconds, 0 where the target has no step."""


class FindFaults(Request, tag="lint"):
    """Look for what is wrong beyond the setting. Answered by `Faults`."""

    target: str


class Faults(msgspec.Struct):
    """What is wrong, and what could not be looked for."""

    lints: list[Lint] = []
    notes: list[str] = []


Asked = Describe | Open | TakeSlice | TimeStep | FindFaults
