"""The rule `fresh-memory`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import LEAST


def look(seen: Evidence) -> Finding | None:
    """Memory that the C library hands back to the system after each call, and fetches again for the next."""
    share = seen.share(seen.fresh.seconds)
    if seen.facts.device != "cpu" or share < LEAST or seen.kept.tensors >= 1:  # what is kept must be fetched anew
        return None
    each_us = seen.fresh.seconds / seen.fresh.pages * 1e6
    return Finding(
        "fresh-memory",
        f"{share:.0%} of a call goes into fetching memory from the system that the call before gave back.",
        bound=min(0.999, share),
        evidence=(f"{seen.fresh.pages:.0f} pages a call, {each_us:.2g} us for each, as measured here",),
        levels={"allocator": "keep"} if "glibc" in seen.facts.libraries else {},
        advice="let the C library keep what is freed, or preload jemalloc or tcmalloc",
        formula="pages fetched a call x measured cost of one / call",
        before="for batch in data:\n    step(batch)",
        after="libc = ctypes.CDLL(None)\nlibc.mallopt(-4, 0), libc.mallopt(-1, -1)  # M_MMAP_MAX, M_TRIM_THRESHOLD\n"
        "for batch in data:\n    step(batch)",
        opportunity=True,
    )
