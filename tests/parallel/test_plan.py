"""The memory plan against closed formulas, counts of collectives, and its own rules."""

import importlib
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import fettle
from fettle.cli.plan import _print
from fettle.errors import UsageError
from fettle.parallel import formulas
from fettle.parallel.plan import Plan, Prediction, build_fake, plan
from fettle.parallel.report import notes, tables, write_plan
from fettle.parallel.strategies import KINDS, Strategy, parse_strategy, units_of, usual_strategies
from fettle.parallel.study import plan_for_study
from fettle.parallel.timeline import PARTS
from fettle.techniques import repeated_blocks
from fettle.workload import find_target

HERE = Path(__file__).parents[1] / "train" / "planned.py"
ROOM = importlib.import_module("fettle.parallel.plan")
_KNOWN: dict[tuple, Prediction] = {}


def planned(*texts: str, world_size: int = 8, device: str = "cpu", **options):
    """A plan, for which a strategy on as many ranks is predicted once in all tests."""
    workload, mode, _ = build_fake(find_target(f"{HERE}:workload"))
    predict = ROOM._predict

    def known(workload, strategy, *where):
        key = (str(strategy), world_size, *where[:3])
        if key not in _KNOWN:
            _KNOWN[key] = predict(workload, strategy, *where)
        return _KNOWN[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ROOM, "_predict", known)
        strategies = [parse_strategy(text) for text in texts]
        made = plan(workload, world_size, strategies=strategies, device=device, mode=mode, **options)
    return made, {item.strategy: item for item in made.predictions}


@pytest.fixture(scope="module")
def usual():
    return planned(*KINDS, "zero3 wrap=root", "ddp buckets=copy", "zero3 checkpoint=block",
                   "zero3 checkpoint=block offload=cpu")  # fmt: skip


def test_states_follow_the_closed_formulas(usual) -> None:
    made, rows = usual
    states = {name: sum(row.states.values()) for name, row in rows.items()}
    steps = 4 * sum(1 for _ in repeated_blocks_parameters())  # a step counter of 4 bytes for each parameter
    assert states["single"] == 16 * made.parameters + steps == rows["single"].formula_bytes + steps
    assert states["ddp"] == states["single"]
    for name in ("zero1", "zero2", "zero3", "hsdp", "tensor", "zero3-tensor"):
        assert rows[name].formula_bytes <= states[name] <= 1.15 * rows[name].formula_bytes + steps  # uneven shares


def test_shards_in_host_memory_are_planned_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one a program pins them; a plan's have no memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, rows = planned("zero3 offload=cpu")
    assert not rows["zero3 offload=cpu"].failed


def repeated_blocks_parameters():
    workload, _, _ = build_fake(find_target(f"{HERE}:workload"))
    return workload.model.parameters()


def test_collectives_prove_the_strategy(usual) -> None:
    _, rows = usual
    assert rows["zero3"].collectives == {"all_gather": 8, "reduce_scatter": 4}  # three blocks and the root, twice
    assert rows["zero2"].collectives == {"all_gather": 4, "reduce_scatter": 4}
    assert rows["zero3 wrap=root"].collectives == {"all_gather": 2, "reduce_scatter": 1}
    assert rows["hsdp"].collectives == {"all_gather": 8, "reduce_scatter": 4, "all_reduce": 4}
    assert rows["ddp"].collectives == {"all_reduce": 1}
    assert rows["tensor"].collectives == {"all_reduce": 6}  # one of each block's output, one of its input's gradient
    assert rows["zero3-tensor"].collectives == {"all_gather": 8, "reduce_scatter": 4, "all_reduce": 6}
    assert rows["single"].collectives == {}


def test_parts_sum_to_the_peak_and_sharding_shrinks_it(usual) -> None:
    _, rows = usual
    for row in rows.values():
        assert not row.failed
        assert sum(row.parts.values()) == row.peak_bytes
    assert rows["zero3"].peak_bytes < rows["zero2"].peak_bytes < rows["zero1"].peak_bytes < rows["ddp"].peak_bytes
    assert rows["zero3"].peak_bytes < rows["zero3 wrap=root"].peak_bytes
    assert rows["zero3 checkpoint=block"].parts["activations"] < rows["zero3"].parts["activations"]
    assert rows["ddp buckets=copy"].peak_bytes > rows["ddp"].peak_bytes
    away = rows["zero3 checkpoint=block offload=cpu"]
    assert away.parts["optimizer state"] == 0
    assert away.host_bytes == sum(away.states.values())


def test_only_what_fits_is_recommended() -> None:
    free, rows = planned("ddp", "zero3", "zero3 wrap=root", device_memory_bytes=1 << 40)
    assert free.cheapest == "ddp"
    between = (rows["zero3"].peak_bytes + rows["zero3 wrap=root"].peak_bytes) // 2
    tight, rows = planned("ddp", "zero3", "zero3 wrap=root", device_memory_bytes=between, headroom=0)
    assert tight.cheapest == "zero3"
    assert [row.fits for row in tight.predictions] == [False, True, False]
    none, _ = planned("ddp", "zero3", device_memory_bytes=1024)
    assert none.cheapest == ""


def test_what_is_sent_counts_by_row() -> None:
    """Ranks that split a model see the same rows, so they make fewer in a step."""
    made, rows = planned("ddp", "tensor", "zero3-tensor", world_size=4, device_memory_bytes=1 << 40)
    assert [rows[name].rows for name in ("ddp", "tensor", "zero3-tensor")] == [512, 128, 256]
    assert rows["tensor"].sent_bytes < rows["ddp"].sent_bytes
    assert made.cheapest == "ddp"


@pytest.mark.slow
def test_a_study_plans_what_can_be_split_on_its_own_rows() -> None:
    pytest.importorskip("transformers")
    made, _ = plan_for_study(replace(find_target(f"{HERE}:llama"), mode="training"), 4, 1 << 30)
    rows = {item.strategy: item for item in made.predictions}
    assert list(rows)[:7] == [kind for kind in KINDS if kind != "tensor"]  # which four ranks cannot
    assert {item.rows for item in made.predictions} == {8}
    assert made.cheapest
    uneven, _ = plan_for_study(replace(find_target(f"{HERE}:workload"), mode="training"), 5, 1 << 30)
    assert "zero3-tensor" not in {item.strategy for item in uneven.predictions}
    assert [item.strategy for item in uneven.predictions if item.failed] == ["hsdp"]


@pytest.mark.parametrize(
    ("factory", "ranks", "words"),
    [
        ("llama", 4, "tensor: 4 ranks do not divide its 2 heads of keys and values"),
        ("llama", 6, "zero3-tensor: 3 ranks do not divide its 4 attention heads"),
        ("llama", 2, "zero3-tensor: 2 ranks, each a group of its own, cannot form a mesh"),
        ("needs_values", 3, "tensor: 3 ranks do not divide the 256 features inside an MLP"),
    ],
)
def test_a_model_that_the_ranks_do_not_divide_says_so(factory: str, ranks: int, words: str) -> None:
    pytest.importorskip("transformers")
    workload, mode, _ = build_fake(find_target(f"{HERE}:{factory}"))
    with pytest.raises(UsageError, match=words):
        plan(workload, ranks, strategies=[parse_strategy(words.partition(":")[0])], mode=mode)


def test_a_split_llama_sends_four_times_a_layer() -> None:
    pytest.importorskip("transformers")
    workload, mode, _ = build_fake(find_target(f"{HERE}:llama"))
    row = plan(workload, 2, strategies=[parse_strategy("tensor")], device="cpu", mode=mode).predictions[0]
    assert row.formula_bytes is not None
    assert row.formula_bytes <= sum(row.states.values()) <= row.formula_bytes + 4096  # counters and buffers
    norm = row.collectives["all_reduce"] - 4 * 3  # two in forward and two in backward; the rest are the norm's
    assert 0 < norm < 10


def test_foreach_on_cuda_needs_more_than_a_loop() -> None:
    _, loop = planned("single", device="cpu")
    _, foreach = planned("single", device="cuda")
    assert foreach["single"].peak_bytes >= loop["single"].peak_bytes


def test_an_optimizer_that_takes_nothing_but_matrices_is_planned() -> None:
    work = fettle.TrainingWorkload(
        model=torch.nn.Linear(8, 8, bias=False), optimizer=torch.optim.Muon, data=[torch.ones(4, 8)],
        loss=lambda model, batch: model(batch).mean(),
    )  # fmt: skip
    assert plan(work, 2, strategies=[Strategy()], device="cpu").optimizer == "Muon"


def test_an_optimizer_of_the_models_own_parameters_is_not_planned() -> None:
    model = torch.nn.Linear(8, 8)
    work = fettle.TrainingWorkload(
        model=model, optimizer=lambda _: torch.optim.SGD(model.parameters(), lr=0.1), data=[torch.ones(4, 8)],
        loss=lambda model, batch: model(batch).mean(),
    )  # fmt: skip
    with pytest.raises(UsageError, match="takes its parameters from the model"):
        plan(work, 2, strategies=[Strategy()], device="cpu")


def test_the_batch_of_a_loader_that_shuffles_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.utils.data.TensorDataset(torch.ones(32, 8))
    work = fettle.TrainingWorkload(
        model=torch.nn.Linear(8, 8), optimizer=torch.optim.SGD, loss=lambda model, batch: model(batch[0]).mean(),
        data=torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True),
    )  # fmt: skip
    assert plan(work, 2, strategies=[Strategy()], device="cpu").predictions[0].failed == ""
    monkeypatch.setattr("fettle.parallel.study._strategies_for", lambda *given: [parse_strategy("ddp")])
    loader = find_target(f"{HERE.parent / 'tiny_loop.py'}:loader")
    assert [row.failed for row in plan_for_study(loader, 2, None)[0].predictions] == [""]


@pytest.mark.parametrize("factory", ["counted", "labelled"])
def test_ranks_of_a_study_share_the_rows_of_any_batch_whatever_is_counted_as_a_sample(
    factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fettle.parallel.study._strategies_for", lambda *given: [parse_strategy("ddp")])
    (plain,), (other,) = (
        plan_for_study(find_target(f"{HERE}:{name}"), 2, None)[0].predictions for name in ("workload", factory)
    )
    assert other.parts == plain.parts


def test_the_optimizer_of_a_plan_is_made_of_what_is_trained() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[0].requires_grad_(False)

    def optimizer(parameters):
        own = list(parameters)
        assert all(parameter.requires_grad for parameter in own)
        return torch.optim.SGD(own, lr=0.1)

    work = fettle.TrainingWorkload(model, optimizer, lambda model, batch: model(batch).mean(), [torch.ones(4, 8)])
    assert plan(work, 2, strategies=[Strategy()], device="cpu").optimizer == "SGD"


@pytest.mark.parametrize(
    ("ranks", "options", "why"),
    [
        (0, {}, "a world of 0 ranks cannot be planned"),
        (2, {"ranks_per_node": 0}, "0 ranks per node"),
        (2, {"headroom": 1.0}, "a headroom of 1.0"),
        (2, {"strategies": [parse_strategy("ddp checkpoint=block")]}, "the model has no repeated blocks"),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_line(ranks: int, options: dict, why: str) -> None:
    work = fettle.TrainingWorkload(
        model=torch.nn.Linear(8, 8), optimizer=torch.optim.SGD, data=[torch.ones(4, 8)],
        loss=lambda model, batch: model(batch).mean(),
    )  # fmt: skip
    with pytest.raises(UsageError, match=why):
        plan(work, ranks, **{"device": "cpu", **options})


def test_in_16_bits_half_as_much_is_sent() -> None:
    _, rows = planned("ddp", "ddp compress=fp16", "ddp compress=powersgd", "zero3", "zero3 precision=bf16")
    assert rows["ddp compress=fp16"].sent_bytes == rows["ddp"].sent_bytes // 2
    assert rows["ddp compress=powersgd"].peak_bytes > rows["ddp"].peak_bytes  # what it leaves out it keeps
    assert "is not predicted" in rows["ddp compress=powersgd"].note
    assert rows["zero3 precision=bf16"].sent_bytes < rows["zero3"].sent_bytes


def test_a_step_that_needs_values_says_so() -> None:
    workload, mode, _ = build_fake(find_target(f"{HERE}:needs_values"))
    with pytest.raises(UsageError, match="needs values"):
        plan(workload, 2, strategies=[Strategy()], mode=mode)


def test_the_model_is_left_as_it_was() -> None:
    from fettle.train import load_training

    workload = load_training(find_target(f"{HERE}:workload"))
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    plan(workload, 4, strategies=[parse_strategy("zero3")])
    after = workload.model.state_dict()
    assert all(type(after[name]) is torch.Tensor and torch.equal(after[name], before[name]) for name in before)


def test_what_a_step_compiles_is_planned_eagerly_and_compiled_afterwards() -> None:
    torch._dynamo.reset()
    ran = []

    def backend(graph, examples):
        return lambda *inputs: (ran.append(graph), graph(*inputs))[1]

    def mean(model, batch):
        return model(batch).mean()

    loss = torch.compile(mean, backend=backend)
    work = fettle.TrainingWorkload(torch.nn.Linear(8, 8), torch.optim.SGD, loss, [torch.ones(4, 8)])
    assert plan(work, 2, strategies=[Strategy()], device="cpu").predictions[0].failed == ""
    assert not ran
    loss(work.model, work.first)
    assert len(ran) == 1


@pytest.mark.parametrize(
    "text", ["zero4", "zero3 wrap=leaf", "ddp wrap=block=3", "ddp wrap=size", "zero3 compress=fp16", "", "ddp fast"]
)
def test_strategies_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_strategy(text)


def test_strategies_read_back() -> None:
    for text in ("single", "ddp compress=fp16 graph=static", "zero3 wrap=size precision=bf16 checkpoint=block"):
        assert parse_strategy(str(parse_strategy(text))) == parse_strategy(text)


def test_a_factory_may_convert_its_model(tmp_path: Path) -> None:
    """Without memory for its weights; those that two layers share stay shared."""
    file = tmp_path / "loop.py"
    file.write_text("""
import torch

def workload():
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4), "last": torch.nn.Linear(4, 4)})
    model["last"].weight = model["first"].weight
    return {
        "model": model.to(torch.bfloat16).to("cpu").half(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1),
        "loss": lambda model, batch: model["last"](model["first"](batch)).sum(),
        "data": [torch.ones(2, 4, dtype=torch.float16)],
    }
""")
    workload, _, note = build_fake(find_target(f"{file}:workload"))
    assert not note
    assert [p.dtype for p in workload.model.parameters()] == [torch.float16] * 3  # a weight, two biases
    assert type(next(workload.model.parameters()).data).__name__ == "FakeTensor"


def test_units() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("planned", HERE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net = module.Net()
    assert repeated_blocks(net) == list(net.blocks)
    assert units_of(net, parse_strategy("zero3 wrap=root")) == []
    assert len(units_of(net, parse_strategy("zero3 wrap=size"))) > 3  # the matrices are large enough by themselves


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 1 << 26), min_size=1, max_size=60), st.integers(1, 16))
def test_partitions_and_buckets_keep_every_byte(sizes: list[int], ranks: int) -> None:
    assert sum(formulas.bucket_sizes(sizes)) == sum(sizes)
    fullest = [sizes[i] for i in formulas.largest_partition(sizes, ranks)]
    assert sum(fullest) * ranks >= sum(sizes)
    assert sum(fullest) <= sum(sizes) / ranks + max(sizes)  # greedy: no rank exceeds the mean by more than one item


def test_a_note_is_made_once_for_all_strategies_that_it_is_about() -> None:
    made, _ = planned("ddp", "zero2", "zero3", world_size=4)
    rows = [replace(made.predictions[0], note=""), *(replace(row, note="one unit") for row in made.predictions[1:])]
    failed = replace(rows[0], strategy="tensor", failed="tensor: it has no pairs")
    assert notes(replace(made, predictions=(*rows, failed))) == ["zero2, zero3: one unit", "tensor: it has no pairs"]


def test_a_peak_of_a_thousand_units_is_a_whole_number() -> None:
    made, _ = planned("ddp")
    large = replace(made.predictions[0], peak_bytes=1100 << 30, parts={"parameters": 9 << 30, "gradients": 0})
    assert tables(replace(made, predictions=(large,)))[0].rows[0][:4] == ["ddp", "1100", "9.00", "0"]


def test_command(tmp_path: Path) -> None:
    from fettle.cli import build

    report = tmp_path / "plan.html"
    arguments = ["plan", f"{HERE}:workload", "--world-size", "4", "--strategy", "ddp", "--strategy", "zero3"]
    done = CliRunner().invoke(build(), [*arguments, "--device-memory", "1GiB", "--json", "--output", str(report)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["strategy"] for row in found["predictions"]] == ["ddp", "zero3"]
    assert found["cheapest"] == "ddp"
    assert "<svg" in report.read_text()
    assert "http-equiv" in report.read_text()
    table = CliRunner().invoke(build(), [*arguments, "--device-memory", "10KiB"])
    assert table.exit_code == 1
    assert "Nothing fits" in table.output
    wrongs = [["--device", "tpu"], ["--device-memory", "much"], ["--output", "plan.txt"], ["--headroom", "2"]]
    for wrong in (*wrongs, ["--world-size", "0"]):
        assert CliRunner().invoke(build(), [*arguments, *wrong]).exit_code != 0


def test_the_tables_fit_a_terminal_of_80_columns() -> None:
    strategies = [str(strategy) for strategy in usual_strategies()]
    parts = dict(zip(PARTS, (26 << 30, 13 << 30, 0, 1234, 1023 << 20), strict=True))
    rows = [Prediction(name, 64, sum(parts.values()), parts, "backward", parts, 1 << 40, 0,
                       {"all_gather": 130, "reduce_scatter": 65, "all_reduce": 65}, 1 << 38, 1 << 36, True)
            for name in strategies[1:]]  # fmt: skip
    rows.append(Prediction(strategies[0], 1, failed="the step needs values of tensors"))
    made = Plan("big", 64, 8, "cuda", 80 << 30, 0.1, 7_000_000_000, "AdamW", tuple(rows), cheapest=strategies[-1])
    said = io.StringIO()
    _print(Console(file=said, width=80), made, "")
    lines = said.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line.split() for line in lines if line.startswith("strategy")]
    assert heads[0] == ["strategy", "peak", "params", "grads", "optimizer", "activations", "transients", "fits"]
    assert "precision=bf16" in {word for line in lines for word in line.split()}  # words are not cut in two


def test_png(tmp_path: Path) -> None:
    made, _ = planned("ddp", device_memory_bytes=1 << 20)
    write_plan(made, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_grouped_keys_and_values_are_not_repeated_where_the_step_does_not(monkeypatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    attend, seen = torch.nn.functional.scaled_dot_product_attention, []

    def watched(query, key, value, attn_mask=None, **more):
        seen.append((tuple(key.shape), attn_mask is None))
        return attend(query, key, value, attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model = transformers.Qwen2ForCausalLM(config)
    batch = {"input_ids": torch.zeros(2, 16, dtype=torch.long), "labels": torch.zeros(2, 16, dtype=torch.long)}
    work = fettle.TrainingWorkload(model, lambda p: torch.optim.SGD(p, 0.1), lambda m, b: m(**b).loss, [batch])
    work.loss(model, batch)
    stepped, seen[:] = list(seen), []
    plan(work, 2, strategies=[parse_strategy("ddp")], device="cpu")
    assert stepped == [((2, 2, 16, 8), True)] * 2
    assert seen
    assert set(seen) == set(stepped)
