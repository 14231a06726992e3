"""What a worker process does where the workload is a call: build it, judge a recipe's answers, make it ready."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

import numpy
import torch

from fettle.batches import misread
from fettle.errors import UsageError, first_line, place
from fettle.generate import GenerationWorkload, brief
from fettle.measure import _generation, _meters, messages
from fettle.measure._accuracy import compare, first_rows, outputs_of, repeat_rows, with_metric, worst
from fettle.measure._clock import Clock
from fettle.measure._notes import compiler_notes
from fettle.measure._reference import read_reference, write_reference
from fettle.measure._state import (
    State,
    call,
    examine,
    locate,
    locate_by,
    peaks,
    prepared,
    rebase,
    rotation,
    seed_all,
    settled,
    take_slice,
)
from fettle.structure import structure
from fettle.techniques import Notes, keep_converted, load, probe_facts, state_kept
from fettle.workload import Workload, fingerprint, fresh, leaves, map_tensors, rows_of, switches, tensors


def build(state: State, request: messages.Build) -> messages.Built:
    """Build the workload, with the same seed in every worker."""
    torch.manual_seed(0)
    made = request.target.load(state.made)
    state.writes = isinstance(made, GenerationWorkload)
    state.workload = made if state.writes else with_check(made)
    state.rows = made.samples or statistics.mean(map(rows_of, made.inputs)) or 1
    state.derived_check = len(made.inputs) == 1 and not made.check_inputs
    if isinstance(made.model, torch.nn.Module) and any(map(torch.nn.parameter.is_lazy, made.model.parameters())):
        check_inputs(brief(state.workload))  # the first call makes its weights
    imports = state.end_of_build()
    state.fingerprint = fingerprint(state.workload)
    locate(state, state.workload.inputs[0])
    rebase(state)
    return messages.Built(
        load_s=state.load_s,
        fingerprint=state.fingerprint,
        structure=structure(made.model, made.call, made.metric, made.samples, switches()),
        name=state.workload.name,
        mode=state.mode,
        writes=state.writes,
        inputs=made.inputs_taken_for,
        hides_text=hides_text(made),
        hidden=[] if state.writes else hidden_modules(made.model),
        imports=imports,
    )


def hides_text(workload: Workload) -> bool:
    """Whether the workload's own call asks a language model for text, which makes a black box of it."""
    names = getattr(getattr(workload.call, "__code__", None), "co_names", ())
    return "generate" in names and callable(getattr(workload.model, "generate", None))


def hidden_modules(model: Any) -> list[str]:
    """Names of the modules that a model which is none itself holds, or calls."""
    if isinstance(model, torch.nn.Module):
        return []
    held = {"func": getattr(model, "func", None), **getattr(getattr(model, "__self__", model), "__dict__", {})}
    if inspect.isfunction(model):
        with contextlib.suppress(ValueError):  # a cell may still be empty
            names = inspect.getclosurevars(model)
            held |= {**names.nonlocals, **names.globals}
    return [name for name, value in held.items() if isinstance(value, torch.nn.Module)]


def probe(state: State, request: messages.Probe) -> messages.Probed:
    """See that the model takes its inputs, and gather the facts."""
    check_inputs(brief(state.workload))
    with state_kept(state.workload.model):  # the reference starts from the same state
        facts = probe_facts(state.workload, allow_batch=request.allow_batch)
    if state.derived_check:  # its rows are the same, and must not calibrate what they judge
        parts = {name: replace(part, calibration_batches=0) for name, part in facts.parts.items()}
        facts = replace(facts, calibration_batches=0, parts=parts)
    rebase(state)  # probing has imported modules, which take memory
    return messages.Probed(facts=facts, has_metric=state.workload.metric is not None)


def reference(state: State, request: messages.WriteReference) -> messages.Reference:
    """Compute the reference outputs and write them to `request.path`."""
    if state.writes:
        return _generation.reference(state, request)
    return write_reference(state.workload, request.path, derived_check=state.derived_check)


def prepare(state: State, request: messages.Prepare) -> messages.Judged | messages.Prepared:
    """Apply a recipe's source, judge its first answers, warm up, and report what that took."""
    if state.writes:
        return _generation.prepare(state, request)
    began = time.perf_counter()
    state.preparing = _prepared_in_two(state, request)
    next(state.preparing)
    return messages.Judged(seconds=time.perf_counter() - began) if request.in_two else settle(state)


def settle(state: State, request: messages.Settle | None = None) -> messages.Prepared:
    """Warm up what `prepare` has judged."""
    assert state.preparing is not None
    ready: messages.Prepared = next(state.preparing)
    return ready


def _prepared_in_two(state: State, request: messages.Prepare) -> Generator[Any, None, None]:
    """Yields when the recipe is judged, and when it is ready to be timed."""
    workload = state.workload
    calibration = [_own_generators(batch) for batch in workload.calibration or workload.inputs[:1]]
    state.clock = Clock(state.device, state.gpus)
    with Notes() as notes:
        started = time.perf_counter()
        later: list[Callable[[], None]] = []
        optimize = keep_converted(load(request.source, request.label), request.label, later)
        extra = () if workload.call is None else (workload.call,)
        run = optimize(workload.model, calibration, *extra)
        optimize_s = time.perf_counter() - started
        state.workload = replace(workload, model=run, parts=())  # another runtime no longer needs the original model
        del workload

        # The answers come first and in the reference's order: a model whose buffers change in forward must have gone
        # through the same calls. They are the recipe's first calls too, so this is where compiling is paid for.
        wanted = read_reference(request.path) if request.path else None
        judging = len(state.workload.inputs) if wanted is None else len(wanted)
        batches = [*state.workload.inputs, *state.workload.check_inputs][:judging]
        unseen = range(len(calibration) if request.calibrated else 0, len(batches))
        rows = state.workload.samples or 1
        first_call_s, judged = 0.0, []
        for index, batch in enumerate(batches):
            grown = _own_generators(repeat_rows(batch, request.factor, rows))
            seed_all(0)
            started = time.perf_counter()
            output = call(run, grown)
            locate_by(state, output)
            state.clock.synchronize()
            first_call_s += time.perf_counter() - started if index < len(state.workload.inputs) else 0.0
            if wanted is not None and index in unseen:
                answers = outputs_of(state.workload.judged(output, grown))
                judged.append(compare(first_rows(answers, request.factor, wanted[index]), wanted[index]))
            del output
        while later:  # dropped as soon as it is done: its memory is not the recipe's
            later.pop()()
        accuracy = with_metric(worst(judged), state.workload.metric, run)
        if wanted is not None and not any(wanted):  # texts, which only the metric judges
            accuracy = replace(accuracy, error=math.nan)

        state.run = run
        yield None
        timed = [repeat_rows(batch, request.factor, rows) for batch in state.workload.inputs]
        state.cycle = itertools.cycle(rotation(timed))
        _meters.trim()
        has_peak = _meters.reset_peak(state.device)
        peak = settled(state, has_peak, notes.lines)
        notes.lines += compiler_notes()
    yield prepared(state, optimize_s, first_call_s, accuracy, peak, state.rows * request.factor, notes)


def _own_generators(batch: Any) -> Any:
    """The batch in containers of its own, with copies of its generators: each call draws what the reference's call
    of it drew."""

    def own(leaf: Any) -> Any:
        return leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf

    return map_tensors(own, batch, (torch.Tensor, torch.Generator), caches=True)


def with_check(workload: Any) -> Any:
    """The workload with its rows counted and, where the user gave one batch only, a second one to judge on: the same
    rows and texts in another order, so that a recipe which only knows the first batch is found out."""
    every = tensors([*workload.inputs, *workload.check_inputs])
    if any(tensor.is_nested and tensor.layout == torch.strided for tensor in every):
        raise UsageError("the inputs hold a nested tensor of the older layout, which has no shape: make it with "
                         "layout=torch.jagged")  # fmt: skip
    check = list(workload.check_inputs)
    if not check and len(workload.inputs) == 1:
        given = workload.inputs[0]
        other = map_tensors(_moved, _other_texts(given), (torch.Tensor, numpy.ndarray), caches=True)
        pairs = zip(leaves(given), leaves(other), strict=True)
        check = [] if all(one is moved for (_, one), (_, moved) in pairs) else [other]
    return replace(workload, samples=workload.rows, check_inputs=check)


def _moved(rows: Any) -> Any:
    """A tensor's or an array's rows in another order; of one row its last dimension."""
    if isinstance(rows, numpy.ndarray):
        return numpy.roll(rows, 1, 0 if len(rows) > 1 else -1) if rows.ndim else rows
    if rows.dim() == 0 or rows.layout != torch.strided or rows.is_quantized:  # rows that cannot be moved
        return rows
    return rows.roll(1, 0) if rows.shape[0] > 1 else rows.flip(-1)


def _other_texts(tree: Any) -> Any:
    """The same with texts in a list in another order, and the words of any other text."""
    if type(tree) is dict:
        return {name: _other_texts(part) for name, part in tree.items()}
    if type(tree) is list and len(tree) > 1 and all(isinstance(text, str) for text in tree):
        return [*tree[-1:], *tree[:-1]]
    if type(tree) in (list, tuple):
        return type(tree)(map(_other_texts, tree))
    words = tree.split() if type(tree) is str else ()
    return " ".join(reversed(words)) if len(words) > 1 else tree


def check_inputs(workload: Any) -> None:
    """Call the workload once as it is; raises `UsageError` with the model's own error and where it came from."""
    model = workload.model
    held = itertools.chain(model.parameters(), model.buffers()) if isinstance(model, torch.nn.Module) else ()
    if any(tensor.is_meta for tensor in held):
        raise UsageError("the model is on the meta device, where weights have no values: load them before it is tuned")

    def once() -> None:
        seed_all(0)
        with state_kept(workload.model):  # a model may write into what it is given
            workload.run(workload.model, fresh(workload.inputs[0]))

    try:
        with torch.no_grad():
            once()
    except (Exception, SystemExit) as error:
        if "does not require grad" in str(error):
            raise UsageError(
                f"the model computes gradients in its own call{place(error)}, and is called without them here: let it "
                "do so under torch.enable_grad()"
            ) from error
        asked = misread(workload.inputs[0], model, workload.call) if isinstance(error, TypeError) else ""
        why = asked or f"{first_line(error)}{place(error)}"
        raise UsageError(f"the model does not take the inputs: {why}") from error


ACTIONS: Mapping[type[messages.Asked], Callable[[State, Any], messages.Answer]] = {
    messages.Build: build,
    messages.Examine: examine,
    messages.Probe: probe,
    messages.MeasurePeaks: peaks,
    messages.WriteReference: reference,
    messages.Prepare: prepare,
    messages.Settle: settle,
    messages.MeasureRows: _generation.measure_rows,
    messages.TakeSlice: take_slice,
}
