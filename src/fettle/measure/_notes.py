"""What a trial says of torch's compiler, beside the lines of its recipe (`fettle.techniques.Notes`)."""

from __future__ import annotations

import sys

from fettle.techniques import tally
from fettle.units import count_text


def compiler_notes() -> list[str]:
    """Graph breaks, recompiles and skipped CUDA graphs, as torch.compile counted them in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return []
    from torch._dynamo.utils import counters

    notes = []
    breaks = sum(counters["graph_break"].values())
    if breaks:
        reason = next(iter(counters["graph_break"])).strip().splitlines()[0]
        notes.append(f"{count_text(breaks, 'graph break')}, the first: {reason[:120]}")
    frames = counters["frames"]
    if frames.get("total", 0) > frames.get("ok", 0):
        eager = count_text(frames["total"] - frames.get("ok", 0), "frame")
        notes.append(f"{eager} could not be compiled and run eagerly")
    recompiles = sum(counters["recompiles"].values()) if "recompiles" in counters else 0
    if recompiles:
        notes.append(count_text(recompiles, "recompile"))
    skipped = counters["inductor"].get("cudagraph_skips", 0)
    if skipped:
        notes.append(f"CUDA graphs skipped {count_text(skipped, 'time')}")
    return notes


def compile_cache() -> str:
    """Whether what was compiled or converted had been kept: cold, warm, partly warm; empty where nothing was."""
    hits, misses = tally["read"], tally["converted"]
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.utils import counters

        counted = counters["inductor"]
        hits += counted.get("fxgraph_cache_hit", 0)
        misses += counted.get("fxgraph_cache_miss", 0) + counted.get("fxgraph_cache_bypass", 0)
    if not hits and not misses:
        return ""
    return "warm" if not misses else "cold" if not hits else "partly warm"
