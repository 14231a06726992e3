"""Compiling a workload in a process of its own, and telling what happened: compiling leaves nothing behind here.

health = compile_health("model.py:workload")
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import torch

from fettle.diagnose.collectors.compile_watch import is_compiled, watch_compile
from fettle.diagnose.compile_health import CompileHealth
from fettle.errors import first_line, refusing
from fettle.procs.child import Child, ChildError, Request
from fettle.procs.parent import Parent, be_a_worker
from fettle.workload import Target, again, find_target


class Compile(Request):
    """Compile the target and call it on all its inputs, so many times."""

    target: Target
    dynamic: bool | None
    backend: str
    rounds: int


def compile_health(
    target: str | Target,
    *,
    dynamic: bool | None = None,
    backend: str = "inductor",
    rounds: int = 3,
    timeout_s: float = 600.0,
) -> CompileHealth:
    """Compile a workload in a process of its own, call it `rounds` times on each of its inputs, and say what happened.

    A workload whose model is compiled already is run as it is. `backend="aot_eager"` sees the same breaks and
    recompilations in a fraction of the time, and nothing of inductor's cache.

    Raises:
        UsageError: The target cannot be built, or the process ended or ran out of time.
    """
    named = find_target(target) if isinstance(target, str) else target
    request = Compile(named, dynamic, backend, rounds)
    words = "the workload could not be compiled:"
    with Child("fettle.diagnose.compile_worker") as child, refusing(words, ChildError):
        return child.call(request, CompileHealth, timeout_s)


def _compiled(model: Any, request: Compile) -> Any:
    return model if is_compiled(model) else torch.compile(model, dynamic=request.dynamic, backend=request.backend)


def _run(request: Compile) -> CompileHealth:
    """The worker's part: build, compile, call."""
    torch.manual_seed(0)
    workload = request.target.load()
    model: Any = workload.model if workload.parts else _compiled(workload.model, request)
    for part in workload.parts:  # the pipeline itself is only what holds them
        model.set_submodule(part, _compiled(model.get_submodule(part), request))
    failure, calls, first_call_s, settled = [], 0, 0.0, 0
    counters = torch._dynamo.utils.get_compilation_metrics
    with watch_compile() as watch:
        for number, batch in itertools.product(range(request.rounds), workload.inputs):
            started = time.perf_counter()
            try:
                workload.run(model, again(batch))
            except Exception as error:
                failure.append(first_line(error))
                break
            calls += 1
            first_call_s = first_call_s or time.perf_counter() - started
            if number == 0:
                settled = len(counters())
        late = len(counters()) - settled
    health = watch.health(calls=calls, first_call_s=first_call_s, steady_recompiles=max(late, 0))
    return replace(health, errors=(*health.errors, *failure))


if __name__ == "__main__":
    be_a_worker()
    Parent().serve(Compile, _run)
