"""Compiling a workload in a process of its own, and telling what happened: compiling leaves nothing behind here.

health = compile_health("model.py:workload")
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from fettle.diagnose.collectors.compile_watch import is_compiled, watch_compile
from fettle.diagnose.compile_health import CompileHealth
from fettle.errors import UsageError, first_line
from fettle.processes import be_a_worker
from fettle.workload import Target, find_target


def compile_health(
    target: str | Target,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    backend: str = "inductor",
    rounds: int = 3,
    second_process: bool = False,
    timeout_s: float = 600.0,
) -> CompileHealth:
    """Compile a workload in a process of its own, call it `rounds` times on each of its inputs, and tell what happened.

    A workload whose model is compiled already is run as it is. `second_process` runs it once more with the cache of the
    first, which shows what a restart costs. `backend="aot_eager"` sees the same breaks and recompilations in a fraction
    of the time, and nothing of inductor's cache.

    Raises:
        UsageError: The target cannot be built, or the process ended or ran out of time.
    """
    found = find_target(target) if isinstance(target, str) else target
    request = {
        "target": msgspec.to_builtins(found),
        "mode": mode,
        "dynamic": dynamic,
        "backend": backend,
        "rounds": rounds,
    }
    health = _in_worker(request, timeout_s)
    if second_process:
        again = _in_worker(request, timeout_s)
        health = replace(health, cache=replace(health.cache, second_process_s=again.compile_s))
    return health


def _in_worker(request: Mapping[str, Any], timeout_s: float) -> CompileHealth:
    with tempfile.TemporaryDirectory() as folder:
        asked, answered, log = (Path(folder) / name for name in ("request.json", "answer.json", "log"))
        asked.write_text(json.dumps(request))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "fettle.diagnose.compile_worker", str(asked), str(answered)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # inductor starts compile workers: they must end with it
            )
            try:
                code = process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise UsageError(f"compiling took longer than {timeout_s:.0f} s: give a longer timeout") from None
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, 9)
                process.wait()
        if not answered.exists():
            words = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise UsageError(f"the compiling process ended with code {code}: {words[-1][:200] if words else 'silent'}")
        answer = msgspec.json.decode(answered.read_bytes())
    if "usage" in answer:
        raise UsageError(answer["usage"])
    return msgspec.convert(answer, CompileHealth)


def _run(request: Mapping[str, Any]) -> CompileHealth:
    """The worker's part: build, compile, call."""
    import torch

    torch.manual_seed(0)
    workload = msgspec.convert(request["target"], Target).load()
    model = workload.model
    if not is_compiled(model):
        model = torch.compile(model, mode=request["mode"], dynamic=request["dynamic"], backend=request["backend"])
    failure, calls, first_call_s, settled = [], 0, 0.0, 0
    counters = torch._dynamo.utils.get_compilation_metrics
    with watch_compile() as watch:
        for number, batch in itertools.product(range(request["rounds"]), workload.inputs):
            started = time.perf_counter()
            try:
                workload.run(model, batch)
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


def main() -> None:
    """The worker process: a request file in, an answer file out."""
    be_a_worker()
    asked, answered = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        answer = json.dumps(asdict(_run(json.loads(asked.read_text()))))
    except UsageError as error:
        answer = json.dumps({"usage": str(error)})
    partial = answered.with_suffix(".part")
    partial.write_text(answer)
    partial.replace(answered)


if __name__ == "__main__":
    main()
