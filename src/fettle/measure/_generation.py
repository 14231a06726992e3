"""What a worker process does where the workload writes text: judge a recipe by teacher forcing, take its time apart."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from fettle.files import plain
from fettle.generate.limits import cache_bytes, count_work, weights_read
from fettle.generate.quality import (
    Closeness,
    as_reference,
    astray,
    closeness,
    read_pieces,
    scores_of,
    unequal,
    write_pieces,
)
from fettle.generate.speed import Generation, Watcher, rows_in, tokens_per_s
from fettle.measure import _meters
from fettle.measure._accuracy import user_metric, with_metric
from fettle.measure._clock import Clock, is_steady
from fettle.measure._lockstep import everywhere, slowest
from fettle.measure._notes import compiler_notes
from fettle.measure._state import State, prepared, settled
from fettle.measure._trial import Accuracy
from fettle.measure.messages import MeasureRows, Prepare, Prepared, Reference, RowsMeasured, WriteReference
from fettle.techniques import Notes, keep_converted, load

_LONG_NS = 300_000_000
"""Texts that take so long together show by their steps whether the time is steady."""


def reference(state: State, request: WriteReference) -> Reference:
    """Let the reference write, and keep what recipes are judged by at `request.path`."""
    started = time.perf_counter()
    workload = state.workload
    with torch.no_grad():
        pieces = write_pieces(workload, request.path)
        work = count_work(workload)
        metric, problem = user_metric(workload.metric, lambda **prompt: workload.run(workload.model, prompt))
    own = closeness(pieces, [piece.log_p for piece in pieces])
    return Reference(
        dtype=as_reference(workload.model), why="it writes text that recipes are judged on",
        metric=plain(metric), metric_problem=problem,
        seconds=time.perf_counter() - started, perplexity=own.perplexity,
        prefill_flops=work.prefill_flops, decode_flops=work.decode_flops,
    )  # fmt: skip


def prepare(state: State, request: Prepare) -> Prepared:
    """Apply a recipe's source, judge what it writes, warm up, and report what that took."""
    workload = state.workload
    calibration = list(workload.calibration) or list(workload.inputs[:1])
    state.clock = Clock(state.device, state.gpus)
    with Notes() as notes:
        started = time.perf_counter()
        later: list[Callable[[], None]] = []
        optimize = keep_converted(load(request.source, request.label), request.label, later)
        run: Any = optimize(workload.model, calibration)
        optimize_s = time.perf_counter() - started
        # Compiling is paid for here.
        fed, first_ns = scored(state, run, request, len(calibration) if request.calibrated else 0)
        while later:
            later.pop()()

        state.run = run
        tokens, temperature = int(workload.new_tokens), float(workload.temperature)
        state.watcher = watcher = Watcher(tokens, request.part or "text", temperature)
        numbered = list(enumerate(workload.inputs))
        state.cycle = itertools.cycle([numbered])
        _meters.trim()
        has_peak = _meters.reset_peak(state.device)
        held, written, whole = 0, [], Watcher(tokens, temperature=temperature)

        def own_texts() -> tuple[list[int], bool]:
            """Write a whole text after each input, whatever the race times. Where it times whole texts, these are its
            warm-up: the nanoseconds of a mean one, and whether the steps were steady."""
            nonlocal held
            took = 0
            for number, prompt in numbered:
                took += whole.sample_ns(lambda **arguments: written.append(run(**arguments)), prompt, number)
                held = max(held, cache_bytes(run.decoder))
            steps = [ns for text in whole.texts for ns in text.times().steps_ns]
            return ([took // len(numbered)], took > _LONG_NS and is_steady(steps)) if is_text else ([], False)

        is_text = watcher.part == "text"
        peak = settled(state, has_peak, notes.lines, own_texts)
        first_call_s = (first_ns or whole.texts[0].whole_ns) / 1e9
        watcher.texts = []
        if watcher.part == "ttft" and not first_ns:  # they were its first calls, and the race writes no whole texts
            whole.texts = []
            for number, prompt in numbered:
                whole.sample_ns(run, prompt, number)
        if temperature:  # it is judged by its likeliest tokens, not by drawn ones
            written = [run(**prompt) for prompt in workload.inputs]
        accuracy = with_metric(judged(state, run, fed, written, request), workload.metric, run)
        notes.lines += compiler_notes()
    rows = statistics.mean(map(rows_in, workload.inputs))
    ready = prepared(state, optimize_s, first_call_s, accuracy, peak, rows * watcher.counted, notes)
    known = Generation(
        rows=round(rows), weight_bytes=weights_read(workload.model, run.decoder), cache_bytes=held,
        peak_bytes=ready.peak_bytes,
    )  # fmt: skip
    texts = whole.take() if watcher.part == "ttft" else []
    return msgspec.structs.replace(ready, generation=known, texts=texts)


def measure_rows(state: State, request: MeasureRows) -> RowsMeasured:
    """Write with other numbers of rows, as far as memory allows."""
    run: Any = state.run
    work = state.workload
    how = (int(work.new_tokens), float(work.temperature))
    speeds: dict[str, float] = {}
    for rows in request.rows:
        speeds[str(rows)] = tokens_per_s(run, work.inputs, rows, *how, slowest=slowest)
        if math.isnan(speeds[str(rows)]) and not everywhere(f"no memory for {rows} rows"):
            raise MemoryError(f"no other rank lacked it with {rows} rows: they wait for this one")
    return RowsMeasured(tokens_per_s={count: rate for count, rate in speeds.items() if math.isfinite(rate)})


@dataclass(frozen=True)
class Scored:
    """What a recipe says of the tokens that it was fed."""

    closeness: Closeness
    pieces: int
    unseen: int
    """Prompts that calibrated it: they do not judge."""
    forced: Sequence[torch.Tensor] = ()
    """What the reference wrote after each other prompt,"""
    first: torch.Tensor | None = None
    """and what the recipe gives the tokens of the first of these."""


def scored(state: State, run: Any, request: Prepare, unseen: int) -> tuple[Scored | None, int]:
    """Feed the reference's tokens to a recipe, and compare its distributions: None where nothing judges, and the recipe
    has only written after each input. Then the nanoseconds of its first call, 0 where there was none: a model as given
    that is the reference itself is not asked for its scores again."""
    calls: list[Callable[[], Any]] = [functools.partial(run, **prompt) for prompt in state.workload.inputs]
    pieces = read_pieces(request.path)[unseen:] if request.path else []
    same = bool(pieces) and request.as_given and _is_reference(state.workload.model)
    if pieces:
        calls = [] if same else [functools.partial(scores_of, run, piece, state.device) for piece in pieces]
    scores, took_ns = [piece.log_p for piece in pieces] if same else [], 0
    with torch.no_grad():
        for call in calls:
            started = time.perf_counter_ns()
            scores.append(call())
            state.clock.synchronize()
            took_ns = took_ns or time.perf_counter_ns() - started
    if not pieces:
        return None, took_ns
    prompts = [piece.forced for piece in pieces if not piece.is_text]
    agreement = closeness(pieces, scores)
    return Scored(agreement, len(pieces), unseen, prompts, scores[0] if prompts else None), took_ns


def _is_reference(model: Any) -> bool:
    """Whether a model is in eval mode and float32 as it was given: then it is what the reference is made with."""
    if not isinstance(model, torch.nn.Module) or any(module.training for module in model.modules()):
        return False
    return all(one.dtype == torch.float32 for one in model.parameters() if one.is_floating_point())


def judged(state: State, run: Any, fed: Scored | None, written: Sequence[Any], request: Prepare) -> Accuracy:
    """A recipe's text beside the reference's; `written` are the texts that it wrote by itself after the inputs."""
    if fed is None:
        return Accuracy()
    workload, closeness, different = state.workload, fed.closeness, math.nan
    with torch.no_grad():
        own = written[0]
        same = not fed.unseen and isinstance(own, torch.Tensor) and torch.equal(own.cpu(), fed.forced[0])
        known = fed.first if same else None  # its scores of its own text are known already
        problem = closeness.problem or astray(run, workload.inputs[0], own, int(workload.new_tokens), known)
        if not problem:
            checks = workload.check_inputs if request.exact else ()
            different = unequal(fed.forced, [*written, *(run(**prompt) for prompt in checks)][fed.unseen :])
    return Accuracy(
        error=closeness.kl, max_abs=closeness.worst_kl, agreement=closeness.agreement, finite=not closeness.problem,
        judged_batches=fed.pieces, problem=problem, unequal=different, perplexity=closeness.perplexity,
        perplexity_ratio=closeness.ratio, perplexity_low=closeness.low, perplexity_high=closeness.high,
    )  # fmt: skip
