"""What a worker process does where the workload writes text: judge a recipe by teacher forcing, take its time apart."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import msgspec

from fettle.measure._notes import compiler_notes, notes_kept
from fettle.measure._state import State, prepared, settled
from fettle.measure._trial import Accuracy
from fettle.measure.messages import Prepare, Prepared, Reference, WriteReference


def reference(state: State, request: WriteReference) -> Reference:
    """Let the reference write, and keep what recipes are judged by at `request.path`."""
    import torch

    from fettle.generate.limits import count_work
    from fettle.generate.quality import closeness, write_pieces
    from fettle.measure._accuracy import user_metric

    started = time.perf_counter()
    workload = state.workload
    metric, problem = None, ""
    with torch.no_grad():
        pieces = write_pieces(workload, request.path)
        work = count_work(workload)
        if workload.metric is not None:
            metric, problem = user_metric(workload.metric, lambda **prompt: workload.run(workload.model, prompt))
    own = closeness(pieces, [piece.log_p for piece in pieces])
    return Reference(
        dtype="float32", why="it writes text that recipes are judged on", metric=metric,
        metric_problem=problem, seconds=time.perf_counter() - started, perplexity=own.perplexity,
        prefill_flops=work.prefill_flops, decode_flops=work.decode_flops,
    )  # fmt: skip


def prepare(state: State, request: Prepare) -> Prepared:
    """Apply a recipe's source, judge what it writes, warm up, and report what that took."""
    import torch

    from fettle.generate.limits import cache_bytes, weights_read
    from fettle.generate.speed import Generation, Watcher, tokens_per_s
    from fettle.measure import _meters
    from fettle.measure._accuracy import user_metric
    from fettle.measure._clock import Clock
    from fettle.techniques import load

    workload = state.workload
    calibration = list(workload.calibration) or list(workload.inputs[:1])
    with notes_kept() as told:
        started = time.perf_counter()
        run: Any = load(request.source, request.label)(workload.model, calibration)
        optimize_s = time.perf_counter() - started
        started = time.perf_counter()
        for prompt in workload.inputs:
            run(**prompt)
        if state.device == "cuda":
            torch.cuda.synchronize()
        first_call_s = time.perf_counter() - started
        accuracy = judged(state, run, request.path, len(calibration) if request.calibrated else 0)
        if workload.metric is not None:
            value, problem = user_metric(workload.metric, run)
            accuracy = replace(accuracy, metric=value, problem=accuracy.problem or problem)

        state.run, state.clock = run, Clock(state.device)
        state.watcher = watcher = Watcher(int(workload.new_tokens), request.part or "text")
        numbered = list(enumerate(workload.inputs))
        state.cycle = itertools.cycle([numbered])
        _meters.trim()
        has_peak = _meters.reset_peak(state.device)
        held = 0
        for number, prompt in numbered:  # a whole text, for what the race does not go by
            Watcher.sample_ns(whole := Watcher(watcher.new_tokens), run, prompt, number)
            watcher.texts += whole.texts
            held = max(held, cache_bytes(run.decoder))
        peak = settled(state, has_peak, told.lines)
        whole_texts = [text for text in watcher.take() if text.steps_ns] if watcher.part == "ttft" else []
        watcher.texts = []
        rows = len(next(iter(workload.inputs[0].values())))
        speeds = {str(n): tokens_per_s(run, workload.inputs, n, watcher.new_tokens) for n in request.rows if n != rows}
        speeds = {count: rate for count, rate in speeds.items() if math.isfinite(rate)}  # as far as memory allows
        told.lines += compiler_notes()
    ready = prepared(state, optimize_s, first_call_s, accuracy, peak, rows * watcher.counted, told)
    known = Generation(
        rows=rows, weight_bytes=weights_read(workload.model), cache_bytes=held,
        tokens_per_s=speeds, peak_bytes=ready.peak_bytes,
    )  # fmt: skip
    return msgspec.structs.replace(ready, generation=known, texts=whole_texts)


def judged(state: State, run: Any, path: str, unseen: int) -> Accuracy:
    """A recipe's text beside the reference's: pieces before `unseen` calibrated it, and do not judge."""
    import torch

    from fettle.generate.quality import astray, closeness, read_pieces, scores_of, unequal

    if not path:
        return Accuracy()
    pieces = read_pieces(path)[unseen:]
    with torch.no_grad():
        found = closeness(pieces, [scores_of(run, piece, state.device) for piece in pieces])
        first = next(piece for piece in pieces if not piece.is_text)
        problem = found.problem or astray(run, state.workload.inputs[0], first.forced.shape[1])
        different = unequal(run, pieces, state.device) if not problem else float("nan")
    return Accuracy(
        error=found.kl, max_abs=found.worst_kl, agreement=found.agreement, finite=not found.problem,
        judged_batches=len(pieces), problem=problem, unequal=different, perplexity=found.perplexity,
        perplexity_ratio=found.ratio, perplexity_low=found.low, perplexity_high=found.high,
    )  # fmt: skip
