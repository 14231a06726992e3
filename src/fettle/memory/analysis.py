"""Everything that one snapshot says about one device: the questions of this room asked in their order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fettle.errors import UsageError
from fettle.files import plain
from fettle.memory.advice import Advice, advise
from fettle.memory.churn import Churn, find_churn
from fettle.memory.fragmentation import Fit, Pool, pools, would_fit
from fettle.memory.holders import Holder, Spike, holders, spikes
from fettle.memory.invariants import Violation, check
from fettle.memory.leaks import LeakReport, find_leaks
from fettle.memory.moments import state_at
from fettle.memory.replay import Replay, replay
from fettle.memory.snapshot import Action, Frame, Snapshot
from fettle.memory.stacks import StackGroups, describe, group_stacks
from fettle.memory.steps import Steps, find_steps
from fettle.units import count_text, size_text

_FRAMES_IN_JSON = 12


@dataclass(frozen=True)
class Analysis:
    """The answers for one device. Sizes are bytes: requested where tensors are meant, rounded where segments are."""

    snapshot: Snapshot
    device: int
    replay: Replay
    groups: StackGroups
    steps: Steps
    violations: tuple[Violation, ...]
    holders: tuple[Holder, ...]
    unexplained_bytes: int
    """Peak minus the sum over all its holders: zero unless the file contradicts itself."""
    spikes: tuple[Spike, ...]
    leaks: LeakReport
    pools: tuple[Pool, ...]
    """Empty for a CPU timeline, which has no cache."""
    fit: Fit | None
    churn: tuple[Churn, ...]
    advice: tuple[Advice, ...]

    @property
    def reserved_bytes(self) -> int:
        return sum(pool.reserved_bytes for pool in self.pools)

    @property
    def releasable_bytes(self) -> int:
        return sum(pool.releasable_bytes for pool in self.pools)

    @property
    def non_releasable_bytes(self) -> int:
        return sum(pool.non_releasable_bytes for pool in self.pools)

    @property
    def never_used(self) -> float | None:
        """1 - peak in use / peak reserved: what the literature calls fragmentation (GMLake, ASPLOS 2024), here with
        use in requested bytes, so that rounding counts too. None for memory without a cache."""
        peak = self.replay.peak_reserved_bytes
        return 1 - self.replay.peak_bytes / peak if self.pools and peak > 0 else None


def analyse(
    snapshot: Snapshot,
    device: int | None = None,
    *,
    request_bytes: int | None = None,
    device_free_bytes: int | None = None,
    top: int = 10,
) -> Analysis:
    """Answer every question for one device; None takes the device with the most memory at its peak.

    `request_bytes` asks whether such a request would have fitted at the end; without it the last request that failed
    for want of memory is asked about, at the moment it failed, where the trace has one. `UsageError` for a device that
    the snapshot does not know.
    """
    window = replay(snapshot, _choose(snapshot, device))
    device = window.device
    groups = group_stacks(snapshot)
    steps = find_steps(snapshot, window)
    leaks = find_leaks(snapshot, window, groups, steps)
    cached = snapshot.allocator != "cpu"
    if request_bytes is not None and not cached:
        raise UsageError(
            f"{snapshot.name} was taken on a CPU, whose memory has no cache: whether a request fits is not known"
        )
    kinds = pools(snapshot, device) if cached else ()
    churn = find_churn(snapshot, window, steps) if cached else ()
    fit = _fit(snapshot, window, request_bytes, device_free_bytes) if cached else None
    explained = int(window.allocations.size_bytes[window.allocations.alive_at(window.peak_event)].sum())
    return Analysis(
        snapshot=snapshot,
        device=device,
        replay=window,
        groups=groups,
        steps=steps,
        violations=tuple(check(snapshot)),
        holders=holders(snapshot, window, groups, top=top),
        unexplained_bytes=window.peak_bytes - explained,
        spikes=spikes(snapshot, window, groups),
        leaks=leaks,
        pools=kinds,
        fit=fit,
        churn=churn,
        advice=advise(snapshot, kinds, churn, leaks, fit),
    )


def verdict(analysis: Analysis) -> str:
    """The most important answers, in two or three sentences."""
    window = analysis.replay
    sentences = [f"{'Peak ' if window.has_events else ''}{size_text(window.peak_bytes)} in use"]
    if analysis.pools:
        sentences[0] += f", {size_text(window.peak_reserved_bytes)} reserved"
    if not window.has_events:
        sentences[0] += " when it was taken; there are no events in it, so the peak is not known"
    if analysis.holders:
        first = analysis.holders[0]
        held = f"The most of it, {_percent(first.share)}, is held by {first.own_line}"
        named = next((row for row in analysis.holders if row.frames), first)
        if named is not first:
            held += f"; of what has a stack the most, {_percent(named.share)}, by {named.own_line}"
        sentences.append(held)
    for leak in analysis.leaks.leaks:
        sentences.append(f"It grows by {size_text(leak.bytes_per_step)} a step ({leak.kind}): {leak.what_to_do}")
    for row in analysis.churn[:1]:
        if row.share_of_reserved >= 0.1:
            sentences.append(
                f"{size_text(row.freed_bytes)} were given back and fetched again ({row.cause} at {row.own_line})"
            )
    if analysis.non_releasable_bytes >= 0.1 * max(analysis.reserved_bytes, 1):
        sentences.append(f"{size_text(analysis.non_releasable_bytes)} are free but stuck in segments in use")
    if analysis.fit is not None:
        sentences.append(f"Would {size_text(analysis.fit.request_bytes)} more have fitted? {analysis.fit.sentence}")
    if analysis.violations:
        sentences.append(
            f"The file contradicts itself in {count_text(len(analysis.violations), 'place')}: read all this with care"
        )
    return ". ".join(sentences) + "."


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "under 1%"


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Plain data for ``--json``: sizes in bytes, times in the unit of their name, stacks as text, innermost first."""
    window, cached = analysis.replay, bool(analysis.pools)
    as_they_are = (
        "device", "unexplained_bytes", "reserved_bytes", "never_used", "releasable_bytes", "non_releasable_bytes",
        "violations", "holders", "spikes", "leaks", "fit", "churn", "advice",
    )  # fmt: skip
    return {
        "snapshot": analysis.snapshot.name,
        "allocator": analysis.snapshot.allocator,
        "devices": analysis.snapshot.devices,
        "verdict": verdict(analysis),
        "notes": list(analysis.snapshot.notes),
        "events": len(window.trace),
        "start_bytes": window.start_bytes,
        "peak_bytes": window.peak_bytes if window.has_events else None,
        "peak_event": window.peak_event if window.has_events else None,
        "end_bytes": window.end_bytes,
        "frees_from_before_the_window": window.frees_from_before,
        "peak_reserved_bytes": window.peak_reserved_bytes if cached and window.has_events else None,
        "allocated_bytes": sum(pool.allocated_bytes for pool in analysis.pools),
        "largest_free_bytes": max((pool.largest_free_bytes for pool in analysis.pools), default=0),
        "steps": {"count": len(analysis.steps), "source": analysis.steps.source},
        "pools": [
            {**as_plain(row), "utilisation": row.utilisation, "internal": row.internal, "external": row.external}
            for row in analysis.pools
        ],
        "settings": dict(analysis.snapshot.settings),
        **{name: as_plain(getattr(analysis, name)) for name in as_they_are},
    }


def as_plain(value: Any) -> Any:
    """As `fettle.files.plain`, stacks as the text of their first frames."""
    return plain(value, {Frame: describe, tuple: _shortened})


def _shortened(values: tuple[Any, ...]) -> list[Any]:
    is_stack = bool(values) and isinstance(values[0], Frame)
    return [as_plain(value) for value in (values[:_FRAMES_IN_JSON] if is_stack else values)]


def _choose(snapshot: Snapshot, device: int | None) -> int:
    known = snapshot.devices
    if not known:
        raise UsageError(f"{snapshot.name}: holds neither segments nor events, there is nothing to analyse")
    if device is None:
        return max(known, key=lambda number: replay(snapshot, number).peak_bytes) if len(known) > 1 else known[0]
    snapshot.check_device(device)
    return device


def _fit(snapshot: Snapshot, window: Replay, request_bytes: int | None, device_free_bytes: int | None) -> Fit | None:
    """A request that the caller names is asked of the end of the snapshot; one that failed, of its own moment."""
    if request_bytes is not None:
        return would_fit(snapshot, window.device, request_bytes, device_free_bytes=device_free_bytes)
    failed = np.flatnonzero(window.trace.action == Action.OOM)
    if len(failed) == 0:
        return None
    event = int(failed[-1])
    if device_free_bytes is None:
        device_free_bytes = int(window.trace.address[event])
    then = state_at(snapshot, window, event)
    fit = would_fit(
        then or snapshot,
        window.device,
        int(window.trace.size_bytes[event]),
        stream=int(window.trace.stream[event]),
        device_free_bytes=device_free_bytes,
    )
    used, reserved = window.used_bytes, window.reserved_bytes
    if then is not None or (used[event] == used[-1] and reserved[event] == reserved[-1]):
        return fit
    sentence = (
        f"not known: {size_text(window.at(event))} were in use when the request failed, {size_text(window.end_bytes)} "
        "when the snapshot was taken, and what expandable segments were like before is not in it"
    )
    return replace(fit, answer="unknown", sentence=sentence, fragmented=False)
