"""What one run of load on a server showed: percentiles with intervals, errors by kind, Little's law, plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fettle.estimates import student
from fettle.files import plain
from fettle.load.texts import BROKEN
from fettle.measure import Load

LOST, UNANSWERED, UNREACHED = 0, -1, -2
KINDS = {BROKEN: "the text broke off", LOST: "connection lost", UNANSWERED: "no answer", UNREACHED: "no connection"}
"""What stands in the place of a status where there was no answer."""
BATCHES = 10
"""The stretches that the steady part is cut into, for an interval of what it shows."""
LITTLE = 0.1
"""A run whose count of requests differs by this share from what Little's law says is void."""


@dataclass(frozen=True)
class TextLimits:
    """What users of a server that writes texts may wait, in seconds; 0: any time."""

    ttft_s: float = 0.0
    """For the first token."""
    itl_s: float = 0.0
    """For each after it."""


@dataclass(frozen=True)
class Text:
    """One text that was written: when it was due, and whole, in seconds from the start of the run."""

    due_s: float
    done_s: float
    moments: np.ndarray[Any, Any]
    """When its pieces came."""
    prompt_tokens: int
    tokens: int

    @property
    def gaps_s(self) -> np.ndarray[Any, Any]:
        """Between two pieces: the inter-token latency."""
        return np.diff(self.moments)

    @property
    def ttft_s(self) -> float:
        """Time to the first token, from when the request was due."""
        return float(self.moments[0] if len(self.moments) else self.done_s) - self.due_s

    def within(self, limits: TextLimits) -> bool:
        """Whether its first token, and 99% of the gaps between the others, came in time."""
        gaps = self.gaps_s
        slow = limits.itl_s and len(gaps) and float(np.percentile(gaps, 99)) > limits.itl_s
        return not slow and not (limits.ttft_s and self.ttft_s > limits.ttft_s)


@dataclass
class Run:
    """What one run on a server showed. Times in seconds; latencies are those of the steady part, in due order."""

    mode: str
    """``open`` or ``closed``."""
    rate: float
    """Requests a second that were due; of a closed loop those that were answered."""
    duration_s: float
    """Length of the steady part."""
    latency_s: np.ndarray[Any, Any]
    """Latency of the answered requests: from due (open) or sent (closed) to the last byte."""
    concurrency: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    """Answers by HTTP status in the steady part; below 1: `KINDS`."""
    limit_s: float = 0.0
    late_s: float = 0.0
    """99th percentile of how late requests were sent."""
    warm_up_s: float = 0.0
    """What was left out at the beginning."""
    mean_inflight: float = 0.0
    """Requests on their way, on average: of a count that each that is sent raises and each that ends lowers."""
    expected_inflight: float = 0.0
    """The same by Little's law: requests a second times the mean time of one, from when it was sent."""
    stable: bool = True
    void: str = ""
    """Why nothing may be concluded; empty where something may."""
    interrupted: bool = False
    done_s: np.ndarray[Any, Any] = field(default_factory=lambda: np.array([]))
    """When each of `latency_s` was answered, from the start of the run."""
    texts: list[Text] = field(default_factory=list)
    """For a server that writes texts, in the order of `latency_s`."""
    limits: TextLimits = TextLimits()
    refusal: str = ""
    """What a server first said that would not write a text."""
    load: Load = field(default_factory=Load)
    """What others than the client, and than a server on the same machine, took of it meanwhile."""

    @property
    def answered(self) -> int:
        """Requests that were answered with success."""
        return self.statuses.get(200, 0)

    @property
    def shed(self) -> int:
        """Requests that the server refused because it was full."""
        return self.statuses.get(429, 0) + self.statuses.get(503, 0)

    @property
    def failed(self) -> int:
        """Requests that were neither answered nor refused."""
        return sum(self.statuses.values()) - self.answered - self.shed

    @property
    def throughput(self) -> float:
        """Successful answers a second."""
        return self.answered / self.duration_s if self.duration_s else 0.0

    @property
    def goodput(self) -> float:
        """Successful answers within the limit, a second."""
        good = int(self._good.sum())
        return good / self.duration_s if self.duration_s else 0.0

    @property
    def _good(self) -> np.ndarray[Any, Any]:
        """Which of `latency_s` were within the limits."""
        good = self.latency_s <= (self.limit_s or math.inf)
        return good & [text.within(self.limits) for text in self.texts] if self.texts else good

    @property
    def within(self) -> float:
        """Share of all requests that were answered within the limit."""
        total = sum(self.statuses.values())
        return int(self._good.sum()) / total if total else 0.0

    @property
    def mean_s(self) -> float:
        """Mean of the latency; NaN where nothing was answered."""
        return float(self.latency_s.mean()) if len(self.latency_s) else math.nan

    def ttft_s(self, percent: float) -> float:
        """Percentile of the time to a text's first token; NaN where there is none."""
        times = [text.ttft_s for text in self.texts]
        return float(np.percentile(times, percent)) if times else math.nan

    def itl_s(self, percent: float) -> float:
        """Percentile of the time between two tokens, of all gaps of all texts; NaN where there is none."""
        gaps = np.concatenate([text.gaps_s for text in self.texts]) if self.texts else np.array([])
        return float(np.percentile(gaps, percent)) if len(gaps) else math.nan

    @property
    def tokens_per_s(self) -> float:
        """Tokens that were written, a second."""
        return sum(text.tokens for text in self.texts) / self.duration_s if self.duration_s else 0.0

    @property
    def missed(self) -> bool:
        """Whether the limits on texts were not kept at the 99th percentile, or too few texts were answered."""
        limits = self.limits
        if not (limits.ttft_s or limits.itl_s):
            return False
        slow = (limits.ttft_s and not self.ttft_s(99) <= limits.ttft_s) or (
            limits.itl_s and self.itl_s(99) > limits.itl_s
        )
        return bool(slow) or self.answered < 0.99 * sum(self.statuses.values())

    @property
    def held(self) -> bool:
        """Whether it kept its limits: a steady state, nothing failed or refused, and the 99th percentiles within."""
        late = self.limit_s and not self.percentile(99) <= self.limit_s
        return bool(self.stable and self.answered and not (self.failed or self.shed or late or self.missed))

    def percentile(self, percent: float) -> float:
        """A percentile of the latency; NaN where nothing was answered."""
        return float(np.percentile(self.latency_s, percent)) if len(self.latency_s) else math.nan

    def interval(self, percent: float) -> tuple[float, float] | None:
        """95% interval around a percentile by sectioning: answers near in time are alike, batches far apart hardly are.

        None where a batch would hold too few answers to have such a percentile.
        """
        if not self._suffices(percent):
            return None
        middle = self.percentile(percent)
        parts = [float(np.percentile(part, percent)) for part in np.array_split(self.latency_s, BATCHES)]
        error = math.sqrt(sum((part - middle) ** 2 for part in parts) / (BATCHES - 1) / BATCHES)
        half = student(BATCHES - 1, 0.05) * error
        return max(middle - half, float(np.min(self.latency_s))), middle + half

    def _suffices(self, percent: float) -> bool:
        """Whether each batch holds enough answers to have such a percentile."""
        return len(self.latency_s) >= BATCHES * max(10.0, 1.0 / (1.0 - percent / 100.0))

    def batches(self) -> dict[str, list[float]]:
        """The steady part in stretches of equal length, and what each shows: the units of a comparison of two runs.

        A percentile is left out where a stretch would hold too few answers to have it.
        """
        figures: dict[str, list[float]] = {"p50_ms": [], "p99_ms": [], "throughput": []}
        for percent in (50, 99):
            if self._suffices(percent):
                parts = np.array_split(self.latency_s, BATCHES)
                figures[f"p{percent}_ms"] = [float(np.percentile(part, percent)) * 1e3 for part in parts]
        if len(self.done_s) >= 10 * BATCHES:
            edges = np.linspace(self.done_s.min(), self.done_s.max() + 1e-9, BATCHES + 1)
            figures["throughput"] = (np.histogram(self.done_s, edges)[0] / np.diff(edges)).tolist()
        return figures

    @property
    def little(self) -> float:
        """Requests counted on their way over rate times mean time: 1 where the run is consistent (Little's law)."""
        return self.mean_inflight / self.expected_inflight if self.expected_inflight else math.nan

    @property
    def errors(self) -> dict[str, int]:
        """How many were not answered with success, by kind in words."""
        kinds = {KINDS.get(status, f"HTTP {status}"): count for status, count in sorted(self.statuses.items())}
        return {kind: count for kind, count in kinds.items() if kind != "HTTP 200"}


def warm_up(values: np.ndarray[Any, Any]) -> int:
    """How many values at the beginning to leave out: the cut that makes the standard error of the rest's mean least.

    MSER (White 1997, "An effective truncation heuristic for bias reduction in simulation output"), on means of five,
    cutting half of them at most.
    """
    group = max(5, len(values) // 2000)
    count = len(values) // group
    if count < 10:
        return 0
    means = values[: count * group].reshape(count, group).mean(1)
    rest = np.arange(count, 0, -1)
    total, squares = means[::-1].cumsum()[::-1], (means**2)[::-1].cumsum()[::-1]
    error = (squares / rest - (total / rest) ** 2) / rest
    return int(np.argmin(error[: max(1, count // 2)])) * group


def as_data(run: Run) -> dict[str, Any]:
    """The run as plain data that JSON can hold: what is not known is None."""
    data: dict[str, Any] = plain({
        "mode": run.mode, "rate": run.rate, "concurrency": run.concurrency, "duration_s": run.duration_s,
        "warm_up_s": run.warm_up_s, "answered": run.answered, "shed": run.shed, "failed": run.failed,
        "statuses": run.statuses, "errors": run.errors, "throughput": run.throughput, "goodput": run.goodput,
        "within_limit": run.within, "limit_ms": run.limit_s * 1e3,
        "latency_ms": {f"p{p}": run.percentile(p) * 1e3 for p in (50, 90, 95, 99, 100)},
        "mean_ms": run.mean_s * 1e3,
        "intervals_ms": {f"p{p}": _ms(run.interval(p)) for p in (50, 90, 95, 99)},
        "p99_interval_ms": _ms(run.interval(99)), "late_ms": run.late_s * 1e3, "little": run.little,
        "mean_inflight": run.mean_inflight, "stable": run.stable, "void": run.void, "interrupted": run.interrupted,
        "batches": run.batches(), "refusal": run.refusal, "is_quiet": run.load.is_quiet, "load": run.load,
        **({"texts": _texts(run)} if run.texts else {}),
    })  # fmt: skip
    return data


def _ms(ends: tuple[float, float] | None) -> list[float] | None:
    return [end * 1e3 for end in ends] if ends else None


def _texts(run: Run) -> dict[str, Any]:
    """What a run on a server that writes texts shows."""
    percents = (50, 90, 95, 99, 100)
    return {
        "ttft_ms": {f"p{p}": run.ttft_s(p) * 1e3 for p in percents},
        "itl_ms": {f"p{p}": run.itl_s(p) * 1e3 for p in percents},
        "ttft_limit_ms": run.limits.ttft_s * 1e3, "itl_limit_ms": run.limits.itl_s * 1e3,
        "tokens_per_s": run.tokens_per_s, "tokens": sum(text.tokens for text in run.texts),
        "prompt_tokens": sum(text.prompt_tokens for text in run.texts) or None,
    }  # fmt: skip
