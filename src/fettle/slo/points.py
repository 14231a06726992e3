"""What a search for the best setting is about: settings, what is known of them, and what was found."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from fettle.measure import Load, busy_load
from fettle.package.manifest import Package
from fettle.package.settings import ServeSettings
from fettle.slo.calibrate import Calibration
from fettle.slo.kept import Tested
from fettle.slo.overheads import Overheads
from fettle.slo.simulate import Costs
from fettle.units import count_text


@dataclass(frozen=True)
class Branch:
    """What a cost curve is measured for."""

    workers: int
    threads: int
    device: str = "cpu"
    variant: str = ""
    """Which of the packages; empty where there is one only."""

    def __str__(self) -> str:
        device = f" on {self.device}" if self.device != "cpu" else ""
        variant = f", {self.variant}" if self.variant else ""
        return f"{count_text(self.workers, 'worker')} x {count_text(self.threads, 'thread')}{device}{variant}"


@dataclass(frozen=True, kw_only=True)
class Setting(Branch):
    """One way to serve."""

    max_rows: int
    delay_s: float = 0.0
    buckets: tuple[int, ...] = ()
    """The package's only sizes of a call, where each is compiled for itself."""
    max_queue_rows: int = ServeSettings().max_queue_rows
    """The package's own: rows that may wait, beyond which its server refuses."""

    @property
    def branch(self) -> Branch:
        """The part that costs are measured for."""
        return Branch(self.workers, self.threads, self.device, self.variant)

    def batching(self) -> ServeSettings:
        """For the simulation."""
        return ServeSettings(self.max_rows, self.delay_s * 1e3, self.buckets, self.max_queue_rows, self.workers)

    def __str__(self) -> str:
        delay = f", {self.delay_s * 1e3:.3g} ms delay" if self.delay_s else ""
        return f"{self.branch}, up to {count_text(self.max_rows, 'row')}{delay}"


@dataclass(frozen=True)
class Variant:
    """One package that can serve the model: the model with one recipe."""

    name: str
    package: Package

    @property
    def error(self) -> float:
        """Relative L2 error of its answers against the model as given."""
        return float(self.package.manifest.accuracy.get("relative_error", math.nan))


@dataclass(frozen=True)
class Failure:
    """Something that was tried, or could not be, and why."""

    what: str
    why: str


@dataclass(kw_only=True)
class Proven(ABC):
    """What load tests have shown of a setting."""

    measured: float | None = None
    """Requests a second under the limits; None where no test was made."""
    tests: list[Tested] = field(default_factory=list)

    @property
    @abstractmethod
    def order(self) -> tuple[bool, float, float]:
        """A key to sort by: less is better."""


@dataclass
class Point(Proven):
    """A setting with what was predicted, and what was measured where it was."""

    setting: Setting
    predicted: float
    """Requests a second under the limit, by simulation."""
    simulated: float | None = None
    """The same with costs that were corrected since; None where they were not."""
    predicted_p50_s: float = math.nan
    """The median at that rate."""
    p99_s: float = math.inf
    """By simulation at `SearchResult.reference_rate`."""
    memory_bytes: int = 0
    """Memory of all workers, as calibrated, or as seen in the last load test."""
    error: float = math.nan
    """Relative L2 error of the answers."""
    cost: float | None = None
    """Cost of a million requests at `capacity`, in the unit of the price."""
    front: bool = False
    """Whether no other point is better in one respect and no worse in the others."""

    @property
    def now(self) -> float:
        """Requests a second by simulation with the costs as they are known now, as for every other point."""
        return self.predicted if self.simulated is None else self.simulated

    @property
    def lowest(self) -> float:
        """The lowest rate that was tested."""
        return min((test.rate for test in self.tests), default=math.nan)

    @property
    def p99_at_measured_ms(self) -> float:
        """In the test that showed the measured capacity; infinite where there was none."""
        shown = [test.run["latency_ms"]["p99"] for test in self.tests if test.held and test.rate == self.measured]
        return min(shown, default=math.inf)

    @property
    def order(self) -> tuple[bool, float, float]:
        """Less is better: measured before predicted, more capacity, then less p99 at it.

        Settings that were tested at one rate often keep it both and the next one neither.
        """
        return self.measured is None, -(self.measured or 0.0), self.p99_at_measured_ms

    @property
    def capacity(self) -> float:
        """As measured (0 where no test kept the limit), else as predicted."""
        return self.predicted if self.measured is None else self.measured


@dataclass
class Measured:
    """What is known of one branch."""

    branch: Branch
    calibration: Calibration
    settings: ServeSettings = field(default_factory=ServeSettings)
    """Its package's own."""
    most_rows: float = math.inf
    """Rows of the largest batch to try: where calls have the sizes of buckets, costs may be known of more."""
    overheads: Overheads | None = None
    """Measured with this branch."""
    lender: Measured | None = None
    """Whose overheads are used where none were measured with this one."""
    scale: float = 1.0
    """The factor by which the costs were multiplied after load tests that contradicted them."""

    @property
    def known_overheads(self) -> Overheads | None:
        """What serving adds: as measured with this branch, else with another."""
        return self.overheads or (self.lender.overheads if self.lender is not None else None)

    @property
    def costs(self) -> Costs:
        """For the simulation."""
        samples, rested = (
            {n: tuple(value * self.scale for value in s) for n, s in measured.items()}
            for measured in (self.calibration.samples, self.calibration.rested)
        )
        overheads = msgspec.structs.asdict(self.known_overheads) if self.known_overheads else {}
        return Costs(samples, rested=rested, **overheads)

    @property
    def single_s(self) -> float:
        """What one row alone takes."""
        return self.costs.curve.at(1)


P = TypeVar("P", bound=Proven)


@dataclass(kw_only=True)
class Outcome(Generic[P]):
    """The outcome of a search, whatever is served."""

    rate: float = 0.0
    """What was asked for; 0: as much as possible."""
    headroom: float = 0.0
    """Share of the capacity that has to be left at `rate`."""
    points: list[P] = field(default_factory=list)
    """Best first: measured ones by measurement, then the others by prediction."""
    failures: list[Failure] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    tests: int = 0
    """Load tests that the outcome rests on,"""
    tests_kept: int = 0
    """and how many of them had been made by an earlier run of the same search."""
    loads: list[Load] = field(default_factory=list)
    """What others had of the machine during each of them, and while each cost was measured."""
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def load(self) -> Load:
        """What others had of the machine."""
        return busy_load(self.loads)

    @property
    def best(self) -> P | None:
        """The best measured point that serves anything within the limits."""
        good = [point for point in self.points if point.measured]
        return min(good, key=lambda point: point.order, default=None)

    @property
    def met(self) -> bool:
        """Whether the limits are kept, at the rate that was asked for and with the headroom."""
        return self.best is not None and (1 - self.headroom) * (self.best.measured or 0.0) >= self.rate


@dataclass
class SearchResult(Outcome[Point]):
    """The outcome of a search under a limit on latency."""

    limit_s: float
    branches: dict[Branch, Measured] = field(default_factory=dict)
    reference_rate: float = 0.0
    """Requests a second at which the points' `p99_s` are compared."""
