"""Recipes that are stored in the package: calibrated int8, and OpenVINO's own files."""

import copy
import os
import re
import shutil

import pytest
import torch
from torch import library

from fettle.applying import apply
from fettle.errors import UsageError
from fettle.package import function
from fettle.package.export import write_package
from fettle.package.function import as_function
from fettle.package.manifest import open_package, seal
from fettle.package.model_runner import ModelRunner, load_model
from fettle.package.openvino import GRAPH, OpenvinoModel
from fettle.package.program import export_program, load_program
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.techniques import find
from fettle.workload import Workload
from tests.forking import run_script

STATIC = Recipe.parse("quantize=int8-static compile=default freeze=on grad=inference_mode")


def conv(channels=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(channels, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        torch.nn.Linear(8, 4),
    )  # fmt: skip
    batches = [torch.randn(4, channels, 8, 8) for _ in range(3)]
    return Workload(model.eval(), batches, check_inputs=[torch.randn(4, channels, 8, 8)])


def tuned(work, recipe):
    """The recipe applied; `apply` calibrates on the first half of the batches it is given, so they are given twice."""
    return apply(copy.deepcopy(work.model), recipe, [*work.inputs, *work.inputs])


def distance(one, other):
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    """A package in int8 of a model with one channel, for which torch cannot compile any number of rows."""
    work, path = conv(channels=1), tmp_path_factory.mktemp("int8") / "conv"
    try:
        fast = tuned(work, STATIC)
    except UsageError as error:
        if "0 of 2 layers matched" in str(error) and torch.__version__ < "2.13":
            pytest.skip("this torchao quantises nothing under this torch")
        raise
    return work, fast, write_package(work, STATIC, path, name="conv", settings=ServeSettings(max_rows=4))


@library.custom_op("fettle_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_operator_of_ones_own_is_refused_in_a_line(tmp_path):
    class Own(torch.nn.Module):
        def forward(self, x):
            return doubled(x)

    with pytest.raises(UsageError, match=r"doubled.* may not be in a package"):
        write_package(Workload(Own(), [torch.randn(4, 3)]), Recipe(), tmp_path / "m", name="own")


def test_weights_that_torchao_has_quantised_are_stored_in_8_bits(tmp_path):
    quantization, work = pytest.importorskip("torchao.quantization"), conv()
    quantization.quantize_(work.model, quantization.Int8WeightOnlyConfig())
    modules = list(work.model.modules())
    written = write_package(work, Recipe(), tmp_path / "conv", name="conv")
    assert written.manifest.accuracy["relative_error"] < 1e-5
    assert b'"I8"' in (tmp_path / "conv" / "weights.safetensors").read_bytes()
    assert list(work.model.modules()) == modules  # the model as given stays as it is


def test_int8_that_was_calibrated_answers_as_the_tuned_model_did(static):
    work, fast, package = static
    manifest = package.manifest
    assert dict(manifest.recipe).items() >= STATIC.levels.items()
    assert manifest.applied == ("quantize",)
    assert manifest.accuracy["calibrated_on"] == 3
    assert 0 < manifest.accuracy["relative_error"] < 0.1
    run, _ = load_model(package)
    question = work.check_inputs[0]
    with torch.inference_mode():
        answer, expected = run(question)[0], fast(question)
    wanted = work.model(question).detach()
    assert distance(answer, expected) < 0.5 * distance(expected, wanted)  # where a rounding went the other way
    assert distance(answer, wanted) < 0.1
    assert "quantized_decomposed" in (package.folder / "graph.json").read_text()


def test_int8_is_read_in_a_process_that_has_quantised_nothing(static, tmp_path):
    code = "import sys; from pathlib import Path; from fettle.package.program import load_program; import torch; "
    code += "print(load_program(Path(sys.argv[1]))(torch.zeros(3, 1, 8, 8))[0].shape)"
    (tmp_path / "reads.py").write_text(code)
    _, said, errors = run_script(tmp_path / "reads.py", os.environ, str(static[2].folder))
    assert said.strip() == "torch.Size([3, 4])", errors


def test_sizes_that_are_compiled_for_themselves_are_the_only_ones(static):
    _, _, package = static
    if package.manifest.recipe.get("shapes") != "static":  # a torch whose compiler can do it
        assert package.settings.buckets == ()
        return
    assert package.settings.buckets == (1, 2, 4, 8)
    assert set(package.settings.buckets) == {1, 2, 4, 8}


def test_there_must_be_batches_to_calibrate_on(tmp_path):
    work = Workload(conv().model, [torch.randn(4, 3, 8, 8)])
    with pytest.raises(UsageError, match="no batches to calibrate on"):
        write_package(work, STATIC, tmp_path / "conv", name="conv")
    with pytest.raises(UsageError, match="needs compile"):
        write_package(conv(), Recipe.parse("quantize=int8-static"), tmp_path / "conv", name="conv")
    assert not any(tmp_path.iterdir())


def test_a_package_worse_than_its_recipe_allowed_is_refused(tmp_path):
    evidence = {"limits": {"max_error": 1e-9}, "accuracy": {"error": 1e-10}}
    with pytest.raises(UsageError, match="fettle tune allowed 1e-09"):
        write_package(conv(), Recipe.parse("precision=bf16"), tmp_path / "conv", name="conv", evidence=evidence)
    assert not any(tmp_path.iterdir())


class Overflows(torch.nn.Module):
    """In bfloat16 what is close to the largest number becomes infinite."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x + 0.0 * (x * 3.4e38))


def test_answers_that_are_no_numbers_are_refused(tmp_path):
    work = Workload(Overflows().eval(), [torch.ones(4, 4)])
    with pytest.raises(UsageError, match="values that are NaN or infinite"):
        write_package(work, Recipe.parse("precision=bf16"), tmp_path / "model", name="m")


class Attends(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / 8**0.5
        return scores.softmax(-1) @ self.value(x)


class Encodes(torch.nn.Module):
    """Has no forward: it is called by another method."""

    def __init__(self):
        super().__init__()
        self.inner = Attends()

    def encode(self, x):
        return self.inner(x)


def test_modules_are_changed_in_the_workloads_own_call(tmp_path, monkeypatch):
    monkeypatch.setattr(find("fused_linear"), "why_not", lambda *_: "")  # a CPU can, it does not pay there
    work = Workload(Encodes().eval(), [torch.randn(4, 6, 8)], call=lambda model, x: model.encode(x))
    package = write_package(work, Recipe.parse("attention=sdpa fused_linear=on"), tmp_path / "model", name="m")
    assert set(package.manifest.applied) == {"attention", "fused_linear"}
    graph = (package.folder / "graph.json").read_text()
    assert "scaled_dot_product_attention" in graph
    assert "fused.weight" in graph
    assert "key.weight" not in graph


# -- OpenVINO ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def openvino(tmp_path_factory):
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    work = conv()
    recipe = Recipe.parse("runtime=openvino-int8 grad=inference_mode streams=per-core")
    fast = tuned(work, recipe)
    path = tmp_path_factory.mktemp("openvino") / "conv"
    return work, fast, write_package(work, recipe, path, name="conv", settings=ServeSettings(max_rows=4))


def test_openvinos_files_answer_as_the_tuned_model_did(openvino):
    work, fast, package = openvino
    manifest = package.manifest
    assert manifest.model == "openvino"
    assert manifest.recipe == {"runtime": "openvino-int8", "grad": "inference_mode"}
    assert manifest.requires.keys() == {"torch", "openvino"}
    assert sorted(manifest.files) == ["openvino.bin", "openvino.xml", "samples.safetensors", "serve.toml"]
    assert manifest.accuracy["calibrated_on"] == 3
    question = work.check_inputs[0]
    run, _ = load_model(package)
    wanted = work.model(question).detach()
    assert distance(run(question)[0], fast(question)) < 0.5 * distance(fast(question), wanted)
    runner = ModelRunner(package)
    runner.warm([1, 2, 3, 4])
    torch.testing.assert_close(torch.from_numpy(runner.run([[question[:3].numpy()]], 4)[0]), run(question)[0][:3])
    assert not re.search(r"/(home|tmp|root|work)/", (package.folder / GRAPH).read_text())  # nothing of who made it


def test_weights_made_for_vnni_are_refused_where_their_sums_would_be_cut_off(openvino, tmp_path, monkeypatch):
    from fettle.package import openvino as room

    folder = tmp_path / "moved"
    shutil.copytree(openvino[2].folder, folder)
    graph = folder / GRAPH
    text = graph.read_text()
    made = "small" if room.openvino_saturates() else "whole"
    assert text.count(f'weights_in_8_bits value="{made}"') == 1
    for weights, saturates, loads in (("whole", True, False), ("whole", False, True), ("small", True, True)):
        graph.write_text(text.replace(f'weights_in_8_bits value="{made}"', f'weights_in_8_bits value="{weights}"'))
        monkeypatch.setattr(room, "openvino_saturates", lambda answer=saturates: answer)
        if loads:
            OpenvinoModel(folder, "openvino-int8")
        else:
            with pytest.raises(UsageError, match="made for CPUs with VNNI"):
                OpenvinoModel(folder, "openvino-int8")


@pytest.mark.parametrize("layers", [[], [1]], ids=["to be chosen", "chosen by the study"])
def test_a_part_of_the_layers_is_stored_in_int8(layers, tmp_path):
    pytest.importorskip("openvino")
    recipe = Recipe.parse("runtime=openvino-int8-part grad=inference_mode")
    evidence = {"limits": {"max_error": 0.1}, **({"int8_layers": layers} if layers else {})}
    package = write_package(conv(), recipe, tmp_path / "conv", name="conv", evidence=evidence)
    assert 0 < package.manifest.accuracy["relative_error"] < 0.1
    graph = (package.folder / GRAPH).read_text()
    assert graph.count('type="FakeQuantize"') == (2 if layers else 4)  # of the input and of the weights


class Timed(torch.nn.Module):
    """Told the timestep as sines, which OpenVINO must keep in float32 where the rest is in bfloat16."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)

    def forward(self, step, x):
        return self.last(torch.relu(self.first((step * torch.exp(-0.3 * torch.arange(32))).sin()) + x))


def test_sines_kept_in_float32_are_no_answer_of_the_package(tmp_path):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    batches = [(torch.tensor([[762.0], [431.0]]), torch.randn(2, 32) / 10) for _ in range(2)]
    work = Workload(Timed().eval(), batches)
    package = write_package(work, Recipe.parse("runtime=openvino-bf16"), tmp_path / "timed", name="timed")
    assert (package.folder / GRAPH).read_text().count('type="Result"') == 2
    run, _ = load_model(package)
    answers = run(*batches[0])
    assert len(answers) == 1
    assert distance(answers[0], work.model(*batches[0]).detach()) < 0.03


HOSTILE = {
    "an extension": ('version="opset1"', 'version="extension"'),
    "another operator": ('type="Convolution"', 'type="../../Convolution"'),
    "memory between requests": ('type="ReLU"', 'type="ReadValue"'),
    "weights outside": ('offset="0"', 'offset="99999999"'),
    "negative": ('offset="0"', 'offset="-8"'),
    "entities": ("<net ", '<!DOCTYPE net [<!ENTITY a "b">]><net '),
    "a comment": ("<net ", "<!-- <net --><net "),
    "another root": ("<net ", "<not "),
    "no text": ("<net ", "<net\0 "),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_graph_is_refused_before_openvino_reads_it(openvino, tmp_path, monkeypatch, what):

    from fettle.package import openvino as room

    folder = tmp_path / "conv"
    shutil.copytree(openvino[2].folder, folder)
    old, new = HOSTILE[what]
    text = (folder / GRAPH).read_text()
    assert old in text, what
    (folder / GRAPH).write_text(text.replace(old, new, 1))
    seal(folder, openvino[2].manifest)  # a stranger can compute digests too
    monkeypatch.setattr(room, "openvino_core", lambda: pytest.fail("it was read"))
    with pytest.raises(UsageError, match="cannot be used"):
        OpenvinoModel(open_package(folder).folder, "openvino-int8")


def test_openvinos_files_run_on_the_cpu_only(openvino):
    with pytest.raises(UsageError, match="runs on the CPU"):
        load_model(openvino[2], "cuda")


class KeepsAType(torch.nn.Module):
    """Makes a tensor and converts it to its input's type, which exporting finds to be nothing to do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        return self.second(x * torch.arange(4).float().to(x.dtype))


@pytest.mark.parametrize("recipe", ["precision=bf16", "precision=autocast-bf16"])
def test_what_is_converted_to_the_type_of_another_tensor_has_it_in_16_bits_too(tmp_path, recipe):
    work = Workload(KeepsAType().eval(), [torch.rand(4, 4)])
    runner = ModelRunner(write_package(work, Recipe.parse(recipe), tmp_path / "model", name="m"))
    assert work.model.first.weight.dtype == torch.float32
    runner.warm([1, 3])
    with torch.no_grad():
        wanted = work.model(work.inputs[0])[:3]
    answer = torch.from_numpy(runner.run([runner.sample(1), runner.sample(3)[:1]], 0)[0])
    torch.testing.assert_close(answer[1:], wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("loaded", [load_program, lambda folder: as_function(load_program(folder))])
def test_a_program_looks_at_new_shapes_only_and_at_all_of_them(store, loaded):
    module, calls = loaded(store / "net-1"), []
    wrong, right = torch.zeros(2, 5), torch.zeros(2, 4)
    for rows in (right, right, wrong, right, wrong, torch.zeros(3, 4)):
        try:
            calls.append(tuple(module(rows)[0].shape))
        except UsageError:
            calls.append("refused")
    assert calls == [(2, 3), (2, 3), "refused", (2, 3), "refused", (3, 3)]


@pytest.mark.parametrize("most", [1 << 30, 256 * 256 * 4, 0])
def test_one_row_reads_the_matrix_as_given_where_that_is_faster(tmp_path, monkeypatch, most):
    monkeypatch.setattr(function, "_has_avx2_alone", lambda: True)
    monkeypatch.setattr(function, "_TWICE_BYTES", most)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    taken = []
    given = function.linear_by_rows
    monkeypatch.setattr(function, "linear_by_rows", lambda *args: taken.append(len(args[0])) or given(*args))
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256, bias=False))
    write_package(Workload(model.eval(), [torch.rand(4, 256)]), Recipe(), tmp_path / "net", name="net")
    fast = as_function(load_program(tmp_path / "net"))
    taken.clear()
    for rows in (1, 3):
        x = torch.rand(rows, 256)
        with torch.inference_mode():
            torch.testing.assert_close(fast(x)[0], model(x))
    assert taken == [1, 1, 3, 3][:: {1 << 30: 1, 256 * 256 * 4: 2}.get(most, 4)][: most and 4]


class Branches(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class Straight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 3.0))

    def forward(self, x, y):
        return x * self.scale, y


class Apart(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(4, 3)

    def forward(self, x, y):
        return torch.nn.functional.dropout(self.table(x), training=False), y + 1


def test_a_part_of_a_call_computes_nothing_else(tmp_path):
    x, y = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 1)
    write_package(Workload(Apart().eval(), [(x, y)]), Recipe(), tmp_path / "m", name="m")
    fast = as_function(load_program(tmp_path / "m"))
    with pytest.raises(IndexError):
        fast(x + 9, y)
    [found] = fast.part([x + 9, y], (1,))
    assert torch.equal(found, y + 1)


def test_what_no_output_needs_is_not_exported():
    """And what changes a tensor is, in a graph of its own, too."""

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            (x,) = tensors
            y, z = x.clone(), x.clone()
            torch.nn.functional.dropout(x @ x.t(), 0.5, self.training)
            with torch.autocast("cpu", torch.bfloat16):
                y[0] = 7.0
            z[0] = 7.0
            return y, z

    x = torch.randn(3, 4)
    program = export_program(Model().eval(), [x], [{0: "rows"}], 8)
    assert not any("matmul" in str(node.target) for node in program.graph.nodes)
    for made, wanted in zip(program.module()(x), Model().eval()(x), strict=True):
        torch.testing.assert_close(made, wanted)


def test_a_straight_program_answers_as_the_program_does(tmp_path):
    for name, model, inputs in (
        ("branches", Branches(), [torch.ones(2, 3)]), ("straight", Straight(), [torch.ones(2, 3), torch.ones(2, 1)])
    ):  # fmt: skip
        write_package(Workload(model.eval(), [tuple(inputs)]), Recipe(), tmp_path / name, name="m")
        program, call = (load_program(tmp_path / name) for _ in range(2))
        fast = as_function(call)
        assert (fast is call) == (name == "branches")  # its graph holds two others
        for _ in range(2):
            torch.testing.assert_close(fast(*inputs), program(*inputs))
