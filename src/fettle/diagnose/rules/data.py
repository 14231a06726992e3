"""What the model is fed: loaders, padding, and batches that come twice."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._rule import LEAST, cause, rule
from fettle.units import count_text


@rule("inference", "training")
def data_wait(call: Evidence) -> Finding | None:
    """A loop that waits for its loader."""
    waited = call.share(call.loading.seconds)
    if waited < LEAST:
        return None
    lines = [f"{call.loading.seconds * 1e3:.3g} ms of {call.wall_s * 1e3:.3g} ms a call are spent in it"]
    if call.loading.at_hand_s:
        lines.append(f"the same call with its batches at hand takes {call.loading.at_hand_s * 1e3:.3g} ms")
    return cause(
        f"The loop waits for its DataLoader ({waited:.0%} of a call).",
        bound=max(waited, 1 - call.loading.at_hand_s / call.wall_s if call.loading.at_hand_s else 0.0),
        where=("the DataLoader",),
        evidence=tuple(lines),
        parts=(("in the DataLoader", waited), ("the rest of the call", 1 - waited)),
        advice="workers that persist, cheaper transforms: fettle data TARGET finds the setting",
        formula="1 - call with its batches at hand / call; at least the time in the loader / call",
        before="DataLoader(dataset, batch_size=32)",
        after="DataLoader(dataset, batch_size=32, num_workers=N, persistent_workers=True)",
    )


@rule("inference")
def small_batch(call: Evidence) -> Finding | None:
    """A loader that hands out so few rows that the work around a batch comes once for each."""
    rows, batches = call.loading.rows, call.loading.batches
    if not 0 < rows <= 4 or batches < 16:
        return None
    return cause(
        f"The loader hands out {count_text(rows, 'row')} at a time, {batches} times a call.",
        bound=(1 - call.share(call.ideal_s())) * (1 - 1 / batches),
        where=("the DataLoader",),
        evidence=(f"{call.wall_s / batches * 1e3:.3g} ms for each batch",),
        advice="a larger batch_size: the host's work around a batch is the same for many rows",
        formula="(call - products at the measured peak) x (1 - 1 / batches) / call",
        before=f"DataLoader(dataset, batch_size={rows})",
        after="DataLoader(dataset, batch_size=32)",
    )


@rule("inference", "training")
def padding(call: Evidence) -> Finding | None:
    """Positions that only fill up a batch."""
    if call.padding.share < 0.1:
        return None
    return cause(
        f"{call.padding.share:.0%} of the positions in the inputs are padding.",
        bound=call.padding.share,
        evidence=(f"seen by {call.padding.where}",),
        advice="batch rows of like length together, or use nested tensors",
        formula="padded positions / all positions",
        before="batch = pad_sequence(rows)",
        after="batch = pad_sequence(rows_of_like_length)  # fettle.inputs.bucket_by_length",
    )


@rule("inference", "training")
def duplicate_data(call: Evidence) -> Finding | None:
    """Batches that the model has seen before in the same pass."""
    again, run = call.batches.seen_before, call.batches.run
    if run < 4 or again < 0.2 * run:
        return None
    return cause(
        f"{again} of {run} batches of a call have the same values as an earlier one.",
        bound=again / run,
        evidence=("equal contents, found by hashing what the outermost modules are given",),
        advice="an IterableDataset gives every worker all its rows: divide them by get_worker_info()",
        formula="batches seen before / batches",
        before="def __iter__(self):\n    yield from self.rows",
        after="def __iter__(self):\n    me = get_worker_info()\n    yield from self.rows[me.id :: me.num_workers]",
    )
