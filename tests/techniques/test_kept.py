"""What was converted before is read, where the same operators would run on the same numbers, and nowhere else."""

import hashlib
import logging

import pytest
import torch

import fettle
from fettle.files import cache_folder
from fettle.techniques import _kept

pytest.importorskip("openvino")


class Net(torch.nn.Module):
    """A weight, a table that is no buffer, a number, and an answer with a structure."""

    def __init__(self, scale=2.0, table=1.0, function=torch.relu):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 4)
        self.table = torch.full((4,), table)
        self.scale, self.function, self.last = scale, function, None

    def forward(self, x):
        self.last = self.function(self.layer(x) * self.scale) + self.table + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return {"scores": self.last, "rows": 3, "more": (x.sum(1), None)}


@pytest.fixture
def start(monkeypatch, tmp_path, caplog):
    """Applies a recipe to a model, calls it, and says how often a model was read and how often converted."""
    monkeypatch.setenv("FETTLE_CACHE", str(tmp_path))

    def start(model=None, rows=3, recipe="runtime=openvino"):
        model = (model or Net()).eval()
        x, before = torch.randn(rows, 8), dict(_kept.tally)
        with torch.no_grad():
            wanted = model(x)
            model.last = None
            with caplog.at_level(logging.INFO, logger="fettle.techniques"):
                found = fettle.apply(model, recipe, [x, x + 1])(x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert not isinstance(model.last, torch._subclasses.FakeTensor)
        return _kept.tally["read"] - before["read"], _kept.tally["converted"] - before["converted"]

    return start


class Remembering(Net):
    """A model that keeps what depends on the length of its input."""

    def __init__(self):
        super().__init__()
        self.memo, self.lengths = {}, []

    def forward(self, x):
        if len(x) not in self.memo:
            self.memo[len(x)] = x.new_ones(4)
            self.lengths.append(x.new_ones(1))
        return self.layer(x) * self.memo[len(x)]


def test_what_a_model_remembers_of_a_call_without_data_is_forgotten():
    model, x = Remembering().eval(), torch.rand(3, 8)
    _kept._add_operators(model, [x], hashlib.sha256())
    assert (model.memo, model.lengths) == ({}, [])


def test_what_a_model_compiles_is_compiled_after_its_operators_were_seen():
    torch._dynamo.reset()
    ran = []

    def backend(graph, examples):
        return lambda *inputs: (ran.append(graph), graph(*inputs))[1]

    model, x = Net(function=torch.compile(lambda x: x * 2, backend=backend)).eval(), torch.rand(3, 8)
    _kept._add_operators(model, [x], hashlib.sha256())
    assert not ran
    model(x)
    assert len(ran) == 1


def test_the_second_time_it_is_read_and_answers_alike(start, caplog):
    assert start() == (0, 1)
    assert "kept for the next start" in caplog.text
    assert start() == (1, 0)
    assert "converted before: read in" in caplog.text
    assert start(rows=2) == (0, 1)  # another shape


def test_a_model_that_computes_otherwise_is_converted(start):
    start()
    bits = Net()
    bits.layer.bias.data = bits.layer.bias.data.nextafter(torch.tensor(9.0))
    for other in (Net(scale=3.0), Net(table=0.0), Net(function=torch.tanh), bits):
        assert start(other) == (0, 1)


def test_what_was_changed_or_is_another_versions_is_converted_again(start, monkeypatch):
    start()
    (folder,) = cache_folder("converted").iterdir()
    weights = folder / "model.bin"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert start() == (0, 1)
    assert start() == (1, 0)
    monkeypatch.setattr(_kept, "installed", lambda names: {"openvino": "another"})
    assert start() == (0, 1)


@pytest.mark.parametrize("recipe", [
    "runtime=onnxruntime", pytest.param("runtime=aoti freeze=on grad=inference_mode", marks=pytest.mark.slow),
])  # fmt: skip
def test_files_of_other_runtimes_are_kept_too(start, recipe):
    if "onnx" in recipe:
        pytest.importorskip("onnxscript")
    assert start(recipe=recipe) == (0, 1)
    assert start(recipe=recipe) == (1, 0)


def test_in_a_study_files_are_kept_after_what_is_timed(monkeypatch, tmp_path):
    """By then the folder that the model was exported to is gone."""
    pytest.importorskip("onnxscript")
    from fettle.techniques import Facts, keep_converted, load, source

    monkeypatch.setenv("FETTLE_CACHE", str(tmp_path))
    lines, x = source(fettle.Recipe.parse("runtime=onnxruntime"), Facts()), torch.randn(3, 8)
    before, answers = dict(_kept.tally), []
    for converted in (1, 0):
        later = []
        with torch.no_grad():
            answers.append(keep_converted(load(lines, "r"), "r", later)(Net().eval(), [x])(x)["scores"])
        assert len(later) == converted
        assert cache_folder("converted").exists() != bool(converted)
        while later:
            later.pop()()
    assert {name: _kept.tally[name] - count for name, count in before.items()} == {"read": 1, "converted": 1}
    torch.testing.assert_close(*answers)


def test_where_nothing_can_be_kept_it_works_all_the_same(start, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FETTLE_CACHE", str(tmp_path / "file"))
    assert start() == (0, 1)
    assert "which could not be kept: NotADirectoryError" in caplog.text
    monkeypatch.setattr(_kept, "_add_operators", lambda *arguments: 1 / 0)
    assert start() == (0, 0)
    assert "what is converted cannot be kept: ZeroDivisionError" in caplog.text


def test_layers_that_were_chosen_are_said_and_learned_again(monkeypatch, tmp_path):
    from fettle.techniques import Facts, Notes, keep_converted, load, source

    monkeypatch.setenv("FETTLE_CACHE", str(tmp_path))
    told, read = [], _kept.tally["read"]
    for _ in range(2):
        torch.manual_seed(0)
        recipe = fettle.Recipe.parse("runtime=openvino-int8-part")
        lines = source(recipe, Facts(max_error=0.5))
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
        with Notes() as notes, torch.no_grad():
            keep_converted(load(lines, "r"), "r")(torch.nn.Sequential(torch.nn.Linear(8, 4)).eval(), [x])(x)
        told.append((notes.lines, notes.learned))
    assert _kept.tally["read"] == read + 1
    assert told[0] == told[1]
    assert told[0][1] == {"int8_layers": [0]}


def test_the_file_that_is_handed_over_keeps_nothing():
    from fettle.techniques import Facts, source

    lines = source(fettle.Recipe.parse("runtime=openvino"), Facts())
    assert "fettle" not in lines
    assert "openvino_converted" in lines


def test_what_the_lines_say_is_heard_where_nobody_listened_before():
    logger = logging.getLogger("optimized")
    logger.setLevel(logging.WARNING)
    try:
        logger.info("not heard, and remembered as such")
        with _kept.Notes() as notes:
            logger.info("heard")
        assert logger.level == logging.WARNING
    finally:
        logger.setLevel(logging.NOTSET)
    assert (notes.lines, notes.learned) == (["heard"], {})
