"""Every level that trains: its loop is plain PyTorch, and its losses are the baseline's."""

import functools
import json
import os
import subprocess
import sys
import time
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fettle.recipe import Recipe
from fettle.techniques import CATALOGUE, Facts, bundles, conflict, find, load, source
from fettle.techniques._ranks import endless, join_ranks, own_rows, split_state
from fettle.techniques.accumulate import split
from fettle.techniques.batch import joined
from fettle.techniques.convolution import convolutions_by_products, the_faster
from fettle.techniques.loading import with_workers
from fettle.techniques.optimizer import compile_update
from fettle.techniques.precision import gradients_to_masters, masters_to_weights
from fettle.train import Steps, TrainingWorkload, load_training, training_facts
from fettle.train.steps import intervals_of, step_parts
from fettle.workload import Target, find_target
from tests.forking import run_script

TINY = Path(__file__).parent / "tiny_loop.py"
PLANNED = Path(__file__).parent / "planned.py"
FACTS = Facts(
    mode="training", num_linear=7, num_conv=1, num_wide_conv=1, num_4d_inputs=1, samples=16,
    block_classes=("tiny.Block",), optimizer="AdamW", optimizer_levels=("foreach", "fused"), loader_workers=-1,
    max_grad_norm=1.0, allow_batch=True, physical_cores=2, cpu_flags=("avx512_fp16", "amx_bf16"),
)  # fmt: skip
SLOW = {"compile", "shapes", "region", "convolution"}
"""Left to the slow tests, or (convolution: the little net's convolution has three channels) to a test of their own."""


def cases():
    for technique in CATALOGUE:
        if "training" not in technique.modes:
            continue
        for level in technique.levels(FACTS):
            slow = technique.name in SLOW or "budget" in level.name or level.name == "compiled"
            if level.name == technique.default or level.why_not or slow:
                continue
            yield pytest.param(technique.name, level.name, id=f"{technique.name}={level.name}")


def losses(recipe, factory="workload", count=6, facts=FACTS, still=False, make_optimizer=None):
    assert conflict(recipe, facts) == ""
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    workload = load_training(find_target(f"{TINY}:{factory}"))
    workload = replace(workload, optimizer=make_optimizer or workload.optimizer)
    workload.model.train(not still)
    torch.manual_seed(0)
    try:
        return Steps(load(source(recipe, facts), str(recipe)), workload).curve(count)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)


@pytest.mark.parametrize(("name", "level"), cases())
def test_losses_stay(name, level):
    batch = name == "batch"
    still = name == "accumulate"  # batch norm and dropout see the parts one by one; without them nothing changes
    wanted, found = losses(Recipe(), still=still), losses(Recipe({name: level}), count=2 if batch else 6, still=still)
    if batch:  # two steps on other batches: they need only be of the same size
        assert all(0.1 < loss < 3 for loss in found.losses)
        return
    close = 0.1 if name in ("precision", "matmul") else 1e-3
    assert found.losses == pytest.approx(wanted.losses, abs=close)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=0.5)
    assert wanted.losses[-1] < wanted.losses[0]


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "last"),
    [
        (16, 3, 1, 1, False), (16, 3, 1, 1, True), (16, 3, 2, 1, True), (16, 1, 2, 0, True), (16, 1, 1, 2, True),
        (24, (2, 5), (1, 3), (1, 0), False), (16, (2, 5), 1, (1, 4), False), (16, (9, 3), 1, (6, 1), False),
    ],
)  # fmt: skip
def test_convolutions_by_products_give_what_the_kernels_give(channels, kernel, stride, padding, last):
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(channels, 8, kernel, stride, padding).double()
    x = torch.randn(2, channels, 4, 11, dtype=torch.double, requires_grad=True)
    if last:
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    outputs = []
    for _ in range(8):  # first by the library's kernels, then by both in turn, and at last by the faster
        layer.zero_grad()
        x.grad = None
        value = layer(x)
        value.square().sum().backward()
        outputs.append([value.detach(), x.grad, layer.weight.grad, layer.bias.grad])
        assert convolutions_by_products(torch.nn.Sequential(layer)) == 1
    for found in outputs[1:]:
        for one, wanted in zip(found, outputs[0], strict=True):
            torch.testing.assert_close(one, wanted)
        assert found[0].stride() == outputs[0][0].stride()
    wanted = {"forward", "weight", *(["input"] if stride == 1 and padding != 2 else [])}
    assert {name for name, _ in layer.times_of_passes} == wanted
    assert all(len(first) == len(second) == 3 for first, second in layer.times_of_passes.values())


def test_the_way_with_the_shortest_time_is_kept():
    times = {"a": ([3.0, 1.0, 2.0], [2.0, 1.5]), "b": ([2.0, 2.0, 2.0], [9.0, 1.0, 9.0])}
    ways = (lambda: "kernel", lambda: "products")
    assert [the_faster(times, "a", *ways) for _ in range(2)] == ["products"] * 2  # its third time is of microseconds
    assert the_faster(times, "b", *ways) == "products"
    times["b"][0][0] = 0.5
    assert the_faster(times, "b", *ways) == "kernel"
    assert [the_faster(times, "c", *ways) for _ in range(4)] == ["kernel", "products"] * 2


def test_convolutions_are_not_timed_where_runs_must_not_differ():
    layer = torch.nn.Conv2d(16, 4, 3)
    convolutions_by_products(torch.nn.Sequential(layer))
    torch.use_deterministic_algorithms(True)
    try:
        layer(torch.randn(2, 16, 5, 5)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert layer.weight.grad is not None
    assert not hasattr(layer, "times_of_passes")


def test_convolutions_by_products_take_an_image_without_a_batch():
    layer = torch.nn.Conv2d(16, 4, 3)
    x = torch.randn(16, 5, 5)
    wanted = layer(x)
    convolutions_by_products(torch.nn.Sequential(layer))
    torch.testing.assert_close(layer(x), wanted)


def test_convolutions_by_products_compile_as_one_graph():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, 1, 1), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 1, 2))
    x = torch.randn(3, 16, 9, 11)[1:]  # does not begin where its memory does
    found = []
    for change in (lambda: model, lambda: torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        change()(x).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
        assert convolutions_by_products(model) == 2
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_convolutions_by_products_under_autocast_reach_float32_weights():
    layer = torch.nn.Conv2d(16, 4, 3)
    convolutions_by_products(torch.nn.Sequential(layer))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = layer(torch.randn(2, 16, 6, 6))
    value.float().sum().backward()
    assert (value.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("precision", ["autocast-bf16", "bf16-master"])
def test_convolutions_by_products_train_compiled_as_they_do_eager(precision, monkeypatch):
    monkeypatch.setattr(
        torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    )
    eager = losses(Recipe.parse(f"precision={precision} convolution=products"), "wide", 4)
    found = losses(Recipe.parse(f"precision={precision} convolution=products compile=default"), "wide", 4)
    assert found.losses == pytest.approx(eager.losses, abs=0.05)


def test_convolutions_by_products_need_a_convolution_with_channels():
    with pytest.raises(RuntimeError, match="16 channels"):
        convolutions_by_products(torch.nn.Conv2d(3, 8, 3))


@pytest.mark.parametrize(("factory", "wide"), [("workload", 0), ("wide", 1)])
def test_convolutions_by_products_are_tried_where_one_has_channels_for_it(factory, wide):
    """The only convolution of a vision transformer has three: each combination with it would fail."""
    facts = replace(training_facts(load_training(find_target(f"{TINY}:{factory}"))), cpu_flags=("amx_bf16",))
    assert min(facts.num_wide_conv, 1) == wide
    assert facts.num_conv
    assert find("convolution").why_not("products", facts).startswith("no 2-D convolution has 16") is not bool(wide)
    assert any("convolution" in recipe.levels for recipe in bundles(facts)) is bool(wide)
    assert any(recipe.levels.get("precision") == "bf16-master" for recipe in bundles(facts))


def test_masters_and_weights_may_lie_in_memory_in_different_ways():
    found = losses(Recipe.parse("precision=bf16-master channels_last=on optimizer=fused"))
    assert found.losses == pytest.approx(losses(Recipe()).losses, abs=0.1)


def test_a_data_loader_gets_workers_and_the_same_rows():
    facts = replace(FACTS, loader_workers=0)
    wanted = losses(Recipe(), "loader", 4, facts)
    found = losses(Recipe({"loading": "workers-1"}), "loader", 4, facts)
    assert found.losses == pytest.approx(wanted.losses, abs=0.5)  # the loader draws from the same seed as dropout


def compiled_by(backend, monkeypatch):
    """torch.compile with another backend: no C++ compiler runs."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_compiled_update_with_masters_is_the_update(optimizer, monkeypatch):
    compiled_by("aot_eager", monkeypatch)
    make = {
        "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2),
        "SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    }[optimizer]
    ends, hooked = [], []
    for kind in ("eager", "compiled"):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(*shape).bfloat16()) for shape in [(8, 4), (8,), (3,)]]
        masters = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
        stepper = make(masters)
        stepper.register_step_pre_hook(lambda *_, kind=kind: hooked.append(kind))
        if kind == "compiled":
            compile_update(stepper, weights, masters)
        for number in range(4):
            for weight in weights[:2]:  # the last one has no gradient
                weight.grad = torch.full_like(weight, 0.1 * (number + 1))
            if kind == "eager":
                gradients_to_masters(weights, masters)
            stepper.step()
            if kind == "eager":
                masters_to_weights(masters, weights)
        ends.append([*masters, *weights])
    assert hooked == ["eager"] * 4 + ["compiled"] * 4
    torch.testing.assert_close(ends[1], ends[0])
    assert all(master.grad is None for master in masters)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])  # plain SGD has no state
def test_a_compiled_update_is_one_graph(make):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    weights = [torch.nn.Parameter(torch.randn(8, 4).bfloat16())]
    masters = [torch.nn.Parameter(weights[0].detach().float())]
    stepper = make(masters, foreach=True)
    with pytest.MonkeyPatch.context() as patch:
        compiled_by(count, patch)
        compile_update(stepper, weights, masters)
    for _ in range(4):
        weights[0].grad = torch.ones_like(weights[0])
        stepper.step()
    assert len(graphs) == 1
    torch.testing.assert_close(weights[0], masters[0].detach().bfloat16(), check_dtype=True)


@pytest.mark.parametrize("level", ["foreach", "for-loop", "fused"])
def test_an_optimizer_that_was_fused_unscales_gradients_however_it_is_implemented(level):
    make = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    recipe = Recipe({"precision": "autocast-fp16", "optimizer": level})
    found = losses(recipe, make_optimizer=make)
    assert found.losses == pytest.approx(losses(Recipe(), make_optimizer=make).losses, abs=0.2)


def test_with_a_compiled_update_the_gradients_of_the_weights_are_clipped(monkeypatch):
    compiled_by("aot_eager", monkeypatch)
    recipe = Recipe.parse("precision=bf16-master optimizer=compiled")
    assert "clip_grad_norm_(weights, 1.0)" in source(recipe, FACTS)
    wanted, found = losses(Recipe()), losses(recipe)
    assert found.losses == pytest.approx(wanted.losses, abs=0.1)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=0.5)


def test_a_compiled_update_says_what_it_cannot_be_beside():
    assert "GradScaler" in conflict(Recipe.parse("optimizer=compiled precision=autocast-fp16"), FACTS)
    assert "parallel strategy" in conflict(Recipe.parse("optimizer=compiled parallel=ddp"), replace(FACTS, ranks=2))
    none = replace(FACTS, optimizer="Own", optimizer_levels=())
    assert "Own has no foreach" in conflict(Recipe.parse("optimizer=compiled"), none)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "compile=default",
        "optimizer=compiled",
        "optimizer=compiled precision=bf16-master channels_last=on compile=default",
        "compile=default region=blocks checkpoint=blocks",
        "compile=default checkpoint=budget-0.5 precision=autocast-bf16 channels_last=on optimizer=fused",
        "compile=default precision=bf16-master",
    ],
)
def test_compiled_loops_keep_their_losses(text):
    assert losses(Recipe.parse(text)).losses == pytest.approx(losses(Recipe()).losses, abs=0.2)


def test_bundles_are_possible_and_inference_levels_are_not():
    assert len(bundles(FACTS)) >= 4
    for recipe in bundles(FACTS):
        assert conflict(recipe, FACTS) == ""
    assert "inference only" in conflict(Recipe({"mode": "eval"}), FACTS)
    assert "training only" in conflict(Recipe({"optimizer": "fused"}), Facts())


def test_the_loop_is_plain_pytorch_that_runs(tmp_path):
    (tmp_path / "fettle.py").write_text("raise ImportError('must stand without fettle')\n")
    recipe = Recipe.parse("precision=autocast-bf16 optimizer=fused channels_last=on accumulate=x2 checkpoint=selective")
    text = source(recipe, FACTS, heading="A test.", target=Target(f"{TINY}:workload"))
    (tmp_path / "optimized.py").write_text(text)
    code, out, err = run_script(tmp_path / "optimized.py", {**os.environ, "PYTHONPATH": ""})
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) == 9
    assert lines[-2].startswith("step 7: loss ")
    assert lines[-1].startswith("8 steps, the last loss ")
    assert lines[-1].endswith(" samples/s at 16 a step")
    assert json.loads(lines[0].split()[3].rstrip(",")) < 3


@pytest.mark.parametrize("level", ["blocks", "selective"])
@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.BatchNorm2d,
        functools.partial(torch.nn.BatchNorm2d, momentum=None),
        functools.partial(torch.nn.InstanceNorm2d, track_running_stats=True),
    ],
)
def test_running_averages_change_once_a_step_beside_checkpoints(level, norm):
    def trained(recipe):
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), norm(3), torch.nn.Sigmoid()) for _ in range(3)]
        model, x = torch.nn.Sequential(*blocks), torch.rand(4, 3, 5, 5)
        facts = replace(FACTS, block_classes=("Sequential",))
        loop = load(source(recipe, facts), str(recipe))(
            model,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            lambda model, x: model(x).square().mean(),
            [x],
        )
        losses = [float(next(loop)) for _ in range(3)]
        return losses, model.state_dict()

    wanted, found = trained(Recipe()), trained(Recipe({"checkpoint": level}))
    assert found[0] == pytest.approx(wanted[0])
    torch.testing.assert_close(found[1], wanted[1])


@pytest.mark.parametrize("level", ["blocks", "selective"])
def test_no_block_is_computed_again_with_another_attention_than_the_first_time(level):
    recipe = Recipe.parse(f"sdpa_backend=math checkpoint={level}")
    assert "compute again" in conflict(recipe, replace(FACTS, uses_sdpa=True))


def test_a_loop_of_live_objects_says_how_to_use_it(capsys):
    text = source(Recipe({"optimizer": "fused"}), FACTS, heading="A live loop, optimised.")
    exec(compile(text, "optimized.py", "exec"), {"__name__": "__main__"})
    assert "from optimized import train" in capsys.readouterr().out


def test_of_several_ranks_one_speaks_and_a_larger_batch_counts_its_rows():
    several = replace(FACTS, ranks=2)
    text = source(Recipe.parse("parallel=ddp batch=x4"), several, heading="A test.", target=Target("loop.py:workload"))
    assert '["RANK"] == "0" else lambda text: None' in text
    assert "samples/s at 64 a step" in text
    assert "Start it with: torchrun --nproc-per-node 2 optimized.py" in text


def test_of_several_nodes_each_is_a_group_that_shards():
    nodes = replace(FACTS, ranks=8, nodes=4)
    text = source(Recipe.parse("parallel=hsdp"), nodes, heading="A test.", target=Target("loop.py:workload"))
    assert "on each node: torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --nproc-per-node 2" in text
    assert 'init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))' in text
    assert "nothing to shard inside it" in conflict(Recipe.parse("parallel=hsdp"), replace(FACTS, ranks=2, nodes=2))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks", "near"), [("tensor", 2, 1e-3), ("zero3-tensor", 4, 0.1)])
def test_a_split_loop_is_plain_pytorch_that_torchrun_starts(kind, ranks, near, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "fettle.py").write_text("raise ImportError('must stand without fettle')\n")
    workload = load_training(find_target(f"{PLANNED}:llama"))
    facts = replace(training_facts(workload), ranks=ranks)
    torch.manual_seed(0)
    wanted = Steps(load(source(Recipe(), facts), "single"), load_training(find_target(f"{PLANNED}:llama"))).curve(8)
    text = source(Recipe({"parallel": kind}), facts, heading="A test.", target=Target(f"{PLANNED}:llama"))
    (tmp_path / "optimized.py").write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "optimized.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3].rstrip(",")) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 20  # one rank speaks: of its rows, which are all where only matrices are split
    assert losses[:8] == pytest.approx(wanted.losses, abs=near)


def test_timeline_adds_up_to_the_wall_time():
    workload = load_training(find_target(str(TINY)))
    steps = Steps(load(source(Recipe(), FACTS), "timeline"), workload)
    steps.step()
    began = time.perf_counter()
    found = steps.timeline(2)
    wall_ms = (time.perf_counter() - began) * 1e3
    assert list(found) == ["data", "forward", "backward", "optimizer", "communication", "idle"]
    assert all(found[name] > 0 for name in ("data", "forward", "backward", "optimizer", "idle"))
    assert found["communication"] == 0
    assert sum(found.values()) * 2 <= wall_ms


def test_each_moment_of_a_step_belongs_to_one_part():
    ranges = [("data", 0, 10), ("forward", 10, 30), ("backward", 30, 60), ("optimizer", 60, 70)]
    operators = [(5, 8), (12, 20), (18, 25), (30, 40), (45, 50), (60, 70)]
    sent = [(0, 4), (38, 47), (50, 55)]  # partly behind computing
    parts = step_parts(ranges, (operators, sent))
    assert parts == {"data": 10, "forward": 13, "backward": 15, "optimizer": 10, "communication": 10, "idle": 12}
    assert sum(parts.values()) == 70


def test_phases_end_when_all_gpus_of_the_model_are_through(monkeypatch):
    waited = []
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.synchronize", waited.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda gpu: 1)
    with FakeTensorMode():
        model = torch.nn.ParameterList([torch.empty(2), torch.empty(2, device="cuda:1")])
    steps = Steps(lambda *_: iter(()), SimpleNamespace(model=model, data=()))
    steps._watching = True
    steps._enter("data")
    assert waited == [0, 1]


def test_what_waits_for_other_ranks_inside_an_operator_is_communication():
    def event(name, begin, end):
        return SimpleNamespace(name=lambda: name, device_type=lambda: "DeviceType.CPU", start_ns=lambda: begin,
                               duration_ns=lambda: end - begin)  # fmt: skip

    events = [event("aten::add", 0, 30), event("_c10d_functional::wait_tensor", 2, 20), event("aten::add", 21, 30),
              event("aten::mm", 30, 40), event("gloo:all_reduce", 1, 19)]  # fmt: skip
    parts = step_parts([("forward", 0, 40)], intervals_of(events))
    assert {name: size for name, size in parts.items() if size} == {"forward": 19, "communication": 19, "idle": 2}


def of_the_argument(model):
    return lambda given: torch.optim.SGD([{"params": given[:1]}, {"params": given[1:], "lr": 0.2}], lr=0.1)


def of_the_model(model):
    return lambda given: torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1)


def by_identity(model):
    mine = id(model.bias)
    return lambda given: torch.optim.SGD([
        {"params": [p for p in given if id(p) != mine]}, {"params": [p for p in given if id(p) == mine], "lr": 0.2}
    ], lr=0.1)  # fmt: skip


def one_by_one(model):
    rates = {id(model.bias): 0.2}
    return lambda given: torch.optim.SGD([{"params": [p], "lr": rates.get(id(p), 0.1)} for p in given])


@pytest.mark.parametrize(
    ("factory", "masters", "shards"),
    [
        (of_the_argument, True, True),
        (of_the_model, False, True),
        (by_identity, False, False),
        (one_by_one, False, False),
    ],
)
def test_a_factory_that_groups_only_the_models_own_parameters_is_found(factory, masters, shards):
    model = torch.nn.Linear(3, 1)
    before = list(model.parameters())
    work = TrainingWorkload(model, factory(model), lambda model, batch: model(batch).mean(), [torch.rand(4, 3)])
    facts = replace(training_facts(work), ranks=2)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert ("same groups" in find("precision").why_not("bf16-master", facts)) != masters
    assert ("groups of shards" in find("parallel").why_not("zero3", facts)) != shards
    assert find("parallel").why_not("ddp", facts) == ""


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_schedule_goes_on_beside_a_split_optimizer_or_is_refused(one_rank):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.register_step_post_hook(lambda own, *_: own.param_groups[0].update(lr=0.5))
    split = split_state(optimizer)
    for _ in range(2):
        weight.grad = torch.ones(2)
        split.step()
    assert weight.tolist() == [-0.5, -0.5]
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(ValueError, match="scheduler"):
        split_state(optimizer)


class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.rand(8, 3))


@pytest.mark.parametrize(("given", "why"), [(0, "each worker may give all its rows"), (2, "")])
def test_workers_that_would_each_give_all_rows_are_not_offered(given, why):
    model, data = torch.nn.Linear(3, 1), torch.utils.data.DataLoader(Rows(), 4, num_workers=given)
    work = TrainingWorkload(model, torch.optim.SGD, lambda model, batch: model(batch).mean(), [torch.rand(4, 3)])
    facts = training_facts(replace(work, data=data))
    levels = {level.name: level.why_not for level in find("loading").levels(replace(facts, physical_cores=4))}
    assert why in levels["workers-4"]
    assert bool(levels["workers-4"]) == bool(why)
    assert levels["workers-1"] == ""


class Encoded(UserDict):
    """As tokenizers of transformers return batches."""


def test_the_rows_of_batches_of_any_kind_are_cut_and_joined():
    batch = Encoded({"ids": torch.arange(8).view(4, 2), "places": torch.arange(2), "name": "a"})
    twice = next(joined([batch], 2))
    assert type(twice) is Encoded
    assert twice["ids"].tolist() == [*batch["ids"].tolist()] * 2
    assert twice["places"].tolist() == [0, 1]
    assert [part["ids"].tolist() for part in split(batch, 2)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert next(own_rows([batch], 1, 2))["ids"].tolist() == [[4, 5], [6, 7]]
    assert batch["ids"].shape == (4, 2)


@pytest.mark.parametrize(("rows", "count", "parts"), [(8, 2, 2), (9, 2, 3), (7, 4, 7), (12, 8, 12), (1, 2, 1)])
def test_an_incomplete_batch_is_cut_into_more_parts(rows, count, parts):
    found = split(torch.arange(rows), count)
    assert [len(part) for part in found] == [rows // parts] * parts
    assert torch.cat(found).tolist() == list(range(rows))


@pytest.mark.parametrize(("rows", "world"), [(5, 2), (10, 4), (8, 4)])
def test_ranks_cut_an_incomplete_batch_into_equally_many_parts(rows, world):
    own = [next(own_rows([torch.arange(rows)], rank, world)) for rank in range(world)]
    assert len({len(split(batch, 2)) for batch in own}) == 1  # each part is a backward pass that the ranks wait for
    assert torch.cat(own).tolist() == list(range(rows - rows % world))


class Opaque:
    __slots__ = ("ids",)

    def __init__(self, ids):
        self.ids = ids


@pytest.mark.parametrize(
    "change", [lambda one: next(joined([one], 2)), lambda one: split(one, 2), lambda one: next(own_rows([one], 0, 2))]
)
def test_a_batch_in_which_no_rows_are_found_is_no_larger_one(change):
    with pytest.raises(ValueError, match="Opaque has no tensor with rows"):
        change(Opaque([torch.rand(4, 2)]))


@pytest.mark.parametrize("again", [endless, lambda data: own_rows(data, 0, 2), lambda data: joined(data, 1)])
def test_data_that_can_be_gone_through_only_once_ends_in_an_error(again):
    """As of a dataset whose iterator is a generator that it holds: looking for its batches again would never end."""

    class Once:
        batches = iter([torch.ones(4, 2)] * 3)

        def __iter__(self):
            return self.batches

    met = again(Once())
    assert len([next(met) for _ in range(3)]) == 3
    with pytest.raises(ValueError, match="cannot be gone through again"):
        next(met)


def test_a_batch_may_be_an_object_that_holds_tensors():
    batch = SimpleNamespace(ids=torch.arange(8).reshape(4, 2), name="a")
    assert next(joined([batch, batch], 2)).ids.shape == (8, 2)
    assert [part.ids.tolist() for part in split(batch, 2)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert next(own_rows([batch], 1, 2)).ids.tolist() == [[4, 5], [6, 7]]
    assert batch.ids.shape == (4, 2)


def test_a_loader_with_other_workers_keeps_what_it_was_told():
    data = torch.utils.data.DataLoader
    given = {"prefetch_factor": 5, "timeout": 7, "multiprocessing_context": "spawn", "in_order": False}
    loader = data(torch.arange(6), batch_size=2, num_workers=1, **given)
    more = with_workers(loader, 2)
    assert (more.num_workers, more.prefetch_factor, more.timeout, more.in_order) == (2, 5, 7, False)
    assert more.multiprocessing_context is loader.multiprocessing_context
    assert [batch.tolist() for batch in with_workers(loader, 0)] == [[0, 1], [2, 3], [4, 5]]

    class Moves(data):
        def __iter__(self):
            return (batch.double() for batch in super().__iter__())

    with pytest.raises(RuntimeError, match="loading: Moves does more with its batches"):
        with_workers(Moves(torch.arange(6)), 1)


def test_the_compiler_keeps_half_of_the_activations_of_this_model_only():
    from torch._functorch import config

    seen = []

    def loss(model, batch):
        seen.append(config.activation_memory_budget)
        return model(batch).sum()

    text = source(Recipe.parse("checkpoint=budget-0.5 compile=default"), FACTS)
    with torch.compiler.set_stance("force_eager"):
        train = load(text, "budget")
        next(train(torch.nn.Linear(2, 2), lambda parameters: torch.optim.SGD(parameters), loss, [torch.rand(3, 2)]))
    assert seen == [0.5]
    assert config.activation_memory_budget == 1


def test_ranks_talk_by_what_is_made_for_their_device(monkeypatch):
    used = []
    for name, fake in {
        "is_initialized": lambda: False, "init_process_group": used.append, "get_rank": lambda: 0,
        "get_world_size": lambda: 2,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.distributed, name, fake)
    assert {join_ranks(device) for device in ("cpu", "cuda", "xpu")} == {(0, 2)}
    assert used == ["gloo", "nccl", "xccl"]
    join_ranks("cuda", offloaded=True)
    assert used[-1] == "cpu:gloo,cuda:nccl"
    text = source(Recipe.parse("parallel=zero3 offload=cpu"), replace(FACTS, ranks=2, device="cuda"))
    assert 'join_ranks("cuda", offloaded=True)' in text
