"""A model that another runtime runs is given inputs of sizes that nobody named: one engine answers them all."""

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import fettle
from fettle.techniques import Facts, load, runtime, source
from fettle.techniques._exported import Exported

pytest.importorskip("openvino")


class Pooled(torch.nn.Module):
    """Rows of tokens of any length, a mask, and an answer with a structure."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 4)

    def forward(self, tokens, mask):
        states = self.layer(self.table(tokens)).relu() * mask[..., None]
        return {"states": states, "mean": states.sum(1) / mask.sum(1, keepdim=True)}


def batch(rows, length, seed=0):
    made = torch.Generator().manual_seed(seed)
    return {"tokens": torch.randint(50, (rows, length), generator=made), "mask": torch.ones(rows, length)}


def applied(recipe, batches, model=None, **facts):
    """The callable of a recipe, and the engines behind it."""
    lines = source(fettle.Recipe.parse(recipe), Facts(max_error=0.5, calibration_batches=len(batches), **facts))
    made = []

    class Watched(Exported):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            made.append(self)

    optimize = load(lines, "r")
    optimize.__globals__["Exported"] = Watched
    run = optimize((model or Pooled()).eval(), batches)
    return run, made[0]


def agree(run, model, given, off=1e-4):
    with torch.no_grad():
        torch.testing.assert_close(run(**given), model(**given), rtol=off, atol=off)


@pytest.mark.parametrize("recipe", [
    "runtime=openvino", pytest.param("runtime=onnxruntime", marks=pytest.mark.slow),
    pytest.param("runtime=aoti", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_first_shapes_have_engines_of_their_own_and_all_others_one(recipe, caplog):
    if "onnx" in recipe:
        pytest.importorskip("onnxscript")
    model = Pooled().eval()
    with caplog.at_level(logging.INFO, logger="optimized"):
        run, engines = applied(recipe, [], model)
        for length in (3, 4, 5, 6):
            agree(run, model, batch(2, length))
        assert not engines.shared
        for length in (7, 1, 30):
            agree(run, model, batch(2, length))
        assert len({id(engine) for engine in engines.engines.values()}) == 5
        agree(run, model, batch(5, 9))  # now the rows differ as well
        agree(run, model, batch(1, 2))
    assert "one engine for any size of these dimensions of the inputs: [[1], [1]]" in caplog.text
    assert "[[0, 1], [0, 1]]" in caplog.text
    assert len({id(engine) for engine in engines.engines.values()}) == 6


def test_keywords_may_come_in_any_order_and_arguments_by_place():
    class Unlike(torch.nn.Module):
        def forward(self, one, other):
            return one - 2 * other

    model, one, other = Unlike().eval(), torch.randn(2, 3), torch.randn(2, 3)
    run, engines = applied("runtime=openvino", [], model)
    for given in ({"one": one, "other": other}, {"other": other, "one": one}, {"other": one, "one": other}):
        agree(run, model, given)
    assert len(engines.engines) == 1
    torch.testing.assert_close(run(one, other), model(one, other))
    torch.testing.assert_close(run(one, other=other), model(one, other=other))


def test_many_shapes_that_are_known_share_one_engine_at_once():
    model, batches = Pooled().eval(), [batch(2, length) for length in range(3, 9)]
    run, engines = applied("runtime=openvino", batches, model, num_input_shapes=6)
    for given in batches:
        agree(run, model, given)
    assert len({id(engine) for engine in engines.engines.values()}) == 1


def test_a_size_that_calibrated_nothing_is_answered_by_the_shared_engine():
    model, batches = Pooled().eval(), [batch(2, 6, seed) for seed in range(3)]
    run, engines = applied("runtime=openvino-int8-part", batches, model)
    agree(run, model, batch(2, 6), 0.1)
    assert not engines.shared
    for length in (7, 2):
        agree(run, model, batch(2, length), 0.1)
    assert len({id(engine) for engine in engines.engines.values()}) == 2


def test_what_is_right_for_one_size_only_leaves_others_to_the_model(caplog):
    """All is in 8 bits, the number of tokens too, of which no more than six were seen: a mean of seven is off."""
    pytest.importorskip("nncf")
    model, batches = Pooled().eval(), [batch(2, 6, seed) for seed in range(3)]
    with caplog.at_level(logging.INFO, logger="optimized"):
        run, _ = applied("runtime=openvino-int8", batches, model)
        agree(run, model, batch(2, 6), 0.1)
        agree(run, model, batch(2, 7), 1e-6)
    assert "for other sizes its answer [2, 4] would be wrong" in caplog.text
    assert "left to the model itself: int8: no calibration batch has the shape of this input" in caplog.text


class OneSize(Pooled):
    """It counts in Python what the exporter then takes for a constant."""

    def forward(self, tokens, mask):
        return {**super().forward(tokens, mask), "length": int(tokens.shape[1])}


def test_where_there_is_no_such_engine_each_shape_has_its_own_but_not_without_end(caplog, monkeypatch):
    monkeypatch.setattr(Exported, "MOST", 6)
    model = OneSize().eval()
    with caplog.at_level(logging.INFO, logger="optimized"):
        run, engines = applied("runtime=openvino", [], model)
        for length in range(3, 10):
            agree(run, model, batch(2, length))
    assert "each shape has an engine of its own: the model returns numbers" in caplog.text
    assert len(engines.engines) == 6


def test_an_engine_that_answers_otherwise_is_not_used(caplog):
    def build(flat, tensors, samples, free):
        flat(*tensors)
        return lambda values: [flat(*values)[0] * (2 if any(free) else 1), *flat(*values)[1:]]

    model = Pooled().eval()
    with caplog.at_level(logging.INFO, logger="optimized"):
        run = Exported(model, build, own=1)
        for length in (3, 4):
            agree(run, model, batch(2, length))
    assert "for other sizes its answer [2, 4, 4] would be wrong" in caplog.text


def test_weights_that_inference_mode_made_are_said_to_be_so():
    with torch.inference_mode():
        model = torch.nn.Linear(3, 2).eval()
        run, _ = applied("runtime=openvino", [], model)
        with pytest.raises(RuntimeError, match=r"made in torch.inference_mode\(\): build it, and call `optimize`"):
            run(torch.rand(2, 3))


class Changing(torch.nn.Module):
    """From some length on it does something else."""

    def forward(self, x):
        return (x[:, :8] * 2 if x.shape[1] > 8 else x).sum(1)


def test_what_a_model_does_at_a_size_that_nobody_named_is_asked_of_the_model():
    model, batches = Changing().eval(), [(torch.randn(2, length),) for length in range(3, 9)]
    run, engines = applied("runtime=openvino", batches, model, num_input_shapes=6)
    for length in (5, 7, 20, 20, 6):
        x = torch.randn(2, length)
        torch.testing.assert_close(run(x), model(x))
    assert len({id(engine) for engine in engines.engines.values()}) == 2


def test_numbers_that_are_equal_and_of_another_type_are_other_arguments():
    class Times(torch.nn.Module):
        def forward(self, x, factor):
            return x * factor

    def build(flat, tensors, samples, free):
        flat(*tensors)
        return lambda values: list(flat(*values))

    model, x = Times().eval(), torch.arange(4)
    run = Exported(model, build)
    for factor in (1, True, 1.0, 0.0, -0.0):
        assert str(run(x, factor)) == str(model(x, factor))


def test_outputs_of_any_type_also_twice_and_inputs_among_them():
    class Types(torch.nn.Module):
        def forward(self, x):
            y = x * 3
            return y, y, x, y.to(torch.bfloat16), y.to(torch.float16), y > 0, y.argmax(-1)

    model, x = Types().eval(), torch.randn(2, 3)
    run, _ = applied("runtime=openvino", [], model)
    for found, wanted in zip(run(x), model(x), strict=True):
        torch.testing.assert_close(found, wanted)


def test_an_input_that_is_as_long_as_the_batch_by_chance_is_not_cut():
    class Beside(torch.nn.Module):
        def forward(self, x, table):
            return (x @ table.T).softmax(-1) @ table

    model, table = Beside().eval(), torch.randn(4, 8)
    run, _ = applied("runtime=openvino streams=per-core", [], model)
    for rows in (6, 4):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(run(x, table), model(x, table), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("streams", ["one", "per-core"])
def test_threads_that_call_at_once_get_their_own_answers(streams):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32)).eval()
    inputs = [torch.randn(8, 32) for _ in range(4)]
    run, _ = applied(f"runtime=openvino streams={streams}", [], model)
    run(inputs[0])

    def right(x):
        wanted = model(x)
        return all(torch.allclose(run(x), wanted, atol=1e-4) for _ in range(200))

    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, inputs))


def test_a_library_gets_its_inputs_as_the_examples_lay(monkeypatch):
    """What AOTInductor compiles reads memory by the strides of its examples, whatever it is given."""
    made, given = [], []
    monkeypatch.setattr(runtime, "aoti_files", lambda flat, tensors, *rest: made.append(list(tensors)))
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: lambda *values: given.append(values))
    plain, last = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    run = runtime.aoti_engine(torch.nn.Identity(), [plain, last, torch.randn(4, 3).t()], (), {})
    run([last, plain, torch.randn(1, 4).expand(3, 4)])
    run([plain, last, torch.randn(3, 4)])
    for values in given:
        assert [value.stride() for value in values] == [value.stride() for value in made[0]]


def test_weights_of_a_library_on_a_gpu_are_in_torchs_account(monkeypatch):
    given, option = [], "weight_use_caching_allocator"
    monkeypatch.setattr(runtime, "exported_program", lambda *what: None)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda program, **how: given.append(how))
    for on_gpu in (True, False):
        runtime.aoti_files(None, [SimpleNamespace(is_cuda=on_gpu)], (), {"freezing": True}, "")
    more, plain = (how["inductor_configs"] for how in given)
    assert more == {**plain, f"aot_inductor.{option}": True}
    assert hasattr(torch._inductor.config.aot_inductor, option)


@pytest.mark.parametrize("told", [lambda size: size > 16, lambda size: "long" if size > 16 else "short"])
def test_what_is_told_of_a_size_beside_tensors_is_that_sizes(told):
    class Telling(torch.nn.Module):
        def forward(self, x):
            return {"y": x * 2, "told": told(x.shape[1])}

    model, batches = Telling().eval(), [(torch.randn(2, length),) for length in range(3, 9)]
    run, _ = applied("runtime=openvino", batches, model, num_input_shapes=6)
    for length in (5, 20):
        assert run(torch.randn(2, length))["told"] == told(length)
