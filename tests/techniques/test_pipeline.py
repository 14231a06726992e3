"""Pipelines: several modules with the user's code between them, each tuned on its own."""

import json
import subprocess
import sys
import types
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import fettle
from fettle.errors import UsageError
from fettle.package.export import write_package
from fettle.recipe import Recipe
from fettle.techniques import (
    _pipeline,
    _probe,
    bundles,
    canonical,
    conflict,
    environment,
    find,
    for_parts,
    handed_on,
    load,
    parts_lines,
    parts_sentence,
    probe_facts,
    source,
)
from fettle.techniques._pipeline import Part, calls_of_parts
from fettle.techniques.ragged import ByLength
from fettle.techniques.tiles import InTiles
from fettle.tuning.space import space_for
from fettle.workload import Workload, fingerprint, spread

FILE = '''
import torch
from torch import nn


class Encoder(nn.Module):
    scale = 2.0

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, gain=1.0):
        return self.two(self.one(x).relu()) * gain


def call(pipeline, x):
    """Encode once, decode four times on what the host makes of it."""
    found = pipeline["encoder"](x, gain=pipeline["encoder"].scale)
    for step in range(4):
        found = found + pipeline["decoder"]["net"](found if step % 2 else found[:1]).mean()
    return found


def workload():
    torch.manual_seed(0)
    decoder = nn.ModuleDict({"net": nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1))})
    return {
        "model": nn.ModuleDict({"encoder": Encoder(), "decoder": decoder}),
        "inputs": [torch.randn(4, 32) for _ in range(3)],
        "call": call,
        "parts": ["encoder", "decoder.net"],
    }
'''


@pytest.fixture
def build():
    def make() -> Workload:
        module = sys.modules["pipe"] = types.ModuleType("pipe")
        exec(compile(FILE, "pipe.py", "exec"), module.__dict__)
        return Workload(**module.workload())

    return make


@pytest.fixture
def facts(build):
    return probe_facts(build())


def test_the_facts_of_each_part(facts):
    assert set(facts.parts) == {"encoder", "decoder.net"}
    encoder, decoder = facts.parts["encoder"], facts.parts["decoder.net"]
    assert (encoder.calls, decoder.calls) == (1, 4)
    assert (encoder.num_linear, decoder.num_linear, facts.num_linear) == (2, 1, 3)
    assert not encoder.custom_call
    assert facts.custom_call
    assert decoder.num_input_shapes == 2
    assert facts.train_mode_differs  # dropout in one part
    assert 0 < encoder.share + decoder.share <= 1
    assert encoder.part == "encoder"


def test_a_recipe_names_parts():
    recipe = Recipe.parse("precision[encoder]=bf16, compile[decoder.net]=default grad=no_grad")
    assert str(Recipe.parse(str(recipe))) == str(recipe)
    assert recipe.parts == ["decoder.net", "encoder"]
    assert recipe.of_part("encoder").levels == {"precision": "bf16", "grad": "no_grad"}
    for text in ("precision[=bf16", "precision[]=bf16", "[encoder]=bf16", "precision[a b]=bf16"):
        with pytest.raises(UsageError):
            Recipe.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("precision=bf16", "precision is set for each part of a pipeline: precision["),
        ("precision[unet]=bf16", "there is no part 'unet': there are "),
        ("quantize[encoder]=int8-dynamic", "quantize[encoder]=int8-dynamic: eager int8 is slower"),
        ("channels_last[encoder]=on", "channels_last[encoder]=on: the model has no 2-D convolution"),
    ],
)
def test_what_cannot_work_is_said(facts, text, says):
    assert conflict(Recipe.parse(f"mode=eval {text}"), facts).startswith(says)


def test_parts_are_refused_where_there_are_none():
    plain = probe_facts(Workload(nn.Linear(2, 2), [torch.rand(2, 2)]))
    assert conflict(Recipe.parse("precision[a]=bf16"), plain) == "there is no part 'a': the workload names none"
    with pytest.raises(UsageError, match=r"^threads\[a\]: threads is set for the whole call"):
        fettle.apply(nn.Linear(2, 2), "threads[a]=1", [torch.rand(2, 2)])


def test_the_parts_of_a_workload_must_be_there():
    net = nn.Sequential(nn.Linear(2, 2))
    model = nn.ModuleDict({"a": net, "same": net, "holds": nn.Sequential(net[0])})
    for parts, says in (
        (["b"], "'b' is not a submodule of its model: it has a, holds"),
        (["a", "a.0"], "'a' and 'a.0' contain one another"),
        (["a.0", "a"], "'a.0' and 'a' contain one another"),
        (["a", "same"], "'a' and 'same' contain one another"),
        (["holds", "a.0"], "'holds' and 'a.0' contain one another"),
        ("a", "are a list of names"),
    ):
        with pytest.raises(UsageError, match=says):
            Workload(model, [torch.rand(2, 2)], parts=parts)
    with pytest.raises(UsageError, match=r"make it an nn\.Module"):
        Workload(len, [torch.rand(2, 2)], parts=["a"])


@pytest.mark.parametrize("name", ["text encoder", "un[e]t", "größe", "-x", "a,b"])
def test_a_part_that_no_recipe_can_name_is_refused(name):
    with pytest.raises(UsageError):
        Recipe.parse(f"precision[{name}]=bf16")
    with pytest.raises(UsageError, match="has a name that no recipe can spell"):
        Workload(nn.ModuleDict({name: nn.Linear(2, 2)}), [torch.rand(2, 2)], parts=[name])


def test_a_part_that_is_never_called_is_said(build):
    made = build()
    with pytest.raises(UsageError, match=r"the part 'encoder.one' is not called"):
        probe_facts(Workload(made.model, [torch.rand(2, 32)], lambda model, x: model["decoder"]["net"](x),
                             parts=["encoder.one", "decoder"]))  # fmt: skip


class Refined(nn.Module):
    """Parts that only some inputs call."""

    def __init__(self):
        super().__init__()
        self.base, self.refiner = nn.Linear(8, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))

    def forward(self, x):
        x = self.base(x)
        return self.refiner(x) if len(x) > 4 else x


@pytest.mark.parametrize("rows", [(4, 8), (8, 4), (4, 4, 8), (8,)])
def test_a_part_that_one_input_calls_is_looked_at_there(rows):
    inputs = [torch.rand(each, 8) for each in rows]
    parts = probe_facts(Workload(Refined(), inputs, parts=["base", "refiner"])).parts
    assert (parts["refiner"].calls, parts["refiner"].samples) == (1, 8)
    assert not parts["refiner"].shapes_vary
    assert 0 < parts["refiner"].share < parts["refiner"].share + parts["base"].share <= 1


@pytest.mark.parametrize(
    ("rows", "is_called"), [((8, 4), True), ((4, 8), False), ((4, 4, 8), False), ((4, 8, 4, 4), True)]
)
def test_a_part_is_not_calibrated_where_only_inputs_of_the_second_half_call_it(rows, is_called):
    inputs = [torch.rand(each, 8) for each in rows]
    part = probe_facts(Workload(Refined(), inputs, parts=["base", "refiner"])).parts["refiner"]
    part = replace(part, packages=dict.fromkeys(["openvino", "nncf", "torchao"], ""), cpu_flags=("avx2",))
    part = replace(part, manual_attention=1)
    for technique, level in (("runtime", "openvino-int8"), ("quantize", "int8-static"), ("attention", "sdpa")):
        assert ("calls this part" in find(technique).why_not(level, part)) is not is_called
    assert (find("attention").usual(part) == "sdpa") is is_called
    assert not find("runtime").why_not("openvino", part)  # it is made when it is first called


class Held:
    """No module: what it holds is not found under a name."""

    def __init__(self, net):
        self.net = net


class Behind(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)
        self.held = Held(self.net)

    def forward(self, x):
        return self.held.net(self.net(x))


def test_a_part_that_is_called_behind_its_name_is_refused():
    model = Behind()
    with pytest.raises(UsageError, match="the part 'net' is called by another reference than its name"):
        probe_facts(Workload(model, [torch.rand(2, 8)], parts=["net"]))
    assert type(model.net) is nn.Linear


def test_the_time_of_a_call_is_that_of_the_call_and_not_of_looking_at_it(monkeypatch):
    clock = [0.0]

    class Slow(nn.Module):
        def forward(self, x):
            clock[0] += 1
            return x

    def late(function):
        def slower(*args):
            clock[0] += 100
            return function(*args)

        return slower

    monkeypatch.setattr(_pipeline, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    for module, name in ((_pipeline, "state_kept"), (_probe, "_copy"), (_probe, "_equal")):
        monkeypatch.setattr(module, name, late(getattr(module, name)))
    model = nn.ModuleDict({"a": Slow(), "b": Slow()})
    work = Workload(model, [torch.rand(2, 8)], lambda model, x: model["b"](model["a"](model["a"](x))), parts=["a", "b"])
    facts = probe_facts(work)
    assert (facts.seconds, facts.parts["a"].seconds, facts.parts["b"].seconds) == (3, 2, 1)


def test_a_pipeline_that_takes_no_other_part_is_looked_at_all_the_same():
    def call(model, x):
        assert type(model["net"]) is nn.Linear
        return model["net"](x)

    work = Workload(nn.ModuleDict({"net": nn.Linear(8, 8)}), [torch.rand(2, 8)], call, parts=["net"])
    assert probe_facts(work).parts["net"].calls == 1


class Wrapped(nn.Module):
    """As wrappers are written that hand on what they are given."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8)

    def forward(self, *args, **kwargs):
        x, gain = args
        return self.base(x) * gain + kwargs["shift"]


def test_arguments_without_a_name_stay_without():
    model, x = nn.ModuleDict({"net": Wrapped()}).eval(), torch.rand(2, 8)
    work = Workload(model, [x], lambda model, x: model["net"](x, 2.0, shift=x), parts=["net"])
    (given,) = calls_of_parts(model, ["net"], lambda: work.run(model, x))["net"]
    assert spread(given)[0][1:] == (2.0,)
    assert list(spread(given)[1]) == ["shift"]
    wanted = work.run(model, x)
    torch.testing.assert_close(fettle.apply(work, "runtime[net]=openvino grad=inference_mode")(x), wanted)


class Scaled(nn.Module):
    """The pipeline sets the scale of its part, and draws as the part's dtype says."""

    class Net(nn.Sequential):
        scale = 1.0

        @property
        def dtype(self):
            return self[0].weight.dtype

        def forward(self, x):
            return super().forward(x) * self.scale

    def __init__(self):
        super().__init__()
        self.net = self.Net(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x, scale=1.0):
        self.net.scale = scale
        torch.manual_seed(0)
        return self.net(x + torch.randn(x.shape, dtype=self.net.dtype))


def test_what_stands_in_a_parts_place_stands_for_it():
    torch.manual_seed(0)
    model, x = Scaled().eval(), torch.rand(2, 8)
    wanted, net = model(x, 3.0).detach(), model.net
    fast = fettle.apply(Workload(model, [x], parts=["net"]), "precision[net]=bf16")
    torch.testing.assert_close(fast(x, 3.0), wanted, rtol=0.05, atol=0.05)
    place = model.net
    assert place is not net
    assert (len(place), list(place), place[0]) == (2, list(net), net[0])
    assert (net.scale, place.dtype, net.dtype) == (3.0, torch.float32, torch.bfloat16)
    del place.scale
    assert net.scale == 1.0
    place.eval().compile()
    assert net._compiled_call_impl is None
    assert Part(nn.Linear(2, 2), print)  # which has no length


class Named(nn.Module):
    """Has attributes that are named as those of what stands in its place could be."""

    def __init__(self):
        super().__init__()
        self.module, self.mask, self.count, self.groups = nn.Linear(8, 8), "mask", 3, 2

    def run(self, x):
        return self.module(x) + 1

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize(
    "wrap",
    [lambda net: Part(net, net), lambda net: InTiles(net, 2), lambda net: ByLength(net, "x", {})],
    ids=["part", "tiles", "lengths"],
)
def test_what_stands_in_a_parts_place_hides_none_of_its_attributes(wrap):
    net, x = Named(), torch.rand(2, 8)
    place = wrap(net)
    assert place.module is net.module
    assert (place.mask, place.count, place.groups) == ("mask", 3, 2)
    assert torch.equal(place.run(x), net.run(x))
    place.run, place.count = print, 4
    assert (net.run, net.count) == (print, 4)


def test_looking_at_what_parts_are_called_with_changes_nothing_that_a_pipeline_remembers():
    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.calls, self.generator = nn.Linear(8, 8), 0, torch.Generator().manual_seed(0)

        def forward(self, x):
            self.calls += 1
            return self.net(x + torch.randn(x.shape, generator=self.generator)) * self.calls

    model, x = Drawing().eval(), torch.rand(2, 8)
    assert len(calls_of_parts(model, ["net"], lambda: model(x))["net"]) == 1
    assert model.calls == 0
    assert torch.equal(model.generator.get_state(), torch.Generator().manual_seed(0).get_state())


def test_what_a_part_was_called_with_stays_when_the_pipeline_writes_into_it():
    @dataclass
    class State:
        x: torch.Tensor

    class Doubling(nn.Module):
        def forward(self, state):
            return state.x * 2

    model, x = nn.ModuleDict({"net": Doubling()}), torch.ones(2)
    (given,) = calls_of_parts(model, ["net"], lambda: x.add_(model["net"](State(x))))["net"]
    assert given[0].x.tolist() == [1, 1]


def test_parts_belong_to_the_fingerprint(build):
    one = build()
    assert fingerprint(one) != fingerprint(Workload(one.model, one.inputs, one.call))


@pytest.mark.parametrize(
    "text",
    [
        "precision[encoder]=bf16",
        "precision[encoder]=bf16 precision[decoder.net]=autocast-bf16 grad=inference_mode",
        "runtime[encoder]=openvino grad=inference_mode",
        pytest.param("runtime[decoder.net]=openvino-int8", marks=pytest.mark.slow),
        pytest.param(
            "compile[encoder]=default freeze[encoder]=on compile[decoder.net]=default grad=inference_mode",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_applied_each_part_in_its_place(build, text):
    wanted = build()
    wanted.model.eval()
    made = build()
    fast = fettle.apply(made, f"mode=eval {text}")
    for batch in made.inputs:
        with torch.no_grad():
            torch.testing.assert_close(fast(batch), wanted.run(wanted.model, batch), rtol=0.05, atol=0.05)
    if text == "precision[encoder]=bf16":
        assert made.model.encoder.one.weight.dtype == torch.bfloat16  # seen through what stands in its place
        assert made.model.decoder["net"][0].weight.dtype == torch.float32


def test_parts_of_any_name(build):
    names = ["0", "un-et", "un_et"]
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names}).eval()
    work = Workload(model, [torch.rand(3, 2)], lambda model, x: sum(model[name](x) for name in names), parts=names)
    fast = fettle.apply(work, "precision[0]=bf16 precision[un-et]=bf16 precision[un_et]=autocast-bf16")
    fast(work.inputs[0])
    assert [model[name].weight.dtype for name in names] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_a_live_model_needs_no_list_of_parts(build):
    made = build()
    fast = fettle.apply(made.model, "mode=eval precision[encoder]=bf16", made.inputs, call=made.call)
    assert fast(made.inputs[0]).dtype == torch.float32


def test_the_file_is_plain_pytorch(facts, build):
    text = source(Recipe.parse("mode=eval precision[encoder]=bf16 grad=inference_mode"), facts)
    assert "fettle" not in text
    assert "def optimize_encoder(model, batches):" in text
    assert 'put_part(model, "encoder", optimize_encoder, [])' in text
    assert "calls_of_parts" not in text  # nothing looks at what the parts are called with
    made = build()
    assert load(text, "pipe")(made.model, made.inputs, made.call)(made.inputs[0]).shape == (4, 32)


def test_the_search_has_a_factor_for_each_part(facts):
    space, left_out = space_for(facts, {})
    assert "bf16" in space.choices["precision[encoder]"]
    assert "precision" not in space.choices
    assert "threads" in space.choices
    assert "threads[encoder]" not in space.choices
    assert space.needs["freeze[encoder]"] == {"compile[encoder]": "default", "grad": "inference_mode"}
    assert any(item.technique == "channels_last[decoder.net]" for item in left_out)
    assert space.bundles
    assert all(not space.conflict(bundle) for bundle in space.bundles)
    assert any({"encoder", "decoder.net"} == set(bundle.parts) for bundle in bundles(facts))
    pinned, _ = space_for(facts, {"precision": ["bf16"]})
    assert {"precision[encoder]", "precision[decoder.net]"} <= set(pinned.required.levels)


def test_a_part_of_no_weight_is_left_out(facts):
    light = replace(facts.parts["encoder"], share=0.004)
    space, left_out = space_for(replace(facts, parts={**facts.parts, "encoder": light}), {})
    assert space.choices["precision[encoder]"] == ("fp32",)
    assert any(item.why == "the part takes 0.40% of the call's time" for item in left_out)


def test_a_recipe_without_parts_is_what_it_was(facts):
    assert canonical(Recipe.parse("precision[encoder]=fp32 mode=eval"), facts) == Recipe({"mode": "eval"})
    assert environment(Recipe.parse("threads=1 precision[encoder]=bf16"), facts) == {"OMP_NUM_THREADS": "1"}


def test_bundles_leave_the_other_parts_at_their_first(facts):
    parts = {name: replace(part, packages={"openvino": "", "nncf": ""}, calibration_batches=2)
             for name, part in facts.parts.items()}  # fmt: skip
    facts = replace(facts, parts=parts, libraries={"glibc": "2.36"}, threads=2)
    longest, other = parts
    found = bundles(facts)
    alone = bundles(parts[other])[0].levels["runtime"]
    assert all(recipe.levels["allocator"] == "keep" for recipe in found)
    assert [recipe.levels.get(f"runtime[{other}]") for recipe in found[:3]] == [alone] * 3
    assert len({recipe.of_part(longest) for recipe in found[:3]}) == 3
    assert found[4].parts == [longest]  # where the other's cannot be had


def test_threads_wait_beside_another_runtime_only(facts):
    facts = replace(facts, threads=2)
    space, _ = space_for(facts, {})
    beside = Recipe.parse("mode=eval grad=inference_mode runtime[encoder]=openvino wait_policy=passive")
    assert space.conflict(beside) == ""
    assert "changes nothing" in space.conflict(beside.without("runtime[encoder]"))
    assert "changes nothing" in space.conflict(beside.with_levels(**{"precision[decoder.net]": "bf16"}))
    assert environment(beside, facts) == {"OMP_WAIT_POLICY": "passive"}
    assert "wait_policy" in str(next(bundle for bundle in bundles(facts) if "runtime[encoder]" in bundle.levels))
    assert not any("wait_policy" in one.levels for one in bundles(facts) if "runtime" not in str(one))


def test_a_part_whose_shapes_depend_on_what_is_in_the_input_is_not_exported(build):
    def call(pipeline, x):
        return pipeline["decoder"]["net"](pipeline["encoder"](x)[: int(x[0, 0]) + 1])

    made = build()
    inputs = [torch.full((4, 32), float(rows)) for rows in (1, 2, 3)]
    parts = probe_facts(Workload(made.model, inputs, call, parts=made.parts)).parts
    assert parts["decoder.net"].shapes_vary
    assert not parts["encoder"].shapes_vary
    assert "in other shapes" in find("runtime").why_not("aoti", parts["decoder.net"])
    assert find("runtime").why_not("aoti", parts["encoder"]) == ""
    one = probe_facts(Workload(made.model, inputs[:1], call, parts=made.parts)).parts
    assert not one["decoder.net"].shapes_vary


def test_what_a_level_learned_of_one_part_is_that_parts(facts):
    recipe = Recipe.parse("runtime[encoder]=openvino-int8-part runtime[decoder.net]=openvino-int8-part mode=eval")
    learned = {"int8_layers[encoder]": [1], "int8_layers[nothing]": [2], "int8_layers": [3]}
    assert handed_on(recipe, learned) == {"int8_layers[encoder]": [1]}
    text = source(recipe, replace(facts, learned=learned))
    assert "part = {'key': 'int8_layers[encoder]', 'layers': [1]," in text
    assert "part = {'key': 'int8_layers[decoder.net]', 'layers': []," in text


def test_what_a_finding_names_is_for_every_part_that_can(facts):
    assert for_parts({"precision": "bf16", "grad": "no_grad"}, facts) == {
        "precision[encoder]": "bf16", "precision[decoder.net]": "bf16", "grad": "no_grad",
    }  # fmt: skip
    assert for_parts({"channels_last": "on"}, facts) == {}


def test_which_part_costs_what(facts):
    *parts, between = parts_lines(facts)
    assert {name for name, *_ in parts} == {"encoder", "decoder.net"}
    assert between[0] == "between them"
    assert sum(share for _, _, _, share, _ in (*parts, between)) == pytest.approx(1)
    assert parts_lines(probe_facts(Workload(nn.Linear(2, 2), [torch.rand(2, 2)]))) == []
    assert "decoder.net" in parts_sentence(facts)
    assert "(4 calls)" in parts_sentence(facts)


def test_a_pipeline_is_no_package(build, tmp_path):
    with pytest.raises(UsageError, match=r"^the workload is a pipeline"):
        write_package(build(), Recipe(), tmp_path / "p", name="pipe")


@pytest.mark.slow
def test_tuned_from_end_to_end(tmp_path):
    (tmp_path / "pipe.py").write_text(FILE)
    options = "--budget 45s --output out --json --max-error 0.1 --technique compile=off --technique runtime=torch"
    told = subprocess.run(
        [sys.executable, "-m", "fettle", "tune", "pipe.py", *options.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert set(found["facts"]["parts"]) == {"encoder", "decoder.net"}
    assert any("precision[encoder]" in (trial["recipe"].get("levels") or trial["recipe"]) for trial in found["trials"])
    assert "What each part costs" in (tmp_path / "out" / "report.html").read_text()
    ran = subprocess.run([sys.executable, "out/optimized.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "later calls: " in ran.stdout


def test_a_pipeline_that_writes_into_its_input_is_traced_on_copies():
    class Attention(nn.Module):
        def forward(self, x):
            return torch.softmax(x @ x.transpose(-2, -1), -1) @ x

    model = nn.ModuleDict({"attention": Attention()}).eval()
    batch = torch.randn(2, 4, 8)
    before = batch.clone()
    work = Workload(model, [batch], lambda model, x: model["attention"](x.add_(1)), parts=["attention"])
    assert probe_facts(work).changes_inputs
    fast = fettle.apply(work, "attention[attention]=sdpa")
    assert torch.equal(batch, before)
    torch.testing.assert_close(fast(batch.clone()), Attention()(before + 1))


def test_a_batch_that_was_computed_with_gradients_is_looked_at_too():
    model = nn.ModuleDict({"net": nn.Linear(4, 4)}).eval()
    embeds = nn.Embedding(9, 4)(torch.arange(6).reshape(2, 3))
    facts = probe_facts(Workload(model, [{"x": embeds}], lambda model, x: model["net"](x), parts=["net"]))
    assert facts.parts["net"].calls == 1
    with pytest.raises(UsageError, match=r"^the workload's part 'net' is TorchScript"):
        Workload(nn.ModuleDict({"net": torch.jit.script(model["net"])}), [embeds], parts=["net"])
