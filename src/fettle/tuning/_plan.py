"""The memory plan of a study on several ranks, made before any parallel strategy is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fettle.errors import UsageError
from fettle.measure import Worker, WorkerError, messages
from fettle.recipe import Recipe
from fettle.result import PlanRow
from fettle.study import Study
from fettle.techniques import uses_ranks

if TYPE_CHECKING:
    from fettle.parallel.plan import Plan


@dataclass(frozen=True)
class MemoryPlan:
    """What the plan predicted, and what it rules out."""

    made: Plan | None = None
    note: str = ""
    """How it was made, or why it could not be."""

    def rules_out(self, recipe: Recipe) -> str:
        """Why the plan says that a recipe cannot fit; empty where it may, or nobody knows."""
        if self.made is None or not uses_ranks(recipe):
            return ""
        from fettle.parallel.study import rules_out

        return rules_out(self.made, recipe.levels)

    def rows(self) -> tuple[PlanRow, ...]:
        """The predictions for the report."""
        if self.made is None:
            return ()
        memory = self.made.device_memory_bytes
        limit = None if memory is None else int(memory * (1 - self.made.headroom))
        return tuple(
            PlanRow(each.strategy, each.peak_bytes, each.parts, limit, each.collectives, each.sent_bytes, each.failed)
            for each in self.made.predictions
        )


def plan_memory(
    worker: Worker, study: Study, ranks: int, nodes: int, device: str, device_memory_bytes: int | None,
    on_progress: Callable[[str], None],
) -> MemoryPlan:  # fmt: skip
    """Plan the parallel strategies over `ranks`, or recall the plan of an earlier run of the study."""
    before = study.note("ranks"), study.note("nodes") or 1
    if ranks > 1 and before[0] is not None and before != (ranks, nodes):
        held = f"{before[0]} ranks" + (f" of {before[1]} nodes" if before[1] > 1 else "")
        raise UsageError(f"the study {study.name!r} holds trials on {held}: choose another `study`")
    if ranks == 1:
        return MemoryPlan()
    study.set_note("ranks", ranks)
    study.set_note("nodes", nodes)
    memory = device_memory_bytes or _memory_of_rank(device, ranks // nodes)
    key = f"plan {ranks} {memory}" if device_memory_bytes else f"plan {ranks}"
    kept = study.note(key)
    if kept is None:
        on_progress(f"planning the memory of {ranks} ranks")
        try:
            planned = worker.ask(messages.MakePlan(ranks, nodes, memory), messages.Planned, 300.0)
            kept = {"plan": msgspec.msgpack.decode(planned.plan), "note": planned.note}
        except (WorkerError, UsageError) as error:
            kept = {"plan": None, "note": f"the memory could not be planned: {error}"}
        study.set_note(key, kept)
    from fettle.parallel.plan import Plan

    return MemoryPlan(msgspec.convert(kept["plan"], Plan | None), kept["note"])


def _memory_of_rank(device: str, each: int) -> int:
    """Bytes that one of the ranks of a node may fill: its GPU, or its share of this machine."""
    import psutil
    import torch

    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(psutil.virtual_memory().total) // each
