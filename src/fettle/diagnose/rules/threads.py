"""The rule `threads`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import CROWDED, LEAST, UNKNOWN


def look(seen: Evidence) -> Finding | None:
    """Fewer threads than cores, or too many."""
    if not seen.operations:
        return None  # threads are the operators': without any, what their number seemed to save is chance
    return _too_few(seen) or _too_many(seen)


def _too_few(seen: Evidence) -> Finding | None:
    """Fewer threads than cores."""
    if seen.facts.device != "cpu" or seen.threads >= seen.cores:
        return None
    saved, low, high = seen.variants.get(f"threads={seen.cores}", UNKNOWN)
    if saved < LEAST or low <= 0:
        return None
    return Finding(
        "threads",
        f"{seen.threads} of {seen.cores} cores are used.",
        bound=high,
        evidence=(f"the same call with {seen.cores} threads took {saved:.0%} less",),
        levels={"threads": str(seen.cores)},
        advice="torch.set_num_threads(number of cores)",
        formula="upper end of what the other number of threads saved when it was tried",
        before=f"torch.set_num_threads({seen.threads})",
        after=f"torch.set_num_threads({seen.cores})",
    )


def _too_many(seen: Evidence) -> Finding | None:
    """More threads than cores, or threads that only wait for each other."""
    if seen.facts.device != "cpu" or (seen.threads <= seen.cores and seen.crowded > CROWDED):
        return None  # threads that wait for cores that other programs take look like threads that wait for each other
    for name, levels in ((f"threads={seen.cores}", {}), ("threads=1", {"threads": "1"})):
        saved, low, high = seen.variants.get(name, UNKNOWN)
        more = seen.threads > seen.cores or name == "threads=1"
        if more and saved > 0.1 and low > 0:
            what = "more than there are cores" if seen.threads > seen.cores else "and they mostly wait for each other"
            wanted = name.partition("=")[2]
            return Finding(
                "threads",
                f"{seen.threads} threads, {what}.",
                bound=high,
                evidence=(f"the same call with {wanted} took {saved:.0%} less",),
                levels=levels,
                advice=f"torch.set_num_threads({wanted})",
                formula="upper end of what the other number of threads saved when it was tried",
                before=f"torch.set_num_threads({seen.threads})",
                after=f"torch.set_num_threads({wanted})",
            )
    return None
