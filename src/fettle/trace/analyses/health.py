"""Can this trace be trusted? What was skipped or repaired, what is missing, and which answers that makes uncertain."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from fettle.trace.analyses.launches import launch_rows, launched_work
from fettle.trace.analyses.stacks import host_stacks
from fettle.trace.analyses.steps import step_summary, steps
from fettle.trace.analyses.whatif import TRUSTED_ERROR, replay_error
from fettle.trace.intervals import merge, total
from fettle.trace.kinds import Kind, host_cause, is_graph_launch, is_launch_call
from fettle.trace.model import Trace

_QUEUE_FULL = "Command Buffer Full"
"""CUPTI's overhead of a launch that waits for room in the queue."""


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
    findings = [*_reading(trace), *_links(trace), _merged(trace), *_clock(trace), *_steps(trace), *_profiler(trace)]
    if replayed and trace.device_keys:
        findings += _replayed(trace)
    return Health(
        str(trace.path),
        trace.rank,
        trace.facts.events_seen,
        trace.events.height,
        high - low,
        tuple(trace.device_keys),
        tuple(f for f in findings if f.count),
    )


def _note(what: str, count: int, means: str) -> Finding:
    return Finding(what, count, "note", means)


def _doubt(what: str, count: int, means: str, affects: str, *, sure: bool = True, serious: bool = False) -> Finding:
    """A finding that makes some analyses (named with commas) uncertain; a mere note where it is not `sure`."""
    if not sure:
        return _note(what, count, means)
    return Finding(what, count, "serious" if serious else "warning", means, tuple(affects.split(", ")))


def _reading(trace: Trace) -> list[Finding]:
    facts, unknown = trace.facts, trace.facts.unknown_categories
    missing = "what came later is missing: the last step and device work without launches"
    answers = "account, idle, critical path, compare"
    return [
        _doubt("the file ends in the middle, or is damaged", int(facts.truncated), missing, answers, serious=True),
        _doubt("events that could not be read", facts.skipped_events, "missing from every answer", "account, kernels"),
        _note("chunks mended (bad UTF-8, control characters or field types)", facts.repaired_bytes_chunks,
              "names may hold replacement characters"),
        _doubt("negative durations", facts.negative_durations, "counted as 0 ns", "kernels, idle"),
        _doubt("absurd times (over a day long, or over a week from the others)", facts.absurd_times, "dropped",
               "account, kernels"),
        _note("events without start or duration", facts.missing_duration, "dropped"),
        _doubt("begins and ends (ph B and E)", facts.begin_end, "not read: missing from every answer",
               "account, kernels"),
        _note("events without a category", facts.uncategorised, "kept, in no analysis"),
        _note("chunks read with decimal clocks", facts.wide_clock_chunks,
              "the clock counts from 1970 in fractions: read exactly, slower"),
        _note(f"unknown categories: {', '.join(unknown)[:300]}", len(unknown), "kept, in no analysis"),
        *(_note(note, 1, "") for note in facts.notes),
    ]  # fmt: skip


def _links(trace: Trace) -> list[Finding]:
    calls, work = launch_rows(trace), len(trace.device_rows)
    unlinked = int((calls < 0).sum())
    runtime = np.flatnonzero(trace.kind == Kind.RUNTIME)
    numbered = runtime[trace.column("correlation")[runtime] > 0]
    launches = numbered[trace.named(lambda name: "LaunchKernel" in name or "GraphLaunch" in name, numbered)]
    lost = int((~np.isin(launches, calls)).sum()) if work else 0
    operators = bool((trace.kind == Kind.OPERATOR).any())
    return [
        _doubt("device work without a known launch", unlinked,
               f"{unlinked} of {work}: its idle gaps cannot be explained, nor its operator named",
               "idle, operators, critical path, queue", sure=unlinked > 0.05 * work),
        _doubt("launches whose kernel is not in the trace", lost,
               "dropped buffers, or a trace that ended first: device time may be missing",
               "account, kernels", sure=lost > 0.02 * len(launches)),
        _doubt("launches of one kernel with several kernels", _shared_numbers(trace),
               "correlation numbers are used twice: work may be given to another launch's operator", "operators"),
        _note("host events that overlap without nesting", host_stacks(trace).overlaps_cut,
              "cut at the end of the event around them"),
        _note("no device work in this trace", int(work == 0), "host only: device answers are empty"),
        _note("no operators in this trace", int(not operators), "kernels cannot be given to operators"),
    ]  # fmt: skip


def _shared_numbers(trace: Trace) -> int:
    """Launch calls, of one kernel each, to whose number several kernels belong."""
    work, calls = launched_work(trace)
    single = trace.named(lambda name: is_launch_call(name) and not is_graph_launch(name), calls)
    chosen = single & (trace.kind[work] == Kind.KERNEL)
    return int((np.unique(calls[chosen], return_counts=True)[1] > 1).sum())


def _merged(trace: Trace) -> Finding:
    """Ranks that were put into one file keep the numbers that each had of its own."""
    calls = np.flatnonzero(trace.kind == Kind.RUNTIME)
    _, of_thread = np.unique([process for process, _ in trace.threads], return_inverse=True)
    process, number = of_thread[trace.column("thread")[calls]], trace.column("correlation")[calls]
    count = len(np.unique(process))
    clash = 0
    if count > 1:
        used = np.unique(np.column_stack([number, process])[number > 0], axis=0)
        clash = len(used) - len(np.unique(used[:, 0])) or _overlaps(trace)
    what = "processes in one file that use the same numbers or streams"
    means = "devices of one number count as one, and work may be given to another's launch: load each rank's own file"
    affects = "account, compare, critical path, idle, kernels, operators, queue, what-if"
    return _doubt(what, count * (clash > 0), means, affects, serious=True)


def _replayed(trace: Trace) -> list[Finding]:
    frame = steps(trace)
    error = replay_error(trace, int(frame["start_ns"][0]), int(frame["end_ns"][-1]))
    means = f"the replay with usual waits is off by {abs(error):.1%}: what-if cannot tell"
    return [_doubt("waits that nothing in the trace explains", int(abs(error) > TRUSTED_ERROR), means, "what-if")]


def _clock(trace: Trace) -> list[Finding]:
    work, calls = launched_work(trace)
    early = trace.ts[calls] - trace.ts[work]
    before = early[early > 0]
    worst = int(before.max(initial=0))
    means = f"host and device clocks differ by up to {worst / 1e3:.1f} µs"
    return [
        _doubt("work that starts before its launch", len(before), means, "idle, critical path, queue",
               sure=worst > 10_000),
        _note("device streams where two kernels overlap", _overlaps(trace),
              "one stream cannot run two kernels at once: clock rounding, or programmatic dependent launch"),
    ]  # fmt: skip


def _overlaps(trace: Trace) -> int:
    rows = trace.device_rows
    rows = rows[trace.kind[rows] == Kind.KERNEL]
    lane = trace.lane(rows)
    order = np.lexsort((trace.ts[rows], lane))
    rows, lane = rows[order], lane[order]
    overlap = (lane[1:] == lane[:-1]) & (trace.ts[rows][1:] < trace.end[rows][:-1])
    return len(np.unique(lane[1:][overlap]))


def _steps(trace: Trace) -> list[Finding]:
    frame = steps(trace)
    if frame["step"][0] == -1:
        return [_note("no steps are marked", 1, "the whole trace counts as one step; call profiler.step()")]
    summary = step_summary(frame)
    outliers, drift = summary["outliers"], summary["drift_ns_per_step"]
    assert isinstance(outliers, list)
    assert isinstance(drift, float)
    wall = frame["wall_ns"].to_numpy()
    first_slow = len(wall) > 2 and wall[0] > 1.5 * np.median(wall[1:])
    loading = sum(cause == "compile_or_load" for cause in trace.cause_of_name.values())
    return [
        _note(f"outlying steps: {', '.join(map(str, outliers[:10]))}", len(outliers),
              "medians are not moved by them, sums are"),
        _doubt("the first step is much longer", int(first_slow), "warm-up: leave it out", "steps, compare"),
        _note("kinds of compilation or module loading inside the trace", loading,
              "those steps are not the steady state"),
        _doubt("step time drifts", int(bool(summary["drift_is_clear"])),
               f"{drift / 1e3:.1f} µs a step: clocks, heat or growing work", "steps, compare"),
    ]  # fmt: skip


def _profiler(trace: Trace) -> list[Finding]:
    rows = np.flatnonzero(trace.kind == Kind.OVERHEAD)
    # A launch that waits for room in the queue, and a module that is loaded, do so without a profiler too.
    alike = trace.named(lambda name: name == _QUEUE_FULL or host_cause(name, Kind.OVERHEAD) != "profiler", rows)
    rows = rows[~alike]
    span = max(trace.span[1] - trace.span[0], 1)
    share = total(merge(trace.ts[rows], trace.end[rows])) / span
    host, python = int(trace.is_host.sum()), int((trace.kind == Kind.PYTHON).sum())
    # About 1 us an operator and 0.3 us a Python call is the usual cost of recording them.
    guess = (host - python) * 1000 + python * 300
    return [
        _doubt("profiler overhead events", len(rows), f"{share:.1%} of the trace's span", "idle, account",
               sure=share > 0.02),
        _note("recording itself is likely felt", int(guess > 0.05 * span),
              f"{host} host events: about {guess / 1e6:.1f} ms of their own (an estimate), {guess / span:.0%} of the "
              "span; idle time may be the profiler's"),
    ]  # fmt: skip
