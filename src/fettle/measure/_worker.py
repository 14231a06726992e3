"""The worker process: builds the workload, applies one recipe, and answers the parent's requests one at a time.

Started as ``python -m fettle.measure._worker READ_FD WRITE_FD``; requests and answers are lines of JSON. What the
user's code prints goes to the process's own stdout, never into the answers. What the requests are is in `_inference`
and `_training`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from fettle.measure._state import Request, State
from fettle.processes import be_a_worker


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    be_a_worker()
    requests = os.fdopen(int(sys.argv[1]), "rb")
    answers = os.fdopen(int(sys.argv[2]), "wb", buffering=0)
    state = State()
    for line in requests:
        answers.write(msgspec.json.encode(answer_to(state, line)) + b"\n")
    os._exit(0)  # no atexit of compilers and runtimes: nothing here is worth waiting for


def answer_to(state: State, line: bytes) -> dict[str, Any]:
    """Answer one request; what goes wrong is an answer too."""
    request = msgspec.json.decode(line, type=Request)
    try:
        return action(state, request)(state, request)
    except (Exception, SystemExit) as error:
        return explain(error)


def action(state: State, request: Request) -> Callable[[State, Request], dict[str, Any]]:
    """What answers a request; a training loop is built, probed and prepared in its own way."""
    state.mode = request.target.get("mode", state.mode)
    if state.mode == "auto":
        from fettle.train.workload import make

        state.made, state.mode = make(request.target)
    if state.mode == "training":
        from fettle.measure import _training

        return _training.ACTIONS[request.do]
    from fettle.measure import _inference

    return _inference.ACTIONS[request.do]


def explain(error: BaseException) -> dict[str, Any]:
    """An error as the parent will tell it: one line, and the traceback for the log."""
    import torch

    from fettle.errors import UsageError, first_line, place

    if isinstance(error, UsageError):
        return {"kind": "usage", "error": str(error)}
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return {"kind": "memory", "error": f"out of memory: {first_line(error)[:200]}", "trace": traceback.format_exc()}
    text = first_line(error) + place(error)
    cause = error.__cause__
    if cause is not None and "Error" in type(cause).__name__ and str(cause) and str(cause).splitlines()[0] not in text:
        text = f"{text} (from {first_line(cause)})"
    return {"kind": "error", "error": text[:400], "trace": traceback.format_exc()}


if __name__ == "__main__":
    main()
