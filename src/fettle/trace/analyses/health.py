"""Can this trace be trusted? What was skipped or repaired, what is missing, and which answers that makes uncertain."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from fettle.trace.analyses.launches import launch_links
from fettle.trace.analyses.stacks import host_stacks
from fettle.trace.analyses.steps import step_summary, steps
from fettle.trace.intervals import merge, total
from fettle.trace.kinds import Kind, is_graph_launch, is_launch_call
from fettle.trace.model import Trace


@dataclass(frozen=True)
class Finding:
    """One thing about a trace that the reader of its numbers should know."""

    what: str
    count: int
    severity: str  # note, warning (some answers are uncertain), serious (some answers are probably wrong)
    means: str
    affects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Health:
    """The health of one trace; `uncertain` names the analyses whose answers depend on what was found."""

    path: str
    rank: int
    events: int
    kept: int
    span_ns: int
    devices: tuple[int, ...]
    findings: tuple[Finding, ...]

    @property
    def uncertain(self) -> tuple[str, ...]:
        return tuple(sorted({a for f in self.findings if f.severity != "note" for a in f.affects}))

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "uncertain": list(self.uncertain)}


def trace_health(trace: Trace, *, replayed: bool = False) -> Health:
    """Examine one trace; `replayed`: also by replaying it, which takes as long as a what-if."""
    low, high = trace.span
    found = [*_reading(trace), *_links(trace), *_clock(trace), *_steps(trace), *_profiler(trace)]
    if replayed and trace.device_keys:
        found += _replayed(trace)
    return Health(
        str(trace.path),
        trace.rank,
        trace.facts.events_seen,
        trace.events.height,
        high - low,
        tuple(trace.device_keys),
        tuple(f for f in found if f.count),
    )


def _reading(trace: Trace) -> list[Finding]:
    facts = trace.facts
    found = [
        Finding(
            "the file ends in the middle",
            int(facts.truncated),
            "serious",
            "what came later is missing: the last step and device work without launches",
            ("account", "idle", "critical path", "compare"),
        ),
        Finding(
            "events that could not be read",
            facts.skipped_events,
            "warning",
            "they are missing from every answer",
            ("account", "kernels"),
        ),
        Finding(
            "chunks mended (bad UTF-8, control characters or field types)",
            facts.repaired_bytes_chunks,
            "note",
            "names may hold replacement characters",
        ),
        Finding("negative durations", facts.negative_durations, "warning", "counted as 0 ns", ("kernels", "idle")),
        Finding(
            "absurd times (over a day long, or over a week from the others)",
            facts.absurd_times,
            "warning",
            "dropped",
            ("account", "kernels"),
        ),
        Finding("events without start or duration", facts.missing_duration, "note", "dropped"),
        Finding(
            "chunks read with decimal clocks",
            facts.wide_clock_chunks,
            "note",
            "the clock counts from 1970 in fractions: read exactly, slower",
        ),
        Finding(
            f"unknown categories: {', '.join(facts.unknown_categories)[:300]}",
            len(facts.unknown_categories),
            "note",
            "kept, in no analysis",
        ),
    ]
    return [*found, *(Finding(note, 1, "note", "") for note in facts.notes)]


def _links(trace: Trace) -> list[Finding]:
    links = launch_links(trace)
    work = len(links.device_rows)
    unlinked = int((links.launch_rows < 0).sum())
    cut = host_stacks(trace).overlaps_cut
    runtime = np.flatnonzero(trace.kind == Kind.RUNTIME)
    calls = np.unique(links.launch_rows)
    numbered = runtime[trace.column("correlation")[runtime] > 0]
    launching = np.array(["LaunchKernel" in n or "GraphLaunch" in n for n in trace.names], dtype=bool)
    launches = numbered[launching[trace.column("name")[numbered]]]
    lost = int((~np.isin(launches, calls)).sum()) if work else 0
    many = unlinked > 0.05 * work if work else False
    return [
        Finding(
            "device work without a known launch",
            unlinked,
            "warning" if many else "note",
            f"{unlinked} of {work}: its idle gaps cannot be explained, nor its operator named",
            ("idle", "operators", "critical path", "queue") if many else (),
        ),
        Finding(
            "launches whose kernel is not in the trace",
            lost,
            "warning" if lost > 0.02 * len(launches) else "note",
            "dropped buffers, or a trace that ended first: device time may be missing",
            ("account", "kernels") if lost > 0.02 * len(launches) else (),
        ),
        Finding(
            "launches of one kernel with several kernels",
            _shared_numbers(trace),
            "warning",
            "correlation numbers are used twice: work may be given to another launch's operator",
            ("operators",),
        ),
        Finding("host events that overlap without nesting", cut, "note", "cut at the end of the event around them"),
        Finding("no device work in this trace", int(work == 0), "note", "host only: device answers are empty"),
        Finding(
            "no operators in this trace",
            int(not (trace.kind == Kind.OPERATOR).any()),
            "note",
            "kernels cannot be given to operators",
            ("operators",),
        ),
    ]


def _shared_numbers(trace: Trace) -> int:
    """Launch calls, of one kernel each, to whose number several kernels belong."""
    work, calls = launch_links(trace).known
    single = np.array([is_launch_call(n) and not is_graph_launch(n) for n in trace.names], dtype=bool)
    chosen = single[trace.column("name")[calls]] & (trace.kind[work] == Kind.KERNEL)
    return int((np.unique(calls[chosen], return_counts=True)[1] > 1).sum())


def _replayed(trace: Trace) -> list[Finding]:
    from fettle.trace.analyses.whatif import TRUSTED_ERROR, replay_error

    frame = steps(trace)
    error = replay_error(trace, int(frame["start_ns"][0]), int(frame["end_ns"][-1]))
    means = f"the replay with usual waits is off by {abs(error):.1%}: what-if cannot tell"
    off = int(abs(error) > TRUSTED_ERROR)
    return [Finding("waits that nothing in the trace explains", off, "warning", means, ("what-if",))]


def _clock(trace: Trace) -> list[Finding]:
    work, calls = launch_links(trace).known
    early = trace.ts[calls] - trace.ts[work]
    before = early[early > 0]
    worst = int(before.max()) if len(before) else 0
    return [
        Finding(
            "work that starts before its launch",
            len(before),
            "warning" if worst > 10_000 else "note",
            f"host and device clocks differ by up to {worst / 1e3:.1f} us",
            ("idle", "critical path", "queue"),
        ),
        Finding(
            "device streams where two kernels overlap",
            _overlaps(trace),
            "note",
            "one stream cannot run two kernels at once: clock rounding, or programmatic dependent launch",
        ),
    ]


def _overlaps(trace: Trace) -> int:
    rows = trace.device_rows
    rows = rows[trace.kind[rows] == Kind.KERNEL]
    key = trace.column("device")[rows].astype(np.int64) * 2**40 + trace.column("stream")[rows] % 2**40
    count = 0
    for one in np.unique(key):
        mine = rows[key == one]
        count += int((trace.ts[mine][1:] < trace.end[mine][:-1]).any())
    return count


def _steps(trace: Trace) -> list[Finding]:
    frame = steps(trace)
    if frame["step"][0] == -1:
        return [Finding("no steps are marked", 1, "note", "the whole trace counts as one step; call profiler.step()")]
    summary = step_summary(frame)
    outliers = summary["outliers"]
    assert isinstance(outliers, list)
    wall = frame["wall_ns"].to_numpy()
    first_slow = len(wall) > 2 and wall[0] > 1.5 * np.median(wall[1:])
    loading = np.array([c == "compile_or_load" for c in (trace.cause_of_name[k] for k in sorted(trace.cause_of_name))])
    return [
        Finding(
            f"outlying steps: {', '.join(map(str, outliers[:10]))}",
            len(outliers),
            "note",
            "medians are not moved by them, sums are",
        ),
        Finding(
            "the first step is much longer", int(first_slow), "warning", "warm-up: leave it out", ("steps", "compare")
        ),
        Finding(
            "kinds of compilation or module loading inside the trace",
            int(loading.sum()),
            "note",
            "those steps are not the steady state",
        ),
        Finding(
            "step time drifts",
            int(bool(summary["drift_is_clear"])),
            "warning",
            f"{float(summary['drift_ns_per_step']) / 1e3:.1f} us a step: clocks, heat or growing work",  # type: ignore[arg-type]
            ("steps", "compare"),
        ),
    ]


def _profiler(trace: Trace) -> list[Finding]:
    rows = np.flatnonzero(trace.kind == Kind.OVERHEAD)
    low, high = trace.span
    spent = total(merge(trace.ts[rows], trace.end[rows])) if len(rows) else 0
    share = spent / max(high - low, 1)
    host = int(trace.is_host.sum())
    # About 1 us an operator and 0.3 us a Python call is the usual cost of recording them.
    python = int((trace.kind == Kind.PYTHON).sum())
    guess = (host - python) * 1000 + python * 300
    return [
        Finding(
            "profiler overhead events",
            len(rows),
            "warning" if share > 0.02 else "note",
            f"{share:.1%} of the trace's span",
            ("idle", "account") if share > 0.02 else (),
        ),
        Finding(
            "recording itself is likely felt",
            int(guess > 0.05 * max(high - low, 1)),
            "note",
            f"{host} host events: about {guess / 1e6:.1f} ms of their own (an estimate), "
            f"{guess / max(high - low, 1):.0%} of the span; idle time may be the profiler's",
        ),
    ]
