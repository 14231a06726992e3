"""The rule `python-loop`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence, Operation
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import OPTIMIZER, about, named, taken


def look(seen: Evidence) -> Finding | None:
    """One source line that calls the same small operator very often: a Python loop over a tensor."""
    stepping = {op.line for op in named(seen, *OPTIMIZER)}
    often = 24 * max(1, seen.loading.batches)  # a loop over a loader's batches is how things are done
    ops = [
        op
        for op in seen.operations
        if op.calls >= often and op.seconds / op.calls < 1e-4 and op.line and op.line not in stepping
    ]
    layers = {op.line for op in seen.operations if op.weights > 8}
    ops = [op for op in ops if op.line not in layers]  # many layers called by one line of a container
    lines: dict[str, list[Operation]] = {}
    for op in ops:
        lines.setdefault(op.line, []).append(op)
    if not lines:
        return None
    calls = {line: sum(op.calls for op in found) for line, found in lines.items()}
    line = max(calls, key=lambda key: calls[key])
    total = sum(op.calls for op in seen.operations)
    if calls[line] < 0.3 * total or any(op.repeated > 0.3 for op in seen.operations):
        return None  # where a sequence is computed again and again, that is the cause
    # The loop is all that runs as often as it turns, and what its function does around it (stack, unbind); one pass
    # over the whole takes at least what one turn took.
    turns = max(op.calls for op in lines[line])
    around = {op.function for op in lines[line] if op.function}
    body = [
        op for op in seen.operations if op.line not in stepping and (op.calls >= 0.5 * turns or op.function in around)
    ]
    host_s = seen.outside_s * sum(op.calls for op in body) / total
    spent = (taken(body) + host_s) * (1 - 1 / turns)
    joining = [op for op in named(seen, "stack", "cat", "unbind", "split") if op not in body]
    return about(
        seen,
        "python-loop",
        f"A Python loop calls small operators {calls[line]} times at {line}.",
        lines[line],
        "replace the loop by one operation on the whole tensor",
        seconds=spent,
        formula="time of all that the loop's lines and function run, less one turn, and of stacking and cutting / call",
        besides=taken(joining),
        before="rows = [net(row) for row in x]",
        after="rows = net(x)",
    )
