"""The worker process: builds the workload, applies one recipe, and answers the parent's requests one at a time.

What the user's code prints goes to the process's own stdout, never into the answers. What answers a request is
in `_inference` and `_training`.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

from fettle.errors import first_line, place
from fettle.measure._pace import Pace, TooSlow
from fettle.measure._state import State, seed_all
from fettle.measure.messages import Answer, Asked, Build, Prepare
from fettle.procs.child import Failure
from fettle.procs.parent import Parent, be_a_worker, failure_of
from fettle.workload import AUTO


def main(parent: Parent) -> None:
    """Answer requests until the parent goes."""
    state = State(imported_s=parent.imported_s)
    logging.getLogger("optimized").propagate = False  # a trial tells what the lines say

    def answer(request: Asked) -> Answer:
        if parent.node and isinstance(request, Prepare):  # what rank 0 is judged by lies on its node
            request.path = ""
        if isinstance(request, Prepare) and request.longest_ms is not None:
            state.pace = Pace(state.waits, request.longest_ms * 1e6)
        return action(state, request)(state, request)

    parent.serve(Asked, answer, explain)


def action(state: State, request: Asked) -> Callable[[State, Any], Answer]:
    """What answers a request; a training loop is built, probed and prepared in its own way."""
    if isinstance(request, Build):
        state.mode = request.target.mode
        if state.mode == AUTO:
            from fettle.train.workload import make
        state.begin_to_build()
        seed_all(0)
        if state.mode == AUTO:
            state.made, state.mode = make(request.target)
    if state.mode == "training":
        from fettle.measure import _training

        return _training.ACTIONS[type(request)]
    from fettle.measure import _inference

    return _inference.ACTIONS[type(request)]


def explain(error: BaseException) -> Failure:
    """An error as the parent will report it: one line, and the traceback for the log."""
    if isinstance(error, TooSlow):
        return Failure(str(error), "slow")
    failure = failure_of(error)
    if failure.kind == "usage":
        return failure
    trace = traceback.format_exc()
    if failure.kind == "memory":
        return Failure(failure.reason, "memory", trace)
    text = failure.reason + place(error)
    cause = error.__cause__
    if cause is not None and "Error" in type(cause).__name__ and str(cause) and str(cause).splitlines()[0] not in text:
        text = f"{text} (from {first_line(cause)})"
    return Failure(text[:400], trace=trace)


if __name__ == "__main__":
    be_a_worker()
    main(Parent())
