"""The training workload: what is accepted, and the one line for what is not."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

import fettle
from fettle.errors import UsageError
from fettle.measure._training import _check_step
from fettle.recipe import Recipe
from fettle.techniques import Facts, load, source
from fettle.train import Steps, load_training, training_facts, training_fingerprint
from fettle.train.workload import make
from fettle.workload import find_target

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def made(**changes):
    fields = {"model": nn.Linear(3, 1), "optimizer": SGD, "loss": loss, "data": [(torch.ones(4, 3), torch.ones(4, 1))]}
    return fettle.TrainingWorkload(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": len}, "model is a builtin_function_or_method, not an nn.Module"),
        ({"model": nn.ReLU()}, "no parameter that requires a gradient"),
        ({"optimizer": SGD(nn.Linear(1, 1).parameters())}, "is an optimizer already"),
        ({"optimizer": "adam"}, "optimizer is a str"),
        ({"loss": 3}, "loss is an int"),
        ({"data": []}, "data is empty"),
        ({"data": iter([1])}, "is an iterator"),
        ({"data": "text"}, "list of batches"),
        ({"steps": 2}, "at least 4"),
        ({"steps": True}, "at least 4"),
        ({"max_grad_norm": 0}, "above 0"),
        ({"samples": 0}, "rows in one batch"),
        ({"metric": 1}, "metric is an int"),
    ],
)
def test_bad_fields_get_one_line(changes, says):
    with pytest.raises(UsageError, match=says) as caught:
        made(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": lambda parameters: 1 / 0}, "the optimizer factory raised ZeroDivisionError"),
        ({"optimizer": lambda parameters: "adam"}, "the optimizer factory returned a str"),
        ({"loss": lambda model, batch: model(batch[0])}, r"the loss function returned a tensor of shape \(4, 1\)"),
        ({"loss": lambda model, batch: 0.5}, "the loss function returned float"),
        ({"loss": lambda model, batch: loss(model, batch).detach()}, "the loss has no gradient"),
        ({"loss": lambda model, batch: model(batch)}, "the first training step raised TypeError"),
    ],
)
def test_a_loop_whose_step_cannot_be_made_gets_one_line(changes, says):
    with pytest.raises(UsageError, match=says):
        _check_step(made(**changes), training_facts(made(**changes)))


@pytest.mark.parametrize("ask", [training_fingerprint, training_facts])
def test_an_optimizer_beside_its_schedule_gets_one_line_from_whoever_asks_first(ask):
    with pytest.raises(UsageError, match="the optimizer factory returned a tuple, not a torch"):
        ask(made(optimizer=lambda parameters: (SGD(parameters), None)))


def test_rows_that_numpy_has_counted_can_be_told_to_another_process():
    assert type(made(samples=np.int64(4)).samples) is int


def test_stream_goes_round_and_seeds_reorder_it():
    workload = made(data=[torch.full((1,), float(i)) for i in range(5)])
    stream = workload.stream()
    assert [int(next(stream)) for _ in range(7)] == [0, 1, 2, 3, 4, 0, 1]
    other = workload.stream(seed=3)
    order = [int(next(other)) for _ in range(5)]
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert order != [0, 1, 2, 3, 4]
    assert made().rows == 4


FILE = """
import functools
import torch

def loss(model, batch):
    return model(batch).square().mean()

def workload(seed=0):
    torch.manual_seed(seed)
    return {"model": torch.nn.Linear(2, 2), "optimizer": functools.partial(torch.optim.SGD, lr=0.1), "loss": loss,
            "data": [torch.ones(3, 2)]}

def shuffled():
    rows = [torch.ones(2) * place for place in range(64)]
    return {**workload(), "data": torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)}

def short():
    return {"model": torch.nn.Linear(2, 2)}

def other():
    return torch.nn.Linear(2, 2), [torch.ones(1, 2)]
"""


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_leaves_out_has_no_gradient_norm(fused):
    """A scale that is too large in the beginning is nothing that a recipe is refused for."""

    def train(model, make_optimizer, loss, data):
        optimizer = make_optimizer(list(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=1e-30)
        while True:
            value = loss(model, data[0])
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield value.detach()

    torch.manual_seed(0)
    optimizer = functools.partial(torch.optim.SGD, lr=1e-6, fused=fused)
    work = made(optimizer=optimizer, data=[(torch.ones(4, 3), torch.full((4, 1), 100.0))])
    error = float(work.model(torch.ones(1, 3)).detach() - 100)
    curve = Steps(train, work).curve(3)
    assert len(curve.losses) == 3
    assert curve.grad_norms == pytest.approx([4 * abs(error)] * 2, rel=1e-3)  # 2 * error for three weights and a bias


def test_sparse_gradients_have_a_norm():
    def train(model, make_optimizer, loss, data):
        optimizer = make_optimizer(list(model.parameters()))
        while True:
            value = loss(model, data[0])
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield value.detach()

    def norms(sparse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(9, 3, sparse=sparse), nn.Linear(3, 1))
        return Steps(train, made(model=model, data=[(torch.tensor([[1, 2], [2, 2]]), torch.ones(2, 1))])).curve(2)

    assert norms(True).grad_norms == pytest.approx(norms(False).grad_norms)


def test_an_optimizer_around_another_is_watched():
    """As published ones are, it never calls `Optimizer.__init__`."""

    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults

        def step(self, closure=None):
            return self.inner.step(closure)

    work = made(optimizer=lambda parameters: Around(SGD(parameters)))
    curve = Steps(load(source(Recipe(), Facts(mode="training")), "baseline"), work).curve(3)
    assert len(curve.grad_norms) == 3


def test_settings_of_groups_count_and_addresses_do_not():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def hashed(optimizer):
        return training_fingerprint(made(model=model, optimizer=optimizer))

    def in_groups(rate, count=1):
        return lambda p: SGD([{"params": p[:count]}, {"params": p[count:], "lr": rate}])

    class Shaped(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            self.defaults["shape"] = lambda step: 1.0

    assert len({hashed(SGD), hashed(in_groups(0.2)), hashed(in_groups(0.3)), hashed(in_groups(0.3, 0))}) == 4
    assert hashed(in_groups(0.2)) == hashed(in_groups(0.2))
    assert hashed(Shaped) == hashed(Shaped)


def test_a_loader_that_shuffles_begins_alike_whether_or_not_the_mode_was_known(tmp_path):
    (tmp_path / "small.py").write_text(FILE)
    target = find_target(f"{tmp_path}/small.py:shuffled")
    known = training_fingerprint(load_training(target))
    assert training_fingerprint(load_training(target, made=make(target)[0])) == known


def test_a_factory_is_given_the_seed(tmp_path):
    (tmp_path / "small.py").write_text(FILE)
    target = find_target(str(tmp_path / "small.py"))
    one, again, other = load_training(target), load_training(target), load_training(target, seed=1)
    assert one.name == "small"
    assert training_fingerprint(one) == training_fingerprint(again) != training_fingerprint(other)
    with pytest.raises(UsageError, match="a dict without data, loss, optimizer"):
        load_training(find_target(f"{tmp_path}/small.py:short"))
    with pytest.raises(UsageError, match=r"needs fettle\.TrainingWorkload"):
        load_training(find_target(f"{tmp_path}/small.py:other"))
