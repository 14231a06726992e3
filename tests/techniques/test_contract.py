"""What every technique and level must pass. A new technique is covered by being in the catalogue."""

import ast
import copy
import os
import sys
import types
from collections import UserDict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor
from torch.utils._python_dispatch import TorchDispatchMode

import fettle
from fettle.errors import UsageError
from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.recipe_file import read_recipe
from fettle.techniques import (
    CATALOGUE,
    Code,
    Facts,
    bundles,
    canonical,
    check_names,
    conflict,
    find,
    load,
    machine_facts,
    needs_of,
    probe_facts,
    source,
)
from fettle.techniques._exported import flatten
from fettle.techniques._pipeline import Part, calls_of_parts, put_part
from fettle.techniques._ranks import endless
from fettle.techniques._source import preamble
from fettle.techniques.compile import During
from fettle.techniques.cuda_graphs import Graphed
from fettle.techniques.precision import to_16_bits
from fettle.techniques.quantize import Quantize, quantize_static, writes_over_inputs
from fettle.tuning._arguments import check_techniques
from fettle.workload import Target, Workload, find_target, leaves, spread, tensors
from tests.forking import run_script

WORKLOAD = '''
from dataclasses import dataclass

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(torch.softmax(q @ k.transpose(-2, -1) / 8.0, dim=-1) @ v)


class Tiny(nn.Module):
    """A convolution, attention written out, a linear layer, a structured output."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 4, stride=4), nn.BatchNorm2d(64), nn.ReLU())
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(64, 16)

    def forward(self, image, gain=1.0):
        x = self.stem(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.drop(x.mean(1))) * gain, "tokens": x}


def workload(seed):
    torch.manual_seed(seed)
    return Tiny(), [{"image": torch.randn(2, 3, 16, 16)} for _ in range(4)]
'''


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workload")
    (folder / "tiny.py").write_text(WORKLOAD)
    (folder / "fettle.py").write_text("raise ImportError('the rendered source must stand without fettle')\n")
    return folder / "tiny.py"


def build(target: Path) -> Workload:
    module = sys.modules["tiny"] = types.ModuleType("tiny")
    exec(compile(target.read_text(), str(target), "exec"), module.__dict__)
    return Workload(*module.workload(0))


FACTS = replace(
    Facts(
        training=True, train_mode_differs=True, calibration_batches=2, num_linear=5, num_conv=1, num_4d_inputs=1,
        block_classes=("tiny.Block",), manual_attention=2, samples=2, allow_batch=True,
    ),
    **{
        name: getattr(probe_facts(Workload(torch.nn.Linear(2, 2), [torch.rand(2, 2)])), name)
        for name in ("physical_cores", "cpu_flags", "packages", "libraries")
    },
)  # fmt: skip
EXPENSIVE = {
    "compile": {"default", "max-autotune"},
    "runtime": {"openvino-int8", "openvino-int8-part", "openvino-bf16", "openvino-bf16-sums", "aoti", "onnxruntime"},
    "threads": {"2"},
    "freeze": {"on"},
    "region": {"blocks"},
    "quantize": {"int8-weight", "int8-static", "int8-dynamic"},
    "batch": {"x4", "x8", "x16", "x32"},
    "precision": {"fp16", "autocast-fp16"},
    "shapes": {"static", "dynamic"},
    "streams": {"per-core"},
}
"""Left to the slow tests: a near twin or a mixture stands for them, or they cost too much."""


def completed(name: str, level: str) -> Recipe:
    """The level with what it cannot do without."""
    levels = {"mode": "eval", **find(name).needs, name: level}
    if level == "int8-static":
        levels["freeze"] = "on"
    if name == "sdpa_backend":
        levels["attention"] = "sdpa"
    return Recipe(levels)


def here() -> list[object]:
    cases = []
    for technique in CATALOGUE:
        for level in technique.levels(FACTS) if "inference" in technique.modes else ():
            if not level.why_not and level.name != technique.default:
                slow = level.name in EXPENSIVE.get(technique.name, ())
                case = (technique.name, level.name)
                cases.append(pytest.param(*case, marks=[pytest.mark.slow] if slow else [], id="=".join(case)))
    return cases


@pytest.mark.parametrize("technique", CATALOGUE, ids=lambda technique: technique.name)
def test_describes_itself(technique):
    for facts in (FACTS, Facts(), Facts(is_module=False), Facts(device="cuda", cuda_capability=(9, 0), num_linear=9)):
        levels = technique.levels(facts)
        names = [level.name for level in levels]
        assert len(set(names)) == len(names)
        assert not next(level for level in levels if level.name == technique.default).why_not
        for level in levels:
            assert level.summary
            assert Recipe.parse(f"{technique.name}={level.name}").levels == {technique.name: level.name}
            recipe = completed(technique.name, level.name)
            asked = level.name != technique.default or technique.precondition(facts) != technique.default
            reason = technique.conflict(level.name, recipe, facts) if asked else ""
            for phrase in (level.why_not, reason):
                assert not phrase.endswith(".")
                assert "\n" not in phrase
            assert technique.level_cost(level.name) in (1, 2, 3)
            if level.name != technique.default and not level.why_not:
                source(completed(technique.name, level.name), facts)


def test_default_levels_render_nothing():
    defaults = Recipe({technique.name: technique.default for technique in CATALOGUE})
    assert canonical(defaults) == Recipe()
    assert source(defaults, FACTS, heading="x") == source(Recipe(), FACTS, heading="x")


@pytest.mark.parametrize(("name", "level"), here())
def test_runs_as_plain_pytorch(name, level, target, tmp_path):
    recipe = completed(name, level)
    assert conflict(recipe, FACTS) == ""
    check(recipe, target, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "mode=eval grad=no_grad attention=sdpa precision=bf16 channels_last=on compile=default freeze=on region=blocks",
        pytest.param(
            "mode=eval grad=inference_mode attention=sdpa precision=autocast-bf16 channels_last=on runtime=aoti",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mode=eval grad=inference_mode attention=sdpa precision=bf16 quantize=int8-dynamic compile=default",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mixtures(text, target, tmp_path):
    recipe = Recipe.parse(text)
    assert conflict(recipe, FACTS) == ""
    check(recipe, target, tmp_path)


def check(recipe: Recipe, target: Path, folder: Path) -> None:
    """The script in a fresh process, without fettle, and the same source loaded here give the same answers."""
    text = source(recipe, FACTS, target=find_target(f"{target}:workload"), calibration=2)
    script, saved = folder / "optimized.py", folder / "outputs.pt"
    save = f"\n    torch.save([run(**batch) for batch in batches], {str(saved)!r})\n"
    script.write_text(text + save)
    environment = {**os.environ, "PYTHONPATH": str(target.parent)}
    code, out, err = run_script(script, environment)
    assert code == 0, err[-2000:]
    assert "later calls:" in out

    workload = build(target)
    with torch.no_grad():
        expected = [workload.run(workload.model.eval(), batch) for batch in workload.inputs]
    fresh = build(target)
    run = load(text, "optimized.py")(fresh.model, fresh.inputs[:2])
    for batch, script_output, reference in zip(fresh.inputs, torch.load(saved), expected, strict=True):
        args, kwargs = spread(batch)
        output = run(*args, **kwargs)
        assert type(output) is type(reference)
        parts = zip(leaves(output), leaves(script_output), leaves(reference), strict=True)
        for (path, mine), (_, other), (right, wanted) in parts:
            assert path == right
            assert mine.shape == wanted.shape
            assert mine.dtype == wanted.dtype or str(recipe.levels.get("precision")).startswith("autocast")
            torch.testing.assert_close(mine, other, atol=0.05, rtol=0.05)
            error = (mine.float() - wanted).norm() / wanted.norm()
            # eight bits with two batches to calibrate on, on random weights, are far off; wrong wiring is off by 1
            assert error < (0.5 if recipe.levels.get("runtime") == "openvino-int8" else 0.1)


def test_the_script_builds_the_workload_with_the_arguments_it_was_tuned_with(tmp_path):
    path = tmp_path / "sized.py"
    path.write_text("def workload(size=2, seed=7): return {'model': (size, seed), 'inputs': []}\n")
    for arguments, made in (({}, (2, 0)), ({"size": "4"}, ("4", 0)), ({"size": 4, "seed": 5}, (4, 5))):
        script: dict[str, Any] = {}
        exec(source(Recipe(), FACTS, target=replace(find_target(str(path)), arguments=arguments)), script)
        assert script["load"]()[0] == made


@dataclass
class Output:
    value: torch.Tensor
    label: str


class Structured(torch.nn.Module):
    """Takes and returns dataclasses that torch has never heard of."""

    def forward(self, x: Output) -> Output:
        return Output(x.value * 2, x.label)


def test_runtime_takes_dataclasses_and_several_shapes():
    batches = [Output(torch.rand(size), "a") for size in (3, 4)]
    model = Structured().eval()
    facts = probe_facts(Workload(model, batches))
    run = load(source(Recipe({"runtime": "openvino"}), facts), "optimized")(model, batches)
    for batch in batches:
        first = run(batch)
        kept = first.value.clone()
        run(Output(batch.value + 1, "a"))
        assert first.label == "a"
        torch.testing.assert_close(first.value, batch.value * 2)
        torch.testing.assert_close(first.value, kept)  # the next call does not write into it


@pytest.mark.parametrize("level", ["int8-weight", "int8-dynamic"])
def test_quantisation_that_matches_nothing_says_so(level):
    model = torch.nn.Conv2d(3, 3, 1)
    with pytest.raises(RuntimeError, match=f"{level}: 0 of 0 layers matched"):
        load(source(Recipe({"quantize": level}), Facts(num_linear=1)), "optimized")(model, [torch.rand(1, 3, 4, 4)])


class Steps(torch.nn.Module):
    """A recurrent layer over what is left of the input's steps."""

    def __init__(self, every):
        super().__init__()
        self.every, self.onward, self.head = every, torch.nn.LSTM(4, 4, batch_first=True), torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.onward(x[:, :: self.every])[0])


@pytest.mark.parametrize("every", [1, 4])  # which torch finds while it exports, and in a call
def test_calibration_on_steps_that_differ_in_number_says_so(every):
    said = r"the model with its recurrent layers \(onward\) takes inputs of one size, and the batches differ"
    with pytest.raises(RuntimeError, match=said):
        quantize_static(Steps(every).eval(), batches := [torch.rand(2, length, 4) for length in (12, 20)])
    x86 = {"cpu_flags": ("avx2",), "packages": {"torchao": ""}, "calibration_batches": 1}
    facts = replace(probe_facts(Workload(Steps(every).eval(), batches)), **x86)
    assert "recurrent layers" in Quantize().levels(facts)[2].why_not  # before a trial
    rows = replace(probe_facts(Workload(Steps(every).eval(), [torch.rand(n, 12, 4) for n in (2, 3)])), **x86)
    assert Quantize().levels(rows)[2].why_not == ""


class Masked(torch.nn.Module):
    """Takes an argument that may be left out."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = torch.nn.Linear(8, 32), torch.nn.Linear(32, 4)

    def forward(self, x, mask=None):
        x = self.layer(x).relu()
        return self.head(x if mask is None else x * mask)


@pytest.fixture
def masked():
    torch.manual_seed(0)
    return Masked().eval()


def test_int8_takes_another_number_of_rows(masked):
    run, x = quantize_static(masked, [(torch.rand(4, 8), torch.ones(4, 1)) for _ in range(2)]), torch.rand(3, 8)
    with torch.no_grad():
        for mask in (torch.ones(3, 1), torch.ones(3, 1) / 2):
            wanted = masked(x, mask)
            assert (run(x, mask) - wanted).norm() < 0.05 * wanted.norm()


def test_int8_does_not_ignore_an_argument_that_was_none(masked):
    run = quantize_static(masked, [(torch.rand(4, 8), None) for _ in range(2)])
    assert run(torch.rand(4, 8), None).shape == (4, 4)
    for args, named in (((torch.zeros(4, 32),), {}), ((), {"mask": torch.zeros(4, 32)})):
        with pytest.raises(RuntimeError, match="int8: mask must be None where it was in the sample batches"):
            run(torch.rand(4, 8), *args, **named)


def test_int8_takes_what_a_model_hands_on(masked):
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = masked

        def forward(self, *args):
            return self.inner(*args)

    batch = torch.rand(4, 8), torch.ones(4, 1)
    assert quantize_static(Wrapper().eval(), [batch] * 2)(*batch).shape == (4, 4)


def test_int8_takes_keywords_that_a_model_hands_on(masked):
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = masked

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    run = quantize_static(Wrapper().eval(), [{"*": (torch.rand(4, 8),), "mask": torch.ones(4, 1)} for _ in range(2)])
    x, mask = torch.rand(3, 8), torch.ones(3, 1)
    with torch.no_grad():
        assert (run(x, mask=mask) - masked(x, mask)).norm() < 0.05 * masked(x, mask).norm()


def test_int8_is_not_calibrated_on_a_model_that_its_calls_change():
    for changes in (False, True):
        why_not = find("quantize").why_not("int8-static", replace(FACTS, changes_buffers=changes))
        assert ("changes its own buffers" in why_not) == changes


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.layer(x)


def test_inputs_are_copied_where_the_compiler_may_add_into_them():
    for model, may in ((Residual(), True), (torch.nn.Linear(8, 8), False)):
        assert writes_over_inputs(quantize_static(model.eval(), [torch.rand(4, 8) for _ in range(2)])) is may
    assert "copied(args)" in source(Recipe.parse("quantize=int8-static compile=default freeze=on"), FACTS)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compile=default", "runtime=aoti"])
def test_int8_leaves_its_inputs_as_they_were(how):
    recipe = Recipe.parse(f"mode=eval quantize=int8-static freeze=on grad=inference_mode {how}")
    run, x = (
        load(source(recipe, FACTS), "optimized")(Residual(), [torch.rand(4, 8) for _ in range(2)]),
        torch.rand(4, 8),
    )
    before = x.clone()
    run(x)
    assert torch.equal(x, before)


@pytest.mark.slow
def test_int8_is_compiled_for_each_number_of_rows(masked):
    recipe = Recipe.parse("mode=eval quantize=int8-static compile=default freeze=on grad=inference_mode")
    assert "shapes=static or auto" in conflict(recipe.with_levels(shapes="dynamic"), FACTS)
    text = source(recipe, FACTS)
    run = load(text, "optimized")(copy.deepcopy(masked), [(torch.rand(8, 8), torch.ones(8, 1)) for _ in range(2)])
    for rows in (8, 5, 3, 1):
        batch = torch.rand(rows, 8), torch.ones(rows, 1)
        wanted = masked(*batch)
        assert (run(*batch) - wanted).norm() < 0.05 * wanted.norm()


def test_bundles_are_free_of_conflict():
    for facts in (FACTS, replace(FACTS, num_conv=0), replace(FACTS, num_conv=50), replace(FACTS, cpu_flags=())):
        found = bundles(facts)
        assert 4 <= len(found) <= 8
        assert all(conflict(recipe, facts) == "" for recipe in found)
    gpu = Facts(device="cuda", cuda_capability=(9, 0), num_linear=9, packages={"torchao": "0.18"})
    assert len(bundles(gpu)) >= 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_that_are_in_16_bits_as_given_are_tried_with_what_goes_beside_that(dtype):
    level = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    facts = replace(FACTS, dtype=dtype, cpu_flags=("avx512f", "avx512_bf16", "amx_bf16"))
    assert canonical(Recipe({"precision": level}), facts) == Recipe()
    if dtype == "bfloat16":
        assert len(bundles(facts)) >= 4
        assert not any("precision" in recipe.levels for recipe in bundles(facts))
    gpu = Facts(device="cuda", cuda_capability=(9, 0), num_linear=9, dtype=dtype)
    assert needs_of(gpu)["sparsity"] == {"grad": "inference_mode"}
    assert needs_of(replace(gpu, dtype="float32"))["sparsity"] == {"grad": "inference_mode", "precision": "bf16"}
    texts = replace(gpu, new_tokens=32, custom_call=True, keeps="static", dtype="bfloat16")
    assert any(recipe.levels.get("kv_cache") == "static-compiled" for recipe in bundles(texts))
    training = replace(gpu, mode="training", optimizer_levels=("foreach", "fused"))
    assert any(recipe.levels.get("compile") == "default" for recipe in bundles(training))


def test_every_level_is_known_on_every_machine() -> None:
    from fettle.techniques import known_levels, machine_facts

    known = known_levels()
    for technique in CATALOGUE:
        assert {level.name for level in technique.levels(machine_facts())} <= set(known[technique.name])
        assert {level.name for level in technique.levels(FACTS)} <= set(known[technique.name])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("parallel=zero3 policy=bf16 wrap=size", "parallel=zero3 mixed_precision=bf16 auto_wrap=size"),
        ("parallel=ddp ddp_graph=static", "parallel=ddp static_graph=on"),
        ("parallel=ddp ddp_graph=dynamic", "parallel=ddp static_graph=off"),
    ],
)
def test_what_earlier_versions_called_it_is_read(old, new, tmp_path):
    old, new = Recipe.parse(old), Recipe.parse(new)
    assert read_recipe(str(old)).recipe == read_recipe(old).recipe == new
    old.save(tmp_path / "recipe.toml")
    assert read_recipe(tmp_path / "recipe.toml").recipe == new
    kept = Trial(old, "measured", race=3).to_json()
    kept["heat"] = kept.pop("race")
    read = Trial.from_json(kept)
    assert (read.recipe, read.race) == (new, 3)
    assert check_techniques({"policy": "bf16"}) == {"mixed_precision": ["bf16"]}


def test_a_level_that_is_a_number_may_be_written_as_one():
    assert check_techniques({"threads": 2, "prefill": [256]}) == {"threads": ["2"], "prefill": ["256"]}


def test_a_level_that_is_none_is_one_line_of_what_there_is():
    with pytest.raises(UsageError, match=r"precision has no level 'fp3': there are fp32, bf16, autocast-bf16, fp16"):
        check_names(Recipe({"precision": "fp3"}))
    with pytest.raises(UsageError, match=r"threads has no level 'all': there are as-given, 1, 2, \.\.\., \d+$"):
        check_names(Recipe({"threads": "all"}))


def test_streams_cut_a_batch_and_put_it_together_again():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)).eval()
    batches = [torch.rand(5, 5), torch.rand(4, 5)]  # five rows on two cores: parts of unequal size
    facts = replace(probe_facts(Workload(model, batches)), physical_cores=2)
    run = load(source(Recipe({"runtime": "openvino", "streams": "per-core"}), facts), "optimized")(model, batches)
    for batch in batches:
        torch.testing.assert_close(run(batch), model(batch), rtol=1e-4, atol=1e-5)


TWO_LIVES = """
import faulthandler, signal, subprocess, sys
import torch
from fettle.recipe import Recipe
from fettle.techniques import load, probe_facts, source
from fettle.workload import Workload

faulthandler.enable()
batch = torch.rand(2, 4)
model = torch.nn.Linear(4, 4).eval()
optimize = load(source(Recipe({"runtime": "openvino"}), probe_facts(Workload(model, [batch]))), "optimized")
signal.signal(signal.SIGCHLD, lambda *_: None)  # as a DataLoader with workers does
one = optimize(model, [batch])
two = optimize(model, [batch])
one(batch), two(batch)
del one  # not the last made: runtimes of their own would go in the wrong order
del two
subprocess.run([sys.executable, "-c", ""], check=True)
print("alive")
"""


def test_openvino_leaves_a_signal_stack_that_can_be_used(tmp_path):
    """On CPUs with AMX, runtimes freed out of order left an unmapped signal stack: the next signal killed."""
    (tmp_path / "two.py").write_text(TWO_LIVES)
    code, said, errors = run_script(tmp_path / "two.py", os.environ)
    assert said.strip() == "alive", (code, errors[-2000:])


def test_a_file_for_live_objects_says_how_to_use_it(capsys):
    text = source(Recipe({"mode": "eval"}), Facts(training=True), heading="A live model, optimised.")
    exec(compile(text, "optimized.py", "exec"), {"__name__": "__main__"})
    assert "from optimized import optimize" in capsys.readouterr().out


LOADS = """
import torch

def workload():
    data = torch.utils.data.TensorDataset(torch.rand(8, 3), torch.rand(8, 3))
    return torch.nn.Bilinear(3, 3, 2), torch.utils.data.DataLoader(data, batch_size=2)
"""


TAKES_OUT = """
import torch

def workload():
    batch, call = ({"x": torch.rand(4, 3)},), lambda model, batch: model(batch.pop("x"))
    return {"model": torch.nn.Linear(3, 2), "inputs": [batch], "call": call}
"""


@pytest.mark.parametrize(
    ("text", "facts"),
    [(LOADS, Facts(training=True)), (TAKES_OUT, Facts(training=True, custom_call=True, changes_inputs=True))],
)
def test_a_script_takes_batches_out_of_a_loader_and_gives_each_call_its_own(text, facts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "workload_file", None)  # gone afterwards
    (tmp_path / "loads.py").write_text(text)
    text = source(Recipe({"mode": "eval"}), facts, target=find_target(str(tmp_path / "loads.py")))
    exec(compile(text, "optimized.py", "exec"), {"__name__": "__main__"})
    assert "later calls: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ours.models:workload", "bench/model.py"])
def test_a_script_finds_what_the_study_found(name, tmp_path, monkeypatch):
    """A package in the folder where fettle was called, from another folder."""
    for folder in ("ours", "bench", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ours" / "models.py").write_text(
        "import torch\n\n\ndef workload():\n    return torch.nn.Linear(4, 2), [torch.rand(3, 4)]\n"
    )
    (tmp_path / "bench" / "model.py").write_text("from ours.models import workload\n")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "out" / "optimized.py"
    script.write_text(source(Recipe({"grad": "no_grad"}), Facts(), target=find_target(name)))
    monkeypatch.chdir(script.parent)
    code, out, err = run_script(script, {**os.environ, "PYTHONPATH": ""})
    assert code == 0, err[-2000:]
    assert "later calls:" in out


def test_a_script_of_a_model_that_writes_has_its_draft_and_any_sequence_of_batches(tmp_path):
    (tmp_path / "writes.py").write_text(
        "import collections\nimport torch\n\n\ndef workload():\n"
        "    model, draft = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)\n"
        '    return {"model": model, "inputs": collections.deque([torch.rand(3, 4)]), "draft": draft}\n'
    )
    names = {"__name__": "optimized"}
    text = source(Recipe({"grad": "no_grad"}), Facts(), target=find_target(str(tmp_path / "writes.py")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.setitem(sys.modules, "workload_file", None)  # gone afterwards
        exec(compile(text, "optimized.py", "exec"), names)
        model, batches, _ = names["load"]()
    assert not model.draft.training
    assert [batch.shape for batch in batches] == [(3, 4)]


def test_a_script_takes_methods_and_ordered_dicts_for_what_fettle_takes_them(tmp_path, monkeypatch):
    (tmp_path / "method.py").write_text(
        "import collections\nimport torch\n\n\nclass Net(torch.nn.Module):\n"
        "    def predict(self, x):\n        return 2 * x\n\n\n"
        "def workload():\n    return Net().predict, [collections.OrderedDict(x=torch.ones(2))]\n"
    )
    monkeypatch.setitem(sys.modules, "workload_file", None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    target = find_target(str(tmp_path / "method.py"))
    facts = probe_facts(target.load())
    assert (facts.is_module, facts.custom_call) == (True, True)
    names = {"__name__": "optimized"}
    exec(compile(source(Recipe({"grad": "no_grad"}), facts, target=target), "optimized.py", "exec"), names)
    model, batches, call = names["load"]()
    args, kwargs = names["spread"](batches[0])
    assert names["optimize"](model, batches, call)(*args, **kwargs).tolist() == [2, 2]


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_a_script_times_what_a_device_does_and_not_its_launches(device):
    text = source(Recipe({"grad": "no_grad"}), Facts(device=device), target=Target("/a.py:workload"))
    assert (f'wait_for("{device}")\n        times.append(' in text) == (device != "cpu")


def test_a_script_waits_for_every_gpu_that_holds_something_of_it(monkeypatch):
    text = source(Recipe({"grad": "no_grad"}), Facts(device="cuda"), target=Target("/a.py:workload"))
    waited, names = [], {"__name__": "optimized"}
    exec(compile(text, "optimized.py", "exec"), names)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.synchronize", waited.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda gpu: gpu != 1)
    names["wait_for"]("cuda")
    assert waited == [0, 2]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_script_of_several_ranks_says_how_it_starts_and_speaks_once(device):
    text = source(Recipe({"tensor_parallel": "on"}), Facts(device=device, ranks=2), target=Target("/a.py:workload"))
    assert "Start it with: torchrun --nproc-per-node 2 optimized.py" in ast.get_docstring(ast.parse(text))
    before, _, after = text.partition("    model, batches, call = load()\n")
    assert ("torch.cuda.set_device(int(" in before) == (device == "cuda")
    assert '["RANK"] == "0"' in before
    assert " print(" not in after
    assert "while len(times) < 11:" in after  # a rank that goes on by its own clock would wait for the others


def test_helpers_of_one_name_are_one():
    """Over all techniques: each may stand beside each other, and in a pipeline."""
    facts = replace(
        machine_facts(), ranks=2, is_unet=True, denoiser=("x", 1), libraries={"jemalloc": "j", "tcmalloc": "t"},
        tensor=replace(Facts().tensor, attentions=("a",)),
    )  # fmt: skip
    found = [Code(helpers=(Part, put_part, calls_of_parts, spread, endless))]
    for mode in ("inference", "training"):
        own = replace(facts, mode=mode)
        for technique in CATALOGUE:
            recipe = {"runtime": "openvino", **technique.needs}
            levels = [level.name for level in technique.levels(own) if level.name != technique.default]
            found += [technique.code(level, Recipe({**recipe, technique.name: level}), own) for level in levels]
    preamble("all of them", found)
    same = type("Part", (), {})
    with pytest.raises(ValueError, match="both have a helper Part"):
        preamble("two", [Code(helpers=(Part,)), Code(helpers=(same,))])


@pytest.mark.parametrize("name", [r"C:\users\net", 'a """net"""', 'of "one"', "plain"])
def test_a_heading_may_be_anything(name):
    for recipe, facts in ((Recipe({"mode": "eval"}), Facts(training=True)), (Recipe(), Facts(mode="training"))):
        assert ast.get_docstring(ast.parse(source(recipe, facts, heading=name))) == name


def test_weights_are_frozen_in_calls_of_the_recipe_only():
    seen = []

    class Looks(torch.nn.Module):
        def forward(self, x):
            seen.append(inductor.freezing)
            return x

    recipe = Recipe.parse("compile=default freeze=on grad=inference_mode")
    with torch.compiler.set_stance("force_eager"):
        load(source(recipe, Facts()), "frozen")(Looks(), [])(torch.rand(2))
    assert seen == [True]
    assert not inductor.freezing


def test_a_recipe_that_is_applied_in_inference_mode_leaves_weights_that_can_be_exported():
    model = torch.nn.Linear(3, 2).eval()
    with torch.inference_mode():
        fettle.apply(model, "precision=bf16", [torch.rand(2, 3)])
    assert model.weight.dtype == torch.bfloat16
    assert not model.weight.is_inference()


class Answers(torch.nn.Module):
    """Answers of one type or another, the first one in an object of a class of its own."""

    def __init__(self, *dtypes):
        super().__init__()
        self.layer, self.dtypes = torch.nn.Linear(3, 2), dtypes

    def forward(self, x):
        first, *others = (self.layer(x) if dtype is None else self.layer(x).to(dtype) for dtype in self.dtypes)
        return SimpleNamespace(first=first, size=len(x)), others


class Adding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, times):
        return self.layer(x), times + 0.25


def test_what_is_given_in_float64_keeps_its_digits_beside_16_bits():
    """As times do, of which bfloat16 would make days."""
    model, batch = Adding(), (torch.rand(2, 4), torch.tensor([1.7e9, 1.7e9 + 1], dtype=torch.float64))
    facts = probe_facts(Workload(model, [batch]))
    tuned = load(source(Recipe.parse("precision=bf16"), facts), "bf16")(model, [batch])
    assert torch.equal(tuned(*batch)[1], batch[1] + 0.25)


@pytest.mark.parametrize("recipe", ["precision=bf16", "precision=autocast-bf16"])
@pytest.mark.parametrize("dtypes", [(None,), (torch.bfloat16,), (torch.float64, torch.float16)])
def test_answers_in_16_bits_have_the_types_that_they_had(recipe, dtypes):
    model, x = Answers(*dtypes).eval(), torch.rand(4, 3)
    wanted = [leaf.dtype for leaf in tensors(model(x))]
    answer = fettle.apply(model, recipe, [x])(x)
    assert answer[0].size == 4
    assert [leaf.dtype for leaf in tensors(answer)] == wanted


def test_answers_of_which_only_some_have_16_bits_as_given_are_left_alone():
    model = Answers(torch.bfloat16, torch.float32).eval()
    with pytest.raises(UsageError, match="some outputs are bfloat16 as given and some float32"):
        fettle.apply(model, "precision=autocast-bf16", [torch.rand(4, 3)])


def test_what_cannot_be_exported_is_named():
    given = {"x": torch.ones(2), "mode": Enum("Mode", "fast exact").fast}
    for tree in (given, UserDict(given)):
        assert flatten(tree)[0] == list(given.values())
    with pytest.raises(RuntimeError, match="values of type SimpleNamespace among inputs or outputs cannot be exported"):
        flatten(SimpleNamespace(**given))


def test_several_threads_may_be_where_a_setting_is_another():
    config = SimpleNamespace(freezing=False)
    frozen = During(config, "freezing", True)
    with frozen:  # one thread comes, then another; the first one goes, and then the other
        frozen.__enter__()
        assert config.freezing
    frozen.__exit__()
    assert not config.freezing


@pytest.mark.parametrize(("shapes", "limit"), [("static", 64), ("dynamic", torch._dynamo.config.recompile_limit)])
def test_each_shape_has_a_graph_in_calls_of_the_recipe_only(shapes, limit):
    seen, before = [], torch._dynamo.config.recompile_limit

    class Looks(torch.nn.Module):
        def forward(self, x):
            seen.append(torch._dynamo.config.recompile_limit)
            return x

    text = source(Recipe.parse(f"compile=default shapes={shapes}"), Facts(num_input_shapes=9))
    with torch.compiler.set_stance("force_eager"):
        load(text, shapes)(Looks(), [])(torch.rand(2))
    assert seen == [limit]
    assert torch._dynamo.config.recompile_limit == before


@pytest.mark.parametrize("text", ["compile=default", "compile=default region=blocks"])
def test_models_of_torchs_own_classes_are_compiled_as_well(text, monkeypatch):
    from torch._dynamo.utils import counters

    plain, batch = torch.compile, torch.rand(2, 3, 8)
    monkeypatch.setattr(torch, "compile", lambda function, **options: plain(function, backend="eager", **options))
    layers = [torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)]
    fast = fettle.apply(torch.nn.Sequential(*layers).eval(), text, [batch])
    counters.clear()
    fast(batch)
    assert counters["stats"]["unique_graphs"] >= 1


def test_a_default_that_is_written_out_is_the_default():
    text = source(Recipe.parse("compile=default shapes=auto region=whole"), FACTS)
    assert "    model.compile()\n" in text


@pytest.mark.parametrize("level", ["reduce-overhead", "max-autotune", "default"])
@pytest.mark.parametrize("region", ["whole", "blocks"])
def test_an_answer_of_a_cuda_graph_is_the_callers_to_keep(level, region):
    lines = source(Recipe({"compile": level, "region": region}), Facts(device="cuda"))
    assert ("map_tensors(torch.clone, output)" in lines) == (level != "default")
    compile(lines, "optimized.py", "exec")


def test_a_cuda_graph_holds_the_conversion_of_weights(monkeypatch):
    """What autocast has converted before is let go with the context, and a graph would read what lies there then."""
    names = []

    class Capture(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    still = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "Stream": lambda: still, "current_stream": lambda: still, "stream": lambda one: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None), "graph": lambda one: Capture(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        Graphed(torch.nn.Linear(3, 2))(torch.rand(2, 3))
    assert sum(name.startswith("_to_copy") for name in names) == 3  # input, weight, bias


def test_a_graph_is_of_the_values_of_what_is_not_on_the_gpu():
    graphed = Graphed(torch.nn.Identity())
    assert graphed.kind(torch.tensor(0.5)) == graphed.kind(torch.tensor(0.5))
    assert graphed.kind(torch.tensor(0.5)) != graphed.kind(torch.tensor(0.9))


@pytest.mark.parametrize("norm", [torch.nn.BatchNorm2d, torch.nn.InstanceNorm2d])
def test_norms_keep_every_digit_beside_16_bits(norm):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), norm(4, affine=True, track_running_stats=True))
    model[1].running_mean.copy_(torch.rand(4))
    before = {name: value.clone() for name, value in model[1].state_dict().items()}
    to_16_bits(model, torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    torch.testing.assert_close(model[1].state_dict(), before, rtol=0, atol=0)
    assert model(torch.rand(2, 3, 5, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16


def norm_and_linear():
    return torch.nn.Sequential(torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8)).eval()


def test_weights_of_torchao_become_16_bits_in_inference_mode_too():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = norm_and_linear()
    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))
    with torch.inference_mode():
        to_16_bits(model, torch.bfloat16)
        assert model(torch.rand(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("inside", [True, False])
def test_weights_made_in_inference_mode_become_16_bits_wherever_they_are_converted(inside):
    with torch.inference_mode():
        model = norm_and_linear()
    with torch.inference_mode(inside):
        to_16_bits(model, torch.bfloat16)
    with torch.inference_mode():
        assert model(torch.rand(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_what_a_workload_has_already_is_no_conflict():
    loads, switched = Facts(mode="training", loader_workers=4, physical_cores=4), Facts(hf_attention=("sdpa", "eager"))
    for recipe, facts in (("loading=workers-4", loads), ("attention=hf-sdpa", switched),
                          ("attention[encoder]=hf-sdpa", Facts(parts={"encoder": switched}))):  # fmt: skip
        assert canonical(Recipe.parse(recipe), facts) == Recipe()
    assert canonical(Recipe.parse("attention=hf-eager"), switched).levels
    assert conflict(Recipe.parse("compile=default shapes=dynamic"), Facts(num_input_shapes=1)) == ""


def test_any_number_of_batches_may_be_one_where_it_fits():
    larger = Facts(mode="training", allow_batch=True, largest_batch=12)
    assert conflict(Recipe.parse("batch=x11"), larger) == ""
    assert "only 12 times" in conflict(Recipe.parse("batch=x13"), larger)
    assert conflict(Recipe.parse("batch=x64"), replace(larger, largest_batch=0)) == ""
    assert "no such level" in conflict(Recipe.parse("batch=x65"), larger)
    assert "may not change" in conflict(Recipe.parse("batch=x2"), Facts(mode="training"))


@pytest.mark.parametrize("factor", ["precision[", "precision[]", "precision[encoder"])
def test_a_part_that_is_misspelt_is_refused(factor):
    with pytest.raises(UsageError, match=r"write precision\["):
        check_names(Recipe({factor: "bf16"}))


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_complex_numbers_stay_complex_beside_16_bits(mode):
    class Turning(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.register_buffer("turns", torch.polar(torch.ones(2), torch.tensor([0.5, 1.5])))

        def forward(self, x):
            turned = torch.view_as_complex(self.layer(x).float().unflatten(-1, (2, 2))) * self.turns
            return torch.view_as_real(turned).flatten(-2)

    model, x = Turning().eval(), torch.randn(2, 4)
    wanted = model(x)
    if mode == "training":
        to_16_bits(model, torch.bfloat16)
        found = model(x.bfloat16())
    else:
        found = fettle.apply(model, "precision=bf16", [x])(x)
    assert model.layer.weight.dtype == torch.bfloat16
    assert (found - wanted).norm() < 0.02 * wanted.norm()
