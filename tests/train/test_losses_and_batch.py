"""The guard on losses, and the search for the largest batch."""

import functools
import math
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fettle
from fettle.errors import UsageError
from fettle.measure import _meters
from fettle.measure._state import State
from fettle.measure._training import _largest_batch, build, prepare, probe, reference
from fettle.measure._worker import action
from fettle.measure.messages import Build, Prepare, Probe, WriteReference
from fettle.recipe import Recipe
from fettle.techniques import Facts, find, source
from fettle.train import Band, Curve, judge_curve, largest_that_fits, load_training
from fettle.workload import find_target

TINY = Path(__file__).parent / "tiny_loop.py"
NORMS = [1.0] * 8
BASE = Curve([2.0, 1.8, 1.6, 1.5, 1.4, 1.3, 1.25, 1.2], NORMS)


def moved(by):
    return Curve([loss + by for loss in BASE.losses], NORMS)


BAND = Band(BASE, [moved(0.1), moved(-0.2), moved(0.3)])


def test_the_typical_distance_of_two_seeds_is_the_yardstick():
    assert BAND.spread == pytest.approx(0.25)  # of 0.1, 0.2, 0.2, 0.3, 0.3, 0.5
    assert judge_curve(BASE, BAND).share == 0
    assert judge_curve(moved(0.05), BAND).share == pytest.approx(0.2)
    assert judge_curve(moved(-0.3), BAND).share == pytest.approx(1.2)
    assert judge_curve(moved(0.05), BAND).problem == ""


def test_nan_and_wild_gradients_are_problems():
    broken = Curve([2.0, math.nan], [1.0, 1.0])
    assert judge_curve(broken, BAND).problem == "the loss of step 2 is nan"
    assert "gradient norm of step 3" in judge_curve(Curve(BASE.losses, [1, 1, math.inf, 1]), BAND).problem
    assert "gradient norms are 5 times" in judge_curve(Curve(BASE.losses, [5.0] * 8), BAND).problem
    assert "gradient norms are 0 times" in judge_curve(Curve(BASE.losses, [0.0] * 8), BAND).problem
    assert judge_curve(Curve(BASE.losses, [0.0, *NORMS[1:]]), BAND).problem == ""
    wide = Band(BASE, [Curve(moved(0.1).losses, [6.0] * 8)])
    assert judge_curve(Curve(BASE.losses, [5.0] * 8), wide).problem == ""


def test_a_larger_batch_is_judged_by_the_mean_of_the_steps_it_stands_for():
    pairs = [1.9, 1.55, 1.35, 1.225]
    assert judge_curve(Curve(pairs, [1.0] * 4), BAND, factor=2).share == pytest.approx(0, abs=1e-12)
    assert "too few steps" in judge_curve(Curve([1.5], [1.0]), BAND, factor=8).problem


def test_seeds_that_diverge_are_left_out_of_the_band(tmp_path):
    target = find_target(f"{TINY}:diverges")
    state = SimpleNamespace(target=target, workload=load_training(target))
    asked = WriteReference(path=str(tmp_path / "band.json"))
    found = reference(state, asked)
    assert found.spread > 0
    assert len(found.curves) == 3
    assert msgspec.json.decode((tmp_path / "band.json").read_bytes(), type=Band).spread == found.spread
    state.target = find_target(f"{TINY}:mostly_diverges")
    with pytest.raises(UsageError, match="diverges from 3 of 4 other seeds"):
        reference(state, asked)


def test_a_model_that_all_runs_share_gets_one_line(tmp_path):
    fields = find_target(f"{TINY}:workload").make()
    target = SimpleNamespace(make=lambda seed: fields, reference="loop.py:workload", name="loop")
    with pytest.raises(UsageError, match="returns the same model each time"):
        reference(SimpleNamespace(target=target, workload=load_training(target)), WriteReference(path=str(tmp_path)))


def test_a_recipe_is_judged_on_the_batches_and_the_noise_of_the_reference(tmp_path, monkeypatch):
    monkeypatch.setattr(_meters, "trim", lambda: None)
    state, asked = State(), Build(find_target(f"{TINY}:remembers"))
    action(state, asked)(state, asked)
    path = str(tmp_path / "band.json")
    reference(state, WriteReference(path=path))
    action(state, asked)(state, asked)
    text = source(Recipe(), Facts(mode="training", max_grad_norm=1.0))
    prepared = prepare(state, Prepare(source=text, label="baseline", path=path))
    assert prepared.accuracy.max_abs == pytest.approx(0, abs=1e-5)
    assert state.workload.model.training  # what is timed is a step of training, whatever the metric did


@pytest.mark.parametrize(("name", "rows"), [("uneven", (4 * 16 + 8) / 5), ("short", 10), ("loader", 16)])
def test_steps_of_unlike_batches_are_of_as_many_rows_as_they_have_on_the_mean(name, rows, monkeypatch):
    monkeypatch.setattr(_meters, "trim", lambda: None)
    state, asked = State(), Build(find_target(f"{TINY}:{name}"))
    action(state, asked)(state, asked)
    text = source(Recipe(), Facts(mode="training", max_grad_norm=1.0))
    assert prepare(state, Prepare(source=text, label="baseline", path="")).samples == rows


@given(st.integers(0, 200), st.integers(1, 200))
def test_the_largest_batch_is_found_in_few_questions(limit, most):
    asked = []

    def fits(size):
        asked.append(size)
        return size <= limit

    assert largest_that_fits(fits, most=most) == min(limit, most)
    assert len(asked) <= 2 * math.ceil(math.log2(most + 1)) + 2


def of_at_most(rows, error):
    def loss(model, batch):
        if len(batch) > rows:
            raise error
        return model(batch).square().mean()

    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    return fettle.TrainingWorkload(torch.nn.Linear(3, 1), optimizer, loss, [torch.ones(4, 3)])


def test_a_batch_that_runs_out_of_memory_does_not_fit_and_the_search_goes_on(monkeypatch):
    monkeypatch.setattr(_meters, "trim", lambda: None)  # half a second a batch in a process that holds all the tests
    facts = Facts(mode="training", samples=4)
    assert _largest_batch(of_at_most(4 * 11, MemoryError()), facts) == 11
    full = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")
    assert _largest_batch(of_at_most(4 * 6, full), facts) == 6
    with pytest.raises(UsageError, match="a batch of 4 times the size raised RuntimeError: odd"):
        _largest_batch(of_at_most(4 * 3, RuntimeError("odd")), facts)


def test_code_of_the_optimizer_factory_counts():
    def structure(optimizer):
        state = State(target=find_target(str(TINY)), made={**find_target(str(TINY)).make(), "optimizer": optimizer})
        state.begin_to_build()
        return build(state, Build(state.target)).structure

    def plain(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    def scheduled(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.2))
        return optimizer

    scheduled.__qualname__ = plain.__qualname__
    assert structure(plain) != structure(scheduled)


class Scaled(torch.nn.Module):
    """Its buffer is a running average that a norm of torch does not keep."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.scale.lerp_(x.std(0), 0.1)
        return self.inner(x / self.scale)


class Taught(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4)

    def forward(self, x):
        self.teacher.weight.data.lerp_(self.student.weight.data, 0.001)
        return self.student(x) - self.teacher(x)


@pytest.mark.parametrize(
    ("model", "moving", "in_block"),
    [
        (Taught, "teacher.weight", ""),
        (lambda: torch.nn.Sequential(*(Scaled() for _ in range(3))), "0.scale", "0.scale"),
        (lambda: torch.nn.Sequential(Scaled()), "0.scale", ""),
        (lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), "", ""),
    ],
)
def test_what_a_step_changes_besides_what_it_trains_rules_levels_out(model, moving, in_block):
    loop = fettle.TrainingWorkload(
        model(), functools.partial(torch.optim.SGD, lr=0.1), lambda model, x: model(x).square().mean(),
        [torch.randn(8, 4)],
    )  # fmt: skip
    facts = probe(SimpleNamespace(workload=loop), Probe()).facts
    assert (facts.moving, facts.moving_in_block) == (moving, in_block)
    assert f"a step changes {moving}," in find("precision").why_not("bf16-master", facts) or not moving
    assert f"a block changes {in_block}," in find("checkpoint").why_not("blocks", facts) or not in_block
