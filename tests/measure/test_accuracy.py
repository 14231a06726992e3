"""Outputs against the reference: nothing that is missing, NaN or of another shape may pass."""

import itertools
import math
import random
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy
import pytest
import torch

from fettle.errors import UsageError
from fettle.measure import Accuracy, Judge
from fettle.measure._accuracy import compare, first_rows, outputs_of, repeat_rows, user_metric, worst
from fettle.measure._inference import check_inputs, with_check
from fettle.measure._reference import read_reference, write_reference
from fettle.techniques import probe_facts
from fettle.workload import Workload


@dataclass
class Output:
    logits: torch.Tensor
    extra: tuple[torch.Tensor, ...] = ()


def test_equal_outputs_have_no_error() -> None:
    out = outputs_of(Output(torch.randn(4, 10), (torch.randn(3),)))
    found = compare(out, out)
    assert found.error == 0
    assert found.cosine == pytest.approx(1)
    assert found.agreement == 1
    assert found.finite


def test_logits_that_are_masked_agree() -> None:
    masked = {"logits": torch.tensor([[1.0, -math.inf, 0.0], [0.0, 2.0, -math.inf]])}
    assert compare(masked, masked).agreement == 1
    nothing = {"logits": torch.full((2, 3), math.nan)}
    assert math.isnan(compare(nothing, nothing).agreement)


def test_relative_error_is_of_the_worst_leaf() -> None:
    reference = {"a": torch.ones(100), "b": torch.full((4,), 2.0)}
    outputs = {"a": torch.ones(100), "b": torch.full((4,), 2.2)}
    assert compare(outputs, reference).error == pytest.approx(0.1, rel=1e-5)


def test_complex_beside_real_numbers_is_told() -> None:
    real = {"y": torch.ones(2, 2)}
    for one, other in ((real, {"y": torch.ones(2, 2) + 0j}), ({"y": torch.ones(2, 2) + 0j}, real)):
        assert "torch.complex64" in compare(one, other).problem


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_never_pass(value: float) -> None:
    reference = {"y": torch.ones(3)}
    found = compare({"y": torch.tensor([1.0, value, 1.0])}, reference)
    assert "NaN or infinite" in found.problem
    assert Judge().reason(found)


def test_no_number_is_right_where_the_reference_has_none() -> None:
    for none, answer in ((math.nan, 0.0), (-math.inf, math.inf), (math.nan, math.inf)):
        reference = {"y": torch.tensor([1.0, none], dtype=torch.float64)}
        assert "differs where" in compare({"y": torch.tensor([1.0, answer], dtype=torch.float64)}, reference).problem
        assert compare(reference, reference).problem == ""


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.bool])
def test_a_fraction_is_no_whole_number(dtype: torch.dtype) -> None:
    reference = {"y": torch.ones(2, dtype=dtype)}
    assert compare({"y": torch.tensor([1.9, math.nan])}, reference).error == 1
    assert compare({"y": torch.ones(2)}, reference).error == 0
    assert compare({"y": torch.ones(2, dtype=torch.int32)}, reference).error == 0


def test_infinity_where_the_reference_has_it_is_right() -> None:
    reference = {"y": torch.tensor([1.0, -math.inf])}
    assert compare({"y": torch.tensor([1.0, -math.inf])}, reference).problem == ""
    assert compare({"y": torch.tensor([1.0, 3.0])}, reference).problem


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masks_of_the_least_number_of_a_type_hide_no_error(dtype: torch.dtype) -> None:
    """In float64 it is so large that its square is infinite, and an error that is no number was none."""

    def masked(scores: list[float], kind: torch.dtype) -> dict[str, torch.Tensor]:
        return {"logits": torch.tensor([[*scores, torch.finfo(kind).min]], dtype=kind)}

    reference = masked([1.0, 2.0], torch.float64)
    assert compare(masked([1.0, 2.0], dtype), reference).error == 0
    assert compare(masked([5.0, -7.0], dtype), reference).error > 1
    assert compare({"logits": torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype)}, reference).problem


def test_a_missing_leaf_or_another_shape_never_passes() -> None:
    reference = {"y": torch.ones(3)}
    assert "no y" in compare({}, reference).problem
    assert "shape" in compare({"y": torch.ones(4)}, reference).problem


def test_integers_count_the_share_that_differs() -> None:
    assert compare({"t": torch.tensor([1, 2, 3, 9])}, {"t": torch.tensor([1, 2, 3, 4])}).error == 0.25


def test_no_judged_batch_is_a_problem_not_a_pass() -> None:
    assert worst([]).problem


def test_worst_takes_each_measure_from_its_worst_batch() -> None:
    a = Accuracy(0.1, 0.99, 1.0, 0.9, finite=True, judged_batches=1)
    b = Accuracy(0.2, 0.999, 0.5, math.nan, finite=True, judged_batches=1)
    found = worst([a, b])
    assert (found.error, found.cosine, found.max_abs, found.agreement) == (0.2, 0.99, 1.0, 0.9)


def _judge(accuracy: Accuracy, **limits: float) -> str:
    return Judge(**limits).reason(accuracy)  # type: ignore[arg-type]


def test_nan_measures_fail_every_limit() -> None:
    nothing = Accuracy(finite=True)
    assert _judge(nothing, max_error=0.5)
    assert _judge(nothing, min_agreement=0.5)
    assert _judge(nothing, max_metric_drop=0.5, reference_metric=0.9)
    assert _judge(Accuracy(metric=0.9, finite=True), max_metric_drop=0.5)  # no reference metric either


def test_limits_name_their_numbers() -> None:
    assert "0.1" in _judge(Accuracy(error=0.1, finite=True), max_error=0.02)
    assert _judge(Accuracy(error=0.01, finite=True), max_error=0.02) == ""
    assert "fell from 0.97 to 0.9" in _judge(
        Accuracy(metric=0.9, finite=True), max_metric_drop=0.01, reference_metric=0.97
    )
    assert _judge(Accuracy(agreement=0.8, finite=True), min_agreement=0.9) == "top-1 agreement 0.8 is below 0.9"
    assert "5.00% of the tokens it writes are not" in _judge(Accuracy(unequal=0.05, finite=True), exact=True)
    curve = Accuracy(error=2.0, losses=(0.5,), finite=True)
    assert _judge(curve, max_error=1) == "its losses are 2 times as far off as two seeds are from each other"


def test_a_metric_that_raises_or_is_not_finite_is_a_problem() -> None:
    def broken(run: object) -> float:
        raise KeyError("labels")

    assert "KeyError" in user_metric(broken, print)[1]
    assert "nan" in user_metric(lambda run: math.nan, print)[1]
    assert "not a number" in user_metric(lambda run: "good", print)[1]  # type: ignore[arg-type, return-value]
    assert user_metric(lambda run: 0.5, print) == (0.5, "")


def test_growing_a_batch_and_cutting_its_output_back() -> None:
    batch = {"x": torch.arange(6.0).reshape(3, 2), "scale": torch.tensor(2.0), "table": torch.ones(5, 2)}
    grown = repeat_rows(batch, 4, 3)
    assert grown["x"].shape == (12, 2)
    assert grown["table"].shape == (5, 2)
    reference = {".y": batch["x"]}
    assert torch.equal(first_rows({".y": grown["x"]}, 4, reference)[".y"], batch["x"])


def test_rows_that_come_second_in_an_output_are_cut_back_too() -> None:
    """As those of what a recurrent layer remembers: each recipe with larger batches was rejected for their number."""
    memory = torch.randn(1, 3, 4)
    assert torch.equal(first_rows({"h": torch.cat([memory] * 2, 1)}, 2, {"h": memory})["h"], memory)
    square = torch.ones(6, 6)
    assert first_rows({"s": square}, 2, {"s": torch.ones(3, 3)})["s"] is square


def test_a_batch_with_other_rows_than_were_counted_grows_as_well() -> None:
    """The last one of a loader, or where `samples` are frames: one that stays as it is would be fast for its size."""
    assert repeat_rows({"scale": torch.tensor(2.0), "x": torch.ones(3, 2)}, 4, 8)["x"].shape == (12, 2)
    with pytest.raises(RuntimeError, match="no rows that could be repeated"):
        repeat_rows(torch.tensor(2.0), 4, 1)


def test_odd_containers_give_their_tensors() -> None:
    tree = OrderedDict(a=torch.ones(2), b=[{"c": torch.zeros(1)}, None, 3, "text"])
    assert set(outputs_of(tree)) == {".a", ".b[0].c", ".b[2]"}
    assert set(outputs_of([numpy.ones(2), numpy.array(["a name"]), numpy.float32(1)])) == {"[0]", "[2]"}
    assert outputs_of(numpy.arange(3)[::-1])["output"].tolist() == [2, 1, 0]
    assert outputs_of((1 + 2j, torch.ones(1).to(torch.complex64)))["[0]"].item() == 1 + 2j
    assert outputs_of(torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8))["output"].tolist() == [1, 1]


def test_all_that_an_object_holds_is_judged() -> None:
    """As what a detector found: its boxes are an object in the answer."""
    boxes = SimpleNamespace(tensor=torch.ones(2, 4))
    found = SimpleNamespace(fields={"boxes": boxes}, levels=[torch.ones(1)], picture=numpy.ones((2, 2)), seconds=0.1)
    assert set(outputs_of([found])) == {"[0].fields.boxes.tensor", "[0].levels[0]", "[0].picture"}


def test_a_model_that_writes_into_its_input_has_a_reference_and_no_noise(tmp_path):
    batch = torch.ones(2, 3)
    written = write_reference(Workload(lambda x: x.add_(1), [batch], samples=2), str(tmp_path / "reference"))
    assert written.noise == 0
    assert torch.equal(batch, torch.ones(2, 3))
    assert torch.equal(read_reference(str(tmp_path / "reference"))[0]["output"].float(), torch.full((2, 3), 2.0))


def test_a_model_that_writes_into_an_array_has_no_noise(tmp_path):
    """What it wrote would pass for what it draws, and so much would be allowed on top of the limit."""
    array = numpy.ones((2, 3), "float32")
    written = write_reference(Workload(lambda x: torch.from_numpy(x).add_(1), [array]), str(tmp_path / "reference"))
    assert written.noise == 0
    assert (array == 1).all()


def test_a_mask_of_padding_may_be_an_array(tmp_path):
    mask = numpy.array([[1, 1, 0], [1, 0, 0]])
    workload = Workload(lambda x, mask: x, [{"x": torch.ones(2, 3, 4), "mask": mask}], padding="mask")
    write_reference(workload, str(tmp_path / "reference"))
    (answer,) = read_reference(str(tmp_path / "reference"))
    assert answer["output"][..., 0].tolist() == mask.tolist()


def test_a_reference_is_written_whole_beside_whoever_else_writes_it(tmp_path, monkeypatch):
    def save(answers, path):
        with open(path, "w") as file:
            file.write("half")
        others.append(path)
        raise OSError(28, "No space left on device")

    others = []
    monkeypatch.setattr(torch, "save", save)
    for _ in range(2):
        with pytest.raises(UsageError, match="No space left"):
            write_reference(Workload(torch.nn.Linear(3, 3), [torch.ones(2, 3)], samples=2), str(tmp_path / "reference"))
    assert len(set(others)) == 2
    assert not list(tmp_path.iterdir())


def test_a_random_model_has_its_own_distance_as_noise(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    steady = write_reference(Workload(model, [torch.rand(4, 64)], samples=4), str(tmp_path / "steady"))
    shaky = Workload(lambda x: torch.nn.functional.dropout(x, 0.5), [torch.rand(4, 64)], samples=4)
    assert steady.noise == 0
    assert write_reference(shaky, str(tmp_path / "shaky")).noise > 0.1


class Drawn(torch.nn.Module):
    """A sample around a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        mean = self.layer(x)
        return mean + torch.randn_like(mean)


def test_a_model_that_draws_has_a_reference_of_the_same_draws(tmp_path):
    """In float64 it would draw others."""
    model, x = Drawn().eval(), torch.rand(4, 8)
    torch.manual_seed(0)
    wanted = model(x).detach()
    written = write_reference(Workload(model, [x]), str(tmp_path / "reference"))
    assert (written.dtype, written.why) == ("float32", "it draws random numbers, and would draw others in float64")
    assert torch.equal(read_reference(str(tmp_path / "reference"))[0]["output"], wanted)


def seeds_itself(x):
    torch.manual_seed(42)
    return x + torch.randn(x.shape, dtype=x.dtype)


def draws_from_numpy(x):
    return x + torch.from_numpy(numpy.random.standard_normal(x.shape)).to(x.dtype)


def draws_from_python(x):
    return x * random.random()


@pytest.mark.parametrize("draw", [draws_from_numpy, draws_from_python])
def test_other_generators_than_torchs_are_seeded_for_each_answer(draw, tmp_path):
    """Otherwise each answer would be compared with another draw, and that distance allowed on top of the limit."""
    workload = Workload(torch.nn.Linear(8, 8), [torch.rand(4, 8)] * 2, call=lambda model, x: draw(model(x)))
    written = write_reference(workload, str(tmp_path / "reference"))
    assert (written.dtype, written.why) == ("float32", "it draws random numbers, and would draw others in float64")
    first, second = read_reference(str(tmp_path / "reference"))
    assert torch.equal(first["output"], second["output"])


def has_a_generator(x):
    return x + torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("draw", [seeds_itself, has_a_generator])
def test_a_model_that_seeds_itself_has_a_reference_of_the_same_draws(draw, tmp_path):
    workload = Workload(torch.nn.Linear(8, 8), [torch.rand(4, 8)], call=lambda model, x: draw(model(x)))
    written = write_reference(workload, str(tmp_path / "reference"))
    assert (written.dtype, written.noise) == ("float32", 0)


def test_a_generator_among_the_inputs_makes_no_noise(tmp_path):
    batches = [(torch.rand(4, 8), torch.Generator().manual_seed(seed)) for seed in range(2)]
    workload = Workload(lambda x, generator: x + torch.randn(x.shape, generator=generator), batches)
    assert write_reference(workload, str(tmp_path / "reference")).noise == 0
    check_inputs(workload)
    assert torch.equal(batches[0][1].get_state(), torch.Generator().manual_seed(0).get_state())


def test_texts_are_for_a_metric(tmp_path):
    path, batch = str(tmp_path / "reference"), torch.rand(4, 8)
    texts, both = lambda x: ["a", "b"], lambda x: {"text": ["a", "b"], "scores": x}
    with pytest.raises(UsageError, match=r"holds no tensor.*`max_metric_drop`"):
        write_reference(Workload(texts, [batch]), path)
    written = write_reference(Workload(texts, [batch], metric=lambda run: len(run(batch))), path)
    assert (written.only_metric, written.metric, written.notes) == (True, 2.0, [])
    written = write_reference(Workload(both, [batch]), path)
    assert not written.only_metric
    assert written.notes == [
        "tensors and numbers alone are judged, and not the output's .text: a metric could judge it"
    ]


def test_a_model_that_only_remembers_draws_nothing(tmp_path):
    """What an object of the user's remembers is not put back: the answers move, but in float64 they would as well."""
    calls = itertools.count(1)
    model = torch.nn.Linear(8, 8)
    model.register_forward_hook(lambda module, args, output: output * (1 + 0.01 * next(calls)))
    written = write_reference(Workload(model, [torch.rand(4, 8)]), str(tmp_path / "reference"))
    assert written.noise > 1e-3
    assert (written.dtype, written.why) == ("float64", "")


def test_answers_of_other_shapes_with_another_seed_are_said(tmp_path):
    model = Workload(lambda x: x.repeat(1 + int(torch.randint(1 << 30, ())) % 97, 1), [torch.rand(4, 8)])
    written = write_reference(model, str(tmp_path / "reference"))
    assert written.noise == 0
    assert written.notes == ["the answers have other shapes with another seed: recipes are compared on seed 0 alone"]


def test_what_is_rounding_in_one_batch_is_judged_in_the_other(tmp_path):
    class Split(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("basis", torch.linalg.qr(torch.randn(16, 4))[0])

        def forward(self, x):
            code = x @ self.basis
            return {"code": code, "residual": x - code @ self.basis.T}

    torch.manual_seed(0)
    model = Split()
    inputs = [torch.randn(8, 4) @ model.basis.T, torch.randn(8, 16)]  # the first lies in the subspace
    written = write_reference(Workload(model, inputs), str(tmp_path / "reference"))
    first, second = read_reference(str(tmp_path / "reference"))
    assert (set(first), set(second)) == ({".code"}, {".code", ".residual"})
    assert written.notes == ["zero but for rounding, and not judged: the output's .residual (batch 1)"]


def test_a_model_that_remembers_in_attributes_has_no_noise(tmp_path):
    class Counting(torch.nn.Module):
        step = 0

        def forward(self, x):
            self.step += 1
            return x * self.step

    written = write_reference(Workload(Counting(), [torch.rand(2, 3), torch.rand(2, 3)]), str(tmp_path / "reference"))
    assert written.noise == 0


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ((torch.empty(0, 8), torch.ones(4, 8)), 4),  # nothing came before
        ((torch.tensor(0.3), torch.ones(8, 2)), 8),
        ((torch.tensor(0.3),), 1),
        (3, 1),
    ],
)
def test_rows_are_those_of_the_first_tensor_that_has_some(batch: object, rows: int) -> None:
    made = Workload(lambda *args: torch.ones(2), [batch, batch])
    assert with_check(made).samples == probe_facts(made).samples == rows
    if rows > 1:
        assert [len(one) for one in repeat_rows(batch, 2, 99) if one.dim()][-1] == 2 * rows


def test_one_batch_of_arrays_and_texts_is_judged_on_another_one_as_well() -> None:
    batch = (numpy.array([[1, 2], [3, 4]]), {"names": ["a", "b", "c"], "prompt": "one cat"}, "mean", 3)
    ((array, named, *same),) = with_check(Workload(len, [batch], samples=2)).check_inputs
    assert array.tolist() == [[3, 4], [1, 2]]
    assert named == {"names": ["c", "a", "b"], "prompt": "cat one"}
    assert same == ["mean", 3]
    assert batch[0].tolist() == [[1, 2], [3, 4]]


def test_one_batch_that_has_no_other_order_is_judged_on_alone_and_that_is_said(tmp_path) -> None:
    made = with_check(Workload(lambda count: torch.ones(count), [3]))
    assert made.check_inputs == []
    (note,) = write_reference(made, str(tmp_path / "reference"), derived_check=True).notes
    assert "nothing in it could be in another order" in note


def test_a_batch_without_rows_is_refused_unless_they_are_said() -> None:
    empty = torch.empty(0, 8)
    with pytest.raises(UsageError, match=r"no rows: .* samples=N"):
        with_check(Workload(len, [(empty, torch.tensor(1.0))]))
    assert with_check(Workload(len, [empty], samples=3)).samples == 3
