"""The worker process: builds the workload, applies one recipe, and answers the parent's requests one at a time.

Started as ``python -m fettle.measure._worker READ_FD WRITE_FD``; requests and answers are lines of JSON. What the
user's code prints goes to the process's own stdout, never into the answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from fettle.measure._notes import compile_cache, compiler_notes, notes_kept

if TYPE_CHECKING:
    from fettle.measure._trial import Accuracy


class Request(msgspec.Struct):
    """What the parent asks; fields that an action does not use stay empty."""

    do: str
    target: dict[str, Any] = {}  # msgspec copies mutable defaults
    source: str = ""
    label: str = ""
    path: str = ""
    factor: int = 1
    calibrated: bool = False
    allow_batch: bool = False
    device_memory_bytes: int = 0
    seconds: float = 0.0


@dataclass
class State:
    """What the worker holds from one request to the next."""

    workload: Any = None
    mode: str = "inference"
    target: Any = None
    fingerprint: str = ""
    load_s: float = 0.0
    derived_check: bool = False
    base_bytes: int = 0
    device: str = "cpu"
    run: Callable[..., Any] | None = None
    clock: Any = None
    cycle: Iterator[Any] | None = None
    call_ns: int = 0
    padding: Any = None


def build(state: State, request: Request) -> dict[str, Any]:
    """Build the workload, with the same seed in every worker."""
    import torch

    from fettle.measure import _meters
    from fettle.workload import Target, fingerprint

    started = time.perf_counter()
    target = msgspec.convert(request.target, Target)
    torch.manual_seed(0)
    made = target.load()
    state.workload = with_check(made)
    state.derived_check = len(made.inputs) == 1 and not made.check_inputs
    state.load_s = time.perf_counter() - started
    state.fingerprint = fingerprint(state.workload)
    state.device = device_of(state.workload)
    _meters.trim()
    state.base_bytes = _meters.resident_bytes() - weight_bytes(state.workload.model)
    return {"load_s": state.load_s, "fingerprint": state.fingerprint, "name": state.workload.name}


def probe(state: State, request: Request) -> dict[str, Any]:
    """See that the model takes its inputs, and gather the facts."""
    from fettle.techniques import probe_facts

    check_inputs(state.workload)
    facts = probe_facts(state.workload, allow_batch=request.allow_batch)
    if state.derived_check:  # the same rows again: what calibrates a recipe must not judge it
        facts = replace(facts, calibration_batches=0)
    return {"facts": msgspec.to_builtins(facts), "has_metric": state.workload.metric is not None}


def peaks(state: State, request: Request) -> dict[str, Any]:
    """The machine's peaks on the workload's device."""
    from fettle.machine import measure_peaks

    return measure_peaks(state.device)


def reference(state: State, request: Request) -> dict[str, Any]:
    """Compute the reference outputs and write them to `request.path`."""
    from fettle.measure._reference import write_reference

    found = write_reference(state.workload, request.path)
    return msgspec.to_builtins(found)  # type: ignore[no-any-return]


def prepare(state: State, request: Request) -> dict[str, Any]:
    """Apply a recipe's source, judge its first answers, warm up, and report what that took."""
    import torch

    from fettle.measure import _meters
    from fettle.measure._accuracy import compare, first_rows, repeat_rows, tensors, user_metric, worst
    from fettle.measure._clock import Clock, warm_up
    from fettle.measure._reference import read_reference
    from fettle.techniques import load

    workload = state.workload
    calibration = list(workload.calibration) or list(workload.inputs[:1])
    with notes_kept() as notes:
        started = time.perf_counter()
        optimize = load(request.source, request.label)
        extra = () if workload.call is None else (workload.call,)
        run = optimize(workload.model, calibration, *extra)
        optimize_s = time.perf_counter() - started
        state.workload = replace(workload, model=run)  # a runtime of its own needs the original no more
        del workload

        # The answers come first and in the reference's order: a model whose buffers change in forward must have gone
        # through the same calls. They are the recipe's first calls too, so this is where compiling is paid for.
        batches = [*state.workload.inputs, *state.workload.check_inputs]
        wanted = read_reference(request.path) if request.path else None
        unseen = range(len(calibration) if request.calibrated else 0, len(batches))
        rows = state.workload.samples or 1
        first_call_s, judged = 0.0, []
        for index, batch in enumerate(batches):
            grown = repeat_rows(batch, request.factor, rows) if request.factor > 1 else batch
            torch.manual_seed(0)
            started = time.perf_counter()
            output = call(run, grown)
            if state.device == "cuda":
                torch.cuda.synchronize()
            first_call_s += time.perf_counter() - started if index < len(state.workload.inputs) else 0.0
            if wanted is not None and index in unseen:
                judged.append(compare(first_rows(tensors(output), request.factor, wanted[index]), wanted[index]))
            del output
        accuracy = worst(judged)
        metric = state.workload.metric
        if metric is not None:
            value, problem = user_metric(metric, run)
            accuracy = replace(accuracy, metric=value, problem=accuracy.problem or problem)

        state.run, state.clock = run, Clock(state.device)
        timed = [repeat_rows(batch, request.factor, rows) for batch in state.workload.inputs]
        state.cycle = itertools.cycle(rotation(timed))
        _meters.trim()
        has_peak = _meters.reset_peak(state.device)
        samples, steady = warm_up(lambda: one_sample(state))
        peak = _meters.peak_bytes(state.device) if has_peak else None
        state.call_ns = sorted(samples)[len(samples) // 2]
        if not steady:
            notes.append("the time was still falling after 10 s of warm-up")
        notes += compiler_notes()
    return prepared(state, optimize_s, first_call_s, accuracy, peak, rows * request.factor, notes)


def prepared(
    state: State,
    optimize_s: float,
    first_call_s: float,
    accuracy: Accuracy,
    peak: int | None,
    samples: int,
    notes: list[str],
) -> dict[str, Any]:
    """What is reported of a recipe that is ready to be timed. On a CPU the peak is that above the loaded process."""
    if peak is not None and state.device != "cuda":
        peak = max(0, peak - state.base_bytes)
    return {
        "load_s": state.load_s,
        "optimize_s": optimize_s,
        "first_call_s": first_call_s,
        "cache": compile_cache(),
        "accuracy": msgspec.to_builtins(accuracy),
        "peak_bytes": peak,
        "call_ns": state.call_ns,
        "samples": samples,
        "notes": list(dict.fromkeys(notes)),
    }  # fmt: skip


def take_slice(state: State, request: Request) -> dict[str, Any]:
    """Call for `request.seconds`, at least once, and return each sample in nanoseconds."""
    import torch

    from fettle.measure import _meters
    from fettle.measure._lockstep import agreed

    wanted_ns = int(request.seconds * 1e9)
    # Where the allocator happens to put a buffer can change the time of a small model by half, for as long as the
    # process lives. Blocks of random sizes, held until the next slice, move the buffers of each slice elsewhere.
    state.padding = [torch.empty(random.randrange(64, 1 << 18), dtype=torch.uint8) for _ in range(16)]
    # What ran between two slices has emptied the caches: where calls are short, one call settles them unmeasured.
    if state.call_ns * 5 < wanted_ns:
        one_sample(state)
    energy = _meters.energy_j(state.device)
    samples: list[int] = []
    started = time.perf_counter_ns()
    while not samples or agreed(time.perf_counter_ns() - started < wanted_ns):
        samples.append(one_sample(state))
    after = _meters.energy_j(state.device)
    spent = (after - energy) / len(samples) if energy is not None and after is not None else None
    return {"samples_ns": samples, "energy_j": spent}


def examine(state: State, request: Request) -> dict[str, Any]:
    """Hand the workload to a function of another room, ``module:function``, and return what it finds."""
    import importlib

    module, _, name = request.label.partition(":")
    found = getattr(importlib.import_module(module), name)(state.workload, request.seconds)
    return {"found": msgspec.to_builtins(found), "load_s": state.load_s}


ACTIONS = {
    "build": build,
    "examine": examine,
    "probe": probe,
    "peaks": peaks,
    "reference": reference,
    "prepare": prepare,
    "slice": take_slice,
}


def action(state: State, request: Request) -> Callable[[State, Request], dict[str, Any]]:
    """What answers a request; a training loop is built, probed and prepared in its own way."""
    state.mode = request.target.get("mode", state.mode)
    if state.mode == "training":
        from fettle.measure import _training

        return {**ACTIONS, **_training.ACTIONS}[request.do]
    return ACTIONS[request.do]


def one_sample(state: State) -> int:
    """Time one call; where batches differ in shape, one round through all of them, as the time of a mean call."""
    from fettle.measure._lockstep import slowest

    assert state.cycle is not None
    group = next(state.cycle)
    total = 0
    for batch in group:
        total += state.clock.time_ns(lambda batch=batch: call(state.run, batch))
    return slowest(total // len(group))


def rotation(batches: Sequence[Any]) -> list[list[Any]]:
    """Batches grouped into samples: each alone where they have one shape, all together where they differ."""
    import torch

    from fettle.workload import leaves

    shapes = {
        tuple(tuple(leaf.shape) for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor)) for batch in batches
    }
    return [[batch] for batch in batches] if len(shapes) == 1 else [list(batches)]


def call(run: Callable[..., Any] | None, batch: Any) -> Any:
    """Call the tuned callable on one batch."""
    from fettle.workload import spread

    assert run is not None
    args, kwargs = spread(batch)
    return run(*args, **kwargs)


def with_check(workload: Any) -> Any:
    """The workload with its rows counted and, where the user gave one batch only, a second one to judge on: the same
    rows in another order, so that a recipe which only knows the first batch is found out."""
    import torch

    from fettle.workload import leaves, map_tensors

    first = next((leaf for _, leaf in leaves(workload.inputs[0]) if isinstance(leaf, torch.Tensor)), None)
    rows = workload.samples or (int(first.shape[0]) if first is not None and first.dim() else 1)
    check = list(workload.check_inputs)
    if not check and len(workload.inputs) == 1:

        def other(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0 or tensor.layout != torch.strided:  # rows of a sparse or nested tensor stay
                return tensor
            return tensor.roll(1, 0) if tensor.shape[0] > 1 else tensor.flip(-1)

        check = [map_tensors(other, workload.inputs[0])]
    return replace(workload, samples=rows, check_inputs=check)


def device_of(workload: Any) -> str:
    """Device type of the model's parameters, else of the first input tensor, else cpu."""
    import torch

    from fettle.workload import leaves

    if isinstance(workload.model, torch.nn.Module):
        for tensor in itertools.chain(workload.model.parameters(), workload.model.buffers()):
            return str(tensor.device.type)
    for _, leaf in leaves(workload.inputs[0]):
        if isinstance(leaf, torch.Tensor):
            return str(leaf.device.type)
    return "cpu"


def weight_bytes(model: Any) -> int:
    """Bytes of a module's parameters and buffers, tied ones once; 0 for a plain callable."""
    import torch

    if not isinstance(model, torch.nn.Module):
        return 0
    seen = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
    return sum(t.numel() * t.element_size() for t in seen.values() if t.device.type == "cpu")


def check_inputs(workload: Any) -> None:
    """Call the workload once as it is; raises `UsageError` with the model's own error and where it came from."""
    import torch

    from fettle.errors import UsageError, first_line
    from fettle.measure._reference import buffers_kept

    try:
        torch.manual_seed(0)
        with torch.no_grad(), buffers_kept(workload.model):
            workload.run(workload.model, workload.inputs[0])
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
        where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
        raise UsageError(f"the model does not take the inputs: {first_line(error)}{where}") from error


def explain(error: BaseException) -> dict[str, Any]:
    """An error as the parent will tell it: one line, and the traceback for the log."""
    import torch

    from fettle.errors import UsageError, first_line

    if isinstance(error, UsageError):
        return {"kind": "usage", "error": str(error)}
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return {"kind": "memory", "error": f"out of memory: {first_line(error)[:200]}", "trace": traceback.format_exc()}
    text = first_line(error)
    cause = error.__cause__
    if cause is not None and "Error" in type(cause).__name__ and str(cause) and str(cause).splitlines()[0] not in text:
        text = f"{text} (from {first_line(cause)})"
    return {"kind": "error", "error": text[:400], "trace": traceback.format_exc()}


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, however it ends (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def be_a_worker() -> None:
    """What every process that measures does first."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    warnings.filterwarnings("ignore")


def answer_to(state: State, line: bytes) -> dict[str, Any]:
    """Answer one request; what goes wrong is an answer too."""
    request = msgspec.json.decode(line, type=Request)
    try:
        return action(state, request)(state, request)
    except (Exception, SystemExit) as error:
        return explain(error)


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    be_a_worker()
    requests = os.fdopen(int(sys.argv[1]), "rb")
    answers = os.fdopen(int(sys.argv[2]), "wb", buffering=0)
    state = State()
    for line in requests:
        answers.write(msgspec.json.encode(answer_to(state, line)) + b"\n")
    os._exit(0)  # no atexit of compilers and runtimes: nothing here is worth waiting for


if __name__ == "__main__":
    main()
