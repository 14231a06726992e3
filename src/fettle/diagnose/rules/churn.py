"""The rule `churn`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """A device's allocator that gives memory back and fetches it again, after warm-up."""
    counted = seen.allocator
    fetched, retries = counted.get("num_device_alloc", 0), counted.get("num_alloc_retries", 0)
    if not retries and not (fetched and counted.get("num_device_free", 0)):
        return None
    how = f"in {counted['calls']} calls: {fetched} segments fetched, {counted.get('num_device_free', 0)} given back"
    near_full = "lower the peak (a smaller batch, checkpointing), or expandable_segments:True"
    return Finding(
        "churn",
        f"The device is nearly full: {retries} requests in {counted['calls']} calls had to give the cache back first."
        if retries
        else "Calls give device memory back and fetch it again.",
        evidence=(how, f"{retries} requests only after the cache was given back, {counted.get('num_ooms', 0)} failed"),
        advice=near_full if retries else "remove empty_cache() from the loop: the memory is fetched again at once",
        formula="no bound: counters hold no time",
        before="torch.cuda.empty_cache()  # every step",
        after="# let the cache work",
    )
