"""Findings from an allocator snapshot, in bytes."""

from __future__ import annotations

from fettle.diagnose.finding import Finding
from fettle.memory import Analysis


def memory_findings(analysis: Analysis) -> list[Finding]:
    """What the memory room found, as findings, the largest first."""
    found = []
    for leak in analysis.leaks.leaks:
        lines = tuple(f"{row.own_line}: {row.count} blocks of {row.size_bytes} bytes" for row in leak.survivors[:3])
        found.append(
            Finding(
                "leak",
                f"Memory grows by {leak.bytes_per_step / 2**20:.1f} MiB a step ({leak.kind}).",
                bound_bytes=int(leak.bytes_per_step * analysis.leaks.steps),
                evidence=lines,
                advice=leak.what_to_do,
            )
        )
    stuck = sum(pool.non_releasable_bytes for pool in analysis.pools)
    reserved = sum(pool.reserved_bytes for pool in analysis.pools)
    if reserved and stuck >= 0.1 * reserved:
        found.append(
            Finding(
                "fragmentation",
                f"{stuck / reserved:.0%} of the reserved memory is free and cannot be given back.",
                bound_bytes=stuck,
                evidence=(f"{stuck >> 20} of {reserved >> 20} MiB",),
                advice="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or fewer distinct sizes",
            )
        )
    for churn in analysis.churn:
        found.append(
            Finding(
                "churn",
                f"Segments are freed and fetched again: {churn.cause}.",
                bound_bytes=0,
                evidence=(f"{churn.freed_segments} freed, {churn.allocated_segments} fetched, at {churn.own_line}",),
                advice=churn.what_to_do,
            )
        )
    for spike in analysis.spikes[:3]:
        lines = tuple(row.own_line for row in spike.contributors[:3])
        found.append(
            Finding(
                "spike",
                f"The peak stands {spike.height_bytes >> 20} MiB above the plateau.",
                bound_bytes=spike.height_bytes,
                evidence=lines,
                advice="split the operation, or checkpoint it",
            )
        )
    return sorted(found, key=lambda finding: finding.weight, reverse=True)
