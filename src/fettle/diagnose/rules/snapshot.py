"""Findings from an allocator snapshot, in bytes."""

from __future__ import annotations

from dataclasses import replace

from fettle.diagnose.finding import Finding
from fettle.memory import Analysis
from fettle.units import size_text

_LARGE_SHARE = 0.1
"""Share of the peak, in use or reserved: a smaller holder, or fewer segments, are not worth a line of their own."""
_STUCK_BYTES = 256 << 20
"""Below this no setting of the allocator is worth it, whatever the share (`fettle.memory` advises none either)."""
_LARGE_BYTES = 64 << 20
"""Likewise, of a few calls that were recorded: what holds the peak of a small model matters little."""


def snapshot_findings(analysis: Analysis, calls: int = 0) -> list[Finding]:
    """What the memory room found, as findings, the largest first; and who holds most of the peak, which is not a fault.

    With `calls` the snapshot is of so many calls of one workload: what was there before is its weights, and what is
    small does not matter.
    """
    if calls:
        analysis = replace(
            analysis,
            spikes=tuple(spike for spike in analysis.spikes if spike.height_bytes >= _LARGE_BYTES),
            holders=tuple(row for row in analysis.holders if row.frames and row.bytes >= _LARGE_BYTES),
        )
    findings = [*_leaks(analysis), *_fragmentation(analysis), *_churn(analysis)]
    findings += _spikes(analysis, calls or len(analysis.steps))
    named = {line for finding in findings for line in finding.where[:1]}
    findings += [holder for holder in _holders(analysis) if holder.where[0] not in named]  # one cause, one finding
    return sorted(findings, key=lambda finding: finding.weight, reverse=True)


def _leaks(analysis: Analysis) -> list[Finding]:
    return [
        Finding(
            "leak",
            f"Memory grows by {size_text(leak.bytes_per_step)} a step ({leak.kind}).",
            bound_bytes=int(leak.bytes_per_step * analysis.leaks.steps),
            where=tuple(row.own_line for row in leak.survivors[:3]),
            evidence=tuple(
                f"{row.own_line}: {row.count} blocks of {size_text(row.size_bytes)}" for row in leak.survivors[:3]
            ),
            advice=leak.what_to_do,
            formula="robust slope of use at the ends of steps x steps",
            before="losses.append(loss)",
            after="losses.append(loss.detach())",
        )
        for leak in analysis.leaks.leaks
    ]


def _fragmentation(analysis: Analysis) -> list[Finding]:
    stuck, reserved = analysis.non_releasable_bytes, analysis.reserved_bytes
    if stuck < max(0.1 * reserved, _STUCK_BYTES):
        return []
    setting, on = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", analysis.snapshot.expands
    return [
        Finding(
            "fragmentation",
            f"{stuck / reserved:.0%} of the reserved memory is free and cannot be given back.",
            bound_bytes=stuck,
            evidence=(f"{size_text(stuck)} of {size_text(reserved)}",),
            parts=(
                ("free and stuck", stuck / reserved),
                ("free, could be given back", analysis.releasable_bytes / reserved),
                ("in use", 1 - (stuck + analysis.releasable_bytes) / reserved),
            ),
            advice="fewer distinct sizes" if on else f"{setting}, or fewer distinct sizes",
            formula="free blocks in segments that hold a block in use",
            before="x = torch.randn(rows, width)  # rows of every batch differ" if on else "python train.py",
            after="x = padded_to_few_sizes(x)" if on else f"{setting} python train.py",
        )
    ]


def _churn(analysis: Analysis) -> list[Finding]:
    return [
        Finding(
            "churn",
            f"{size_text(churn.freed_bytes)} of segments are freed and fetched again: {churn.cause}.",
            where=(churn.own_line,),
            evidence=(f"{churn.freed_segments} freed, {churn.allocated_segments} fetched, at {churn.own_line}",),
            advice=churn.what_to_do,
            formula="no bound: it costs time, which a snapshot does not hold",
            before="torch.cuda.empty_cache()  # every step",
            after="# let the cache work",
        )
        for churn in analysis.churn
        if churn.share_of_reserved >= _LARGE_SHARE  # less is what a program does once, between loading and its loop
    ]


def _spikes(analysis: Analysis, steps: int) -> list[Finding]:
    """A spike of most steps is how the step works: it can be made lower, and nothing is wrong."""
    return [
        Finding(
            "spike",
            f"The peak stands {size_text(spike.height_bytes)} above the plateau.",
            bound_bytes=spike.height_bytes,
            where=tuple(row.own_line for row in spike.contributors[:3]),
            evidence=tuple(f"{row.own_line}: {size_text(row.bytes)}" for row in spike.contributors[:3]),
            parts=tuple((row.own_line, row.bytes / max(spike.top_bytes, 1)) for row in spike.contributors[:3]),
            advice="split the operation, or checkpoint it",
            formula="top of the stretch - median of use",
            before="y = block(x)",
            after="y = torch.cat([block(part) for part in x.chunk(4)])",
            opportunity=spike.count > steps / 2 > 0,
        )
        for spike in analysis.spikes[:3]
    ]


def _holders(analysis: Analysis) -> list[Finding]:
    large = [row for row in analysis.holders if row.share >= _LARGE_SHARE][:1]
    return [
        Finding(
            "peak-holder",
            f"{row.own_line} holds {row.share:.0%} of the peak, {size_text(row.bytes)} (blocks: {row.count}).",
            bound_bytes=row.bytes,
            where=(row.own_line,),
            evidence=tuple(f"{row.own_line}: {size_text(row.bytes)}, {row.share:.0%}" for row in analysis.holders[:5]),
            parts=tuple((row.own_line, row.share) for row in analysis.holders[:5]),
            advice="store it in fewer bits, keep it for a shorter time, or compute it again (activation checkpointing)",
            formula="its requested bytes at the peak",
            before="y = block(x)",
            after="y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
            opportunity=True,
        )
        for row in large
    ]
