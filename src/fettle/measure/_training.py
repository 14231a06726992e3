"""What a worker process does where the workload is a training loop; asked like one where it is a call (`_inference`).

A slice of a race is taken as for inference: one call is one optimizer step.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec
import torch

from fettle.errors import UsageError, first_line, place
from fettle.files import plain, write_bytes
from fettle.measure import _meters, messages
from fettle.measure._accuracy import user_metric, with_metric
from fettle.measure._clock import Clock
from fettle.measure._lockstep import mean
from fettle.measure._notes import compiler_notes
from fettle.measure._state import (
    State,
    examine,
    locate,
    peaks,
    prepared,
    rebase,
    same_shapes,
    seed_all,
    settled,
    take_slice,
)
from fettle.measure._trial import Accuracy
from fettle.procs.limits import granted_memory_bytes, resident_bytes
from fettle.procs.parent import failure_of
from fettle.recipe import Recipe
from fettle.structure import structure
from fettle.techniques import LARGEST, Facts, Notes, enlarged, load, put_modes_back, source
from fettle.train import (
    SEEDS,
    Band,
    Curve,
    Steps,
    TrainingWorkload,
    judge_curve,
    largest_that_fits,
    load_training,
    moved_facts,
    training_facts,
    training_fingerprint,
    untrained,
)
from fettle.train.facts import MOST_BATCHES
from fettle.workload import Target, rows_of, switches

_TIMELINE_STEPS = 3
_SHORT_PASS = 4
"""Batches of a DataLoader of which one that is short is a share that shows in the time of a step."""
_FEWEST_SEEDS = 2
"""Other seeds that must train to the end: those that diverge say nothing of how far apart two are."""
_HEADROOM = 0.9
"""Share of free memory that a larger batch may take."""


def build(state: State, request: messages.Build) -> messages.Built:
    """Build the workload, with the same seed in every worker."""
    state.target = request.target
    workload = state.workload = load_training(state.target, made=state.made)
    imports = state.end_of_build()
    state.fingerprint = training_fingerprint(workload)
    factory = getattr(workload.optimizer, "func", workload.optimizer)  # what a functools.partial calls
    own = [factory] if isinstance(factory, types.FunctionType) else []  # others have their settings in the fingerprint
    locate(state)
    rebase(state)
    return messages.Built(
        load_s=state.load_s,
        fingerprint=state.fingerprint,
        structure=structure(workload.model, workload.loss, workload.metric, workload.samples, switches(), *own),
        name=workload.name,
        mode=state.mode,
        imports=imports,
    )


def probe(state: State, request: messages.Probe) -> messages.Probed:
    """Make one step as given, and gather the facts."""
    workload = state.workload
    facts = training_facts(workload, allow_batch=request.allow_batch)
    before = untrained(workload.model)
    _check_step(workload, facts)
    facts = replace(facts, **moved_facts(workload.model, before))
    if request.allow_batch:
        facts = replace(facts, largest_batch=_largest_batch(load_training(state.target), facts))
    return messages.Probed(facts=facts, has_metric=workload.metric is not None)


def reference(state: State, request: messages.WriteReference) -> messages.Reference:
    """Train the baseline from seed 0 and from other seeds, and write their curves to `request.path`."""
    started = time.perf_counter()
    clip = state.workload.max_grad_norm
    facts = Facts(mode="training", max_grad_norm=None if clip is None else float(clip))
    train = load(source(Recipe(), facts), "baseline")
    first = _loaded(state.target, 0)
    ours = set(map(id, state.workload.model.parameters()))
    if any(id(parameter) in ours and parameter.requires_grad for parameter in first.model.parameters()):
        raise UsageError(
            "the factory returns the same model each time, trained further by each run: build the model inside the "
            "factory"
        )
    steps = Steps(train, first)
    baseline = steps.curve(int(first.steps))
    if len(baseline.losses) < first.steps or not math.isfinite(baseline.losses[-1]):
        raise UsageError(
            f"the loss of step {len(baseline.losses)} of the training as given is {baseline.losses[-1]}: "
            "lower its learning rate, there is nothing to compare with"
        )
    metric, problem = user_metric(first.metric, first.model)
    tried = [_other_seed(state.target, train, seed, baseline) for seed in SEEDS]
    others = [curve for curve in tried if all(map(math.isfinite, (*curve.losses, *curve.grad_norms)))]
    if len(others) < _FEWEST_SEEDS:
        raise UsageError(
            f"the training as given diverges from {len(tried) - len(others)} of {len(tried)} other seeds, to losses or "
            "gradients that are not finite: lower its learning rate, there is too little to compare with"
        )
    band = Band(baseline, others)
    if not band.spread > 0:
        raise UsageError(
            "other seeds train exactly alike, so there is no spread to judge by: let the factory take an argument "
            "'seed' for its initial weights, or give more than one batch"
        )
    write_bytes(request.path, msgspec.json.encode(asdict(band)))
    return messages.Reference(
        dtype="float32",
        metric=plain(metric),
        metric_problem=problem,
        seconds=time.perf_counter() - started,
        curves=[curve.losses for curve in (baseline, *others)],
        spread=band.spread,
    )


def prepare(state: State, request: messages.Prepare) -> messages.Prepared:
    """Train with a recipe's source from seed 0, judge its losses, warm up, and report what that took."""
    workload: TrainingWorkload = state.workload
    with Notes() as notes:
        started = time.perf_counter()
        train = load(request.source, request.label)
        seed_all(0)
        _meters.trim()
        steps = Steps(train, workload, mean=mean)
        state.run, state.clock = lambda _: steps.step(), Clock(state.device, state.gpus)
        has_peak = _meters.reset_peak(state.device)
        optimize_s = time.perf_counter() - started

        started = time.perf_counter()
        curve = steps.curve(1)
        first_call_s = time.perf_counter() - started
        count = max(1, int(workload.steps) // request.factor)

        def on(number: int) -> int:
            nonlocal curve
            started = time.perf_counter_ns()
            more = steps.curve(number)
            curve = Curve([*curve.losses, *more.losses], [*curve.grad_norms, *more.grad_norms])
            return time.perf_counter_ns() - started

        while len(curve.losses) < count and math.isfinite(curve.losses[-1]):
            if state.pace.is_open:
                state.pace.timed(lambda: on(1))
            else:
                on(count - len(curve.losses))
        accuracy = _accuracy(curve, request)
        if not accuracy.problem:
            modes = [(module, module.training) for module in workload.model.modules()]
            accuracy = with_metric(accuracy, workload.metric, workload.model)
            put_modes_back(modes)  # steps are timed in the loop's own modes

        rows = _rows_in_a_sample(workload)
        group = [None] * len(rows)
        state.cycle = itertools.repeat(group)
        peak = settled(state, has_peak, notes.lines)
        phases = steps.timeline(max(_TIMELINE_STEPS, len(group)))
        notes.lines += [*_collectives(steps), *compiler_notes()]
    samples = request.factor * (workload.samples or statistics.mean(rows) or 1)
    return prepared(state, optimize_s, first_call_s, accuracy, peak, samples, notes, phases)


def plan(state: State, request: messages.MakePlan) -> messages.Planned:
    """The memory plan of the strategies that a study of so many ranks would try, from fake tensors."""
    from fettle.parallel.study import plan_for_study

    plan, note = plan_for_study(state.target, request.ranks, request.device_memory_bytes or None, request.nodes)
    return messages.Planned(plan=msgspec.Raw(msgspec.msgpack.encode(plan)), note=note)


ACTIONS: Mapping[type[messages.Asked], Callable[[State, Any], messages.Answer]] = {
    messages.Build: build,
    messages.Examine: examine,
    messages.Probe: probe,
    messages.MeasurePeaks: peaks,
    messages.MakePlan: plan,
    messages.WriteReference: reference,
    messages.Prepare: prepare,
    messages.TakeSlice: take_slice,
}


def _loaded(target: Target, seed: int) -> TrainingWorkload:
    """The workload as `build` leaves it, which reads a batch for the fingerprint: data may remember that."""
    seed_all(seed)
    workload = load_training(target, seed)
    _ = workload.first
    seed_all(seed)
    return workload


def _other_seed(target: Target, train: Any, seed: int, baseline: Curve) -> Curve:
    """The baseline from another seed. The order of the data is changed only where nothing else heeds the seed."""
    workload = _loaded(target, seed)
    curve = Steps(train, workload).curve(int(workload.steps))
    if list(curve.losses) != list(baseline.losses):
        return curve
    workload = _loaded(target, seed)
    return Steps(train, workload, workload.stream(seed)).curve(int(workload.steps))


def _collectives(steps: Steps) -> list[str]:
    """What a step sends, counted in a step of its own: it shows what FSDP really took for its units."""
    group: Any = torch.distributed if torch.distributed.is_available() else None
    if group is None or not group.is_initialized():
        return []
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as counting:  # type: ignore[no-untyped-call]
        steps.step()
    by_name: dict[str, int] = {}
    for operator, count in counting.get_comm_counts().items():
        name = str(operator).rsplit(".", 1)[-1].strip("_")
        by_name[name] = by_name.get(name, 0) + count
    counts = ", ".join(f"{count} {name}" for name, count in sorted(by_name.items()))
    return [f"collectives a step: {counts or 'none seen'}"]


def _accuracy(curve: Curve, request: messages.Prepare) -> Accuracy:
    losses = tuple(loss for loss in curve.losses if math.isfinite(loss))
    if not request.path:
        return Accuracy(finite=len(losses) == len(curve.losses), losses=losses)
    with open(request.path, "rb") as file:
        band = msgspec.json.decode(file.read(), type=Band)
    judged = judge_curve(curve, band, request.factor)
    return Accuracy(
        error=judged.share,
        max_abs=judged.largest,
        finite=len(losses) == len(curve.losses),
        judged_batches=len(losses),
        problem=judged.problem,
        losses=losses,
    )


def _check_step(workload: TrainingWorkload, facts: Facts) -> None:
    """One step as given; raises `UsageError` with the loop's own error and where it came from."""
    train = load(source(Recipe(), facts), "baseline")
    seed_all(0)
    checked: list[str] = []

    def loss(model: Any, batch: Any) -> Any:
        value = workload.loss(model, batch)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            what = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            )
            checked.append(f"the loss function returned {what}: return the mean loss, a tensor of one number")
        elif not value.requires_grad:
            checked.append("the loss has no gradient: it was detached, or computed under no_grad")
        return value

    try:
        Steps(train, replace(workload, loss=loss)).step()
    except Exception as error:
        problem = checked[0] if checked else f"the first training step raised {first_line(error)}{place(error)}"
        raise UsageError(problem) from error


def _largest_batch(workload: TrainingWorkload, facts: Facts) -> int:
    """How many times over the batch fits. Two steps each, for the optimizer's state appears after the first.

    On a GPU an allocator that had to give memory back and try again counts as not fitting. On a CPU the limit is a
    share of the memory that is free now, and a size is not tried when the trend of the smaller ones says it is above.
    """
    limit = _HEADROOM * granted_memory_bytes()
    peaks: dict[int, int] = {}
    on_gpu = facts.device == "cuda"

    def fits(factor: int) -> bool:
        if not on_gpu and len(peaks) >= 2:
            (one, low), (two, high) = sorted(peaks.items())[-2:]
            if high + (high - low) / (two - one) * (factor - two) > limit:
                return False
        train = load(source(enlarged(factor), facts), f"batch x{factor}")
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if on_gpu else 0
        _meters.trim()
        before = resident_bytes()
        _meters.reset_peak(facts.device)
        try:
            steps = Steps(train, workload)
            for _ in range(2):
                steps.step()
        except (RuntimeError, MemoryError) as error:
            if failure_of(error).kind != "memory":
                raise UsageError(f"a batch of {factor} times the size raised {first_line(error)}") from error
            return False
        if on_gpu:
            return bool(torch.cuda.memory_stats().get("num_alloc_retries", 0) == retries)
        peaks[factor] = max(0, (_meters.peak_bytes(facts.device) or 0) - before)
        return bool(peaks[factor] <= limit)

    largest = largest_that_fits(fits, most=LARGEST)
    if on_gpu:
        torch.cuda.empty_cache()  # the other processes of the study need what the last try held
    return largest


def _rows_in_a_sample(workload: TrainingWorkload) -> list[float]:
    """Rows of each step in one sample of time: of one, or of a pass through the data where its batches differ. Of a
    longer pass through a DataLoader, whose last batch may be short, the typical step has a whole one."""
    data: Any = workload.data
    if isinstance(data, torch.utils.data.DataLoader) and data.batch_sampler is not None:
        dealt = list(map(len, itertools.islice(data.batch_sampler, _SHORT_PASS + 1)))
        if len(dealt) <= _SHORT_PASS and len({*dealt}) > 1:
            return [workload.rows * count / dealt[0] for count in dealt]
    elif isinstance(data, Sequence) and len(data) <= MOST_BATCHES and not same_shapes(data):
        return list(map(rows_of, data))
    return [workload.rows]
