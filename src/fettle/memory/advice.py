"""Which allocator setting would help here, and when not to use it?

Settings are those of ``PYTORCH_ALLOC_CONF`` (and ``PYTORCH_CUDA_ALLOC_CONF``, which wins where both are set). Every
piece of advice names the evidence, the most it can bring, and the cases in which it does harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fettle.memory.churn import Churn
from fettle.memory.fragmentation import Fit, Pool
from fettle.memory.leaks import LeakReport
from fettle.memory.snapshot import Snapshot
from fettle.units import count_text, size_text

_MUCH = 0.10
_MUCH_BYTES = 256 << 20
"""Below this no setting is worth it, whatever the share."""

EXPANDABLE_NOT_WHEN = (
    "CUDA tensors are shared between processes (IPC, custom all-reduce kernels)",
    "a CUDAPluggableAllocator or a torch.cuda.MemPool is in use",
    "CUDA graphs with private pools are captured, unless your version is known to support both",
)


@dataclass(frozen=True)
class Advice:
    """One change, with its reason and its limits."""

    setting: str
    """As it is written in the environment variable, or the change of code."""
    why: str
    at_most_bytes: int
    """The most it could free or stop moving; 0 where it saves time, not memory."""
    not_when: tuple[str, ...]


def advise(
    snapshot: Snapshot, pools: Sequence[Pool], churn: Sequence[Churn], leaks: LeakReport, fit: Fit | None
) -> tuple[Advice, ...]:
    """What to change, the surest first; empty for a healthy snapshot and for memory without a caching allocator."""
    if snapshot.allocator == "cpu":
        return ()
    advice = [_stop_emptying(row) for row in churn if row.cause == "empty_cache" and row.share_of_reserved >= _MUCH]
    advice += [_threshold(row) for row in churn if row.cause == "gc_threshold" and row.share_of_reserved >= _MUCH]
    expandable = _expandable_segments(snapshot, pools, churn, leaks, fit)
    advice += [expandable] if expandable else []
    advice += [_round_up(row) for row in churn if row.cause == "shapes" and not _rounds_up(snapshot)]
    return (*advice, *_rounding(snapshot, pools))


def _stop_emptying(churn: Churn) -> Advice:
    took = f" in {churn.duration_ms / 1000:.2f} s" if churn.duration_ms is not None else ""
    return Advice(
        f"remove empty_cache() at {churn.own_line}",
        f"it gave back {count_text(churn.freed_segments, 'segment')} ({size_text(churn.freed_bytes)}), and "
        f"{churn.allocated_segments} ({size_text(churn.allocated_bytes)}) were fetched again{took}; "
        f"{churn.same_sizes:.0%} of the sizes came back",
        0,
        ("another process needs this device's memory between the two phases",),
    )


def _threshold(churn: Churn) -> Advice:
    return Advice(
        "garbage_collection_threshold: raise or unset",
        f"it freed {count_text(churn.freed_segments, 'segment')} ({size_text(churn.freed_bytes)}), wanted again later",
        0,
        ("the device is shared, and the others need the memory",),
    )


def _expandable_segments(
    snapshot: Snapshot, pools: Sequence[Pool], churn: Sequence[Churn], leaks: LeakReport, fit: Fit | None
) -> Advice | None:
    """Worth it when free memory is stuck between blocks in use, and it is not on already."""
    if snapshot.expands:
        return None
    reserved = sum(pool.reserved_bytes for pool in pools)
    stuck = sum(pool.non_releasable_bytes for pool in pools if pool.pool == (0, 0))
    reasons = []
    if reserved and stuck >= _MUCH * reserved and stuck >= _MUCH_BYTES:
        reasons.append(f"{size_text(stuck)} ({stuck / reserved:.0%} of reserved) is free but stuck in segments in use")
    if fit is not None and fit.fragmented and fit.answer in ("no", "unknown", "after_release"):
        reasons.append(
            f"a request of {size_text(fit.request_bytes)} finds {size_text(fit.free_bytes)} free, "
            f"in pieces of {size_text(fit.largest_free_bytes)} at most"
        )
    if any(leak.kind == "fragmentation" for leak in leaks.leaks):
        reasons.append("reserved memory grows from step to step while tensors do not")
    if any(row.cause in ("shapes", "near_full") for row in churn):
        reasons.append("segments of new sizes keep being fetched")
    if not reasons:
        return None
    private = any(pool.pool != (0, 0) for pool in pools)
    caution = ("this snapshot has private pools: CUDA graphs or MemPools are in use here",) if private else ()
    return Advice("expandable_segments:True", "; ".join(reasons), stuck, (*caution, *EXPANDABLE_NOT_WHEN))


def _rounds_up(snapshot: Snapshot) -> bool:
    return any(key.startswith("roundup_power2_divisions[") for key in snapshot.settings)


def _round_up(churn: Churn) -> Advice:
    return Advice(
        "roundup_power2_divisions:8",
        f"{churn.allocated_segments} segments were fetched for new sizes after warm-up, most at {churn.own_line}; "
        "rounded to eighths of powers of two, sizes that are near each other share their blocks",
        0,
        ("memory is the limit: rounding costs up to an eighth", "the inputs can be padded to a few shapes instead"),
    )


def _rounding(snapshot: Snapshot, pools: Sequence[Pool]) -> list[Advice]:
    """Rounding to divisions of powers of two is a choice; say what it costs when it costs much."""
    if not _rounds_up(snapshot):
        return []
    allocated = sum(pool.allocated_bytes for pool in pools)
    lost = allocated - sum(pool.requested_bytes for pool in pools)
    if not allocated or lost < _MUCH * allocated or lost < _MUCH_BYTES:
        return []
    return [
        Advice(
            "roundup_power2_divisions: more divisions, or unset",
            f"rounding costs {size_text(lost)} ({lost / allocated:.0%} of allocated)",
            lost,
            ("sizes vary from step to step and the rounding keeps them alike",),
        )
    ]
