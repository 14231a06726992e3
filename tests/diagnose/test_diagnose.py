"""Programs with one cause each: the cause is found, its bound is a share, and a healthy one is left alone."""

import json
import pickle
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fettle
from fettle.cli import main
from fettle.diagnose import Diagnosis, Finding, diagnose, diagnosis_json
from fettle.diagnose.collect import _settings, collect
from fettle.diagnose.collectors.memory import kept_alive, padding, weights
from fettle.diagnose.collectors.training import as_workload, device_type
from fettle.diagnose.collectors.variants import variants, without_anomaly_checks
from fettle.diagnose.evidence import Evidence, Operation
from fettle.diagnose.finding import Verified
from fettle.diagnose.report import page
from fettle.diagnose.rules import RULES, findings
from fettle.errors import UsageError
from fettle.measure import Interval, Load, Surroundings
from fettle.techniques import Facts
from fettle.train import TrainingWorkload
from fettle.workload import Workload, find_target
from tests.conftest import Run
from tests.memory.memory_machine import healthy_training
from tests.trace.build import Build

pytestmark = pytest.mark.usefixtures("forks")
HEAD = """
import time
import torch
from torch import nn
"""
CASES = {
    "waiting": """
        class Net(nn.Module):
            def forward(self, x):
                time.sleep(0.03)
                return x * 2
        def workload():
            return Net().eval(), [torch.ones(4, 4)]
    """,
    "float64": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(256, 256)
            def forward(self, x):
                y = self.layer(x).double()
                for _ in range(20):
                    y = y @ self.layer.weight.double()
                return y.float()
        def workload():
            return Net().eval(), [torch.ones(64, 256)]
    """,
    "python-loop": """
        class Net(nn.Module):
            def forward(self, x):
                total = x[0] * 0
                for i in range(400):
                    total = total + x[i]
                return total
        def workload():
            return Net().eval(), [torch.ones(400, 8)]
    """,
    "copies": """
        class Net(nn.Module):
            def forward(self, x):
                for _ in range(20):
                    x = x.transpose(0, 1).contiguous()
                return x
        def workload():
            return Net().eval(), [torch.ones(800, 800)]
    """,
    "padding": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(100, 64)
            def forward(self, input_ids, attention_mask):
                return (self.table(input_ids) * attention_mask[..., None]).sum(1)
        def workload():
            mask = torch.zeros(16, 64, dtype=torch.long)
            mask[:, :16] = 1
            return Net().eval(), [dict(input_ids=torch.randint(0, 100, (16, 64)), attention_mask=mask)]
    """,
}


def write(folder: Path, body: str) -> str:
    path = folder / "case.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return str(path)


@pytest.mark.parametrize(
    "cause", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("float64", "padding"))) for name in CASES]
)
def test_a_planted_cause_is_found(cause: str, tmp_path: Path) -> None:
    found = diagnose(write(tmp_path, CASES[cause]), seconds=0.5, compile_check=False, record=False)
    by_rule = {finding.rule: finding for finding in found.findings}
    assert cause in by_rule, found.findings
    assert 0.1 < by_rule[cause].bound <= 1
    assert by_rule[cause].evidence
    assert sum(found.budget.values()) == pytest.approx(1, abs=0.01)
    assert list(found.findings) == sorted(found.findings, key=lambda finding: finding.weight, reverse=True)


def test_compile_health_and_syncs_are_counted_with_their_lines(tmp_path: Path) -> None:
    target = write(
        tmp_path,
        """
        class Net(nn.Module):
            def forward(self, x):
                if x.sum().item() > 0:
                    x = x[x > 0.5]
                print("looking", end="")
                return x.sum()[None]
        def workload():
            return Net().eval(), [torch.rand(8, 8), torch.rand(9, 9), torch.rand(10, 10)]
        """,
    )
    found = diagnose(target, seconds=0.3, record=False)
    syncs = next(finding for finding in found.opportunities if finding.rule == "syncs")
    assert syncs.bound == 0  # nothing waits on a CPU
    assert "GPU" not in found.verdict
    assert syncs.count >= 2  # .item() and the boolean index
    assert any("case.py:9" in line for line in syncs.evidence)
    assert found.count("graph-breaks") >= 1
    breaks = next(finding for finding in found.opportunities if finding.rule == "graph-breaks")
    assert any("case.py" in line for line in breaks.evidence)
    assert found.count("nothing of the kind") == 0


def test_what_nobody_looked_for_has_not_passed() -> None:
    seen = Diagnosis("x", [], evidence=Evidence(Facts(), wall_s=0.01))
    assert seen.count("syncs") == 0
    assert seen.count("graph-breaks") is None
    assert seen.count("recompiles") is None
    assert Diagnosis("x", []).count("syncs") is None
    assert Diagnosis("x", [Finding("syncs", "It waits.", 0.1)]).count("syncs") == 1


def test_the_command_fails_on_what_is_not_allowed(tmp_path: Path, run_fettle: Run) -> None:
    target = write(
        tmp_path,
        """
        class Net(nn.Module):
            def forward(self, x):
                return x * x.max().item()
        def workload():
            return Net().eval(), [torch.rand(8, 8)]
        """,
    )
    command = ["diagnose", target, "--seconds", "0.3"]
    report = tmp_path / "diagnosis.html"
    done = run_fettle(*command, "--fail-on", "syncs=0,graph-breaks=5", "--json", "-o", report)
    assert done.code == 1, done.err
    data = json.loads(done.out)
    assert data["over_the_limit"] == ["syncs: 1, allowed 0"]
    assert data["evidence"]["syncs"][0]["operator"] == "aten._local_scalar_dense"
    assert "<h1>" in report.read_text()
    wrong = run_fettle(*command, "--fail-on", "sink=0")
    assert wrong.code == 2
    assert "--fail-on 'sink=0'" in wrong.err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing.py", "no such file"),
        ("empty", "no traces"),
        ("foreign.json", "not a profiler trace"),
        ("bad.pickle", "bad.pickle"),
    ],
)
def test_bad_input_is_one_line(name: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
    elif not name.endswith(".py"):
        path.write_text("{}")
    with pytest.raises(UsageError) as caught:
        diagnose(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--no-compile"], "--no-compile goes with a workload"), (["--seconds", "6s"], "--seconds goes with a workload"),
     (["--budget", "3m"], "--budget is the time for racing fixes"), (["--mode", "auto"], "--mode goes with")],
)  # fmt: skip
def test_an_option_that_would_be_passed_over_is_refused(
    arguments: list[str], words: str, tmp_path: Path, run_fettle: Run
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("{}")
    done = run_fettle("diagnose", trace, *arguments)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert words in done.err


def test_a_message_keeps_its_brackets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fettle", "diagnose", "[batch].json"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "[batch].json" in capsys.readouterr().err


def test_of_a_folder_what_cannot_be_read_is_left_out_with_a_note(tmp_path: Path) -> None:
    for name in ("broken.json", "other.json"):
        (tmp_path / name).write_text("{")
    with pytest.raises(UsageError, match=r"none of its files can be read, for instance broken\.json"):
        diagnose(tmp_path)
    made = Build().step(0, 0, 1000)
    made.add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 600)
    made.op("aten::mm", 600, 390)
    made.write(tmp_path / "good.json")
    found = diagnose(tmp_path)
    assert found.findings[0].rule == "data-wait"
    assert found.findings[0].evidence[0] == "in good.json"
    assert sum(found.budget.values()) == pytest.approx(1.0)
    assert sum(note.startswith("left out: ") for note in found.notes) == 2


def test_a_limit_on_what_a_snapshot_cannot_show_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = healthy_training(4).save(tmp_path / "run.pickle")
    monkeypatch.setattr(sys, "argv", ["fettle", "diagnose", str(path), "--fail-on", "syncs=0"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert "syncs: not known, allowed 0" in capsys.readouterr().err


def test_a_snapshot_that_contradicts_itself_is_read_with_a_note(tmp_path: Path) -> None:
    data = healthy_training(4).data()
    data["segments"][0]["total_size"] += 512
    (tmp_path / "run.pickle").write_bytes(pickle.dumps(data, protocol=4))
    assert any("contradicts itself in" in note for note in diagnose(tmp_path / "run.pickle").notes)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    target = write(
        tmp_path,
        """
        def workload():
            return (lambda x: None), [3]
        """,
    )
    with pytest.raises(UsageError, match=r"case\.py: what is recorded cannot be kept there"):
        diagnose(target, seconds=0.1, compile_check=False, beside=str(tmp_path / "case.py" / "x.html"))
    found = diagnose(
        target, seconds=0.1, compile_check=False, record=False
    )  # a call of a microsecond that computes nothing
    assert found.findings == []
    assert found.opportunities == []


def test_a_trace_without_time_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 0}]}')
    with pytest.raises(UsageError, match=r"x\.json: its events take no time"):
        diagnose(tmp_path / "x.json")


def test_a_bound_in_words() -> None:
    assert Finding("r", "s", 0.75).most == "at most 75% of the time, 4.00x"
    assert Finding("r", "s", 0.999).most == "nearly all of the time"
    assert Finding("r", "s", bound_bytes=3 << 20).most == "at most 3.00 MiB"
    assert Finding("r", "s", startup_s=2.0).most == "at most 2.0 s at start-up"
    assert Finding("r", "s").most == ""


def test_a_scripted_module_and_a_sparse_batch(tmp_path: Path) -> None:
    target = write(
        tmp_path,
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.jit.script(nn.Linear(8, 8))
            def forward(self, x):
                return self.inner(torch.sparse.mm(x, torch.ones(8, 8)))
        def workload():
            return Net().eval(), [torch.eye(8).to_sparse()]
        """,
    )
    assert diagnose(target, seconds=0.2, compile_check=False, record=False).wall_s > 0


def test_a_live_model_is_handed_over_as_to_tune() -> None:
    model, batch = torch.nn.Linear(8, 8).eval(), torch.ones(4, 8)
    found = fettle.diagnose(model, batch, seconds=0.2, compile_check=False, record=False)
    assert (found.name, found.wall_s > 0) == ("Linear", True)
    with pytest.raises(UsageError, match="give sample inputs with a live model"):
        fettle.diagnose(model)
    with pytest.raises(UsageError, match="on_progress is a function of one text, not 3"):
        fettle.diagnose(model, batch, on_progress=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_program_that_moves_its_batches_itself_and_a_training_loop_are_looked_at_on_their_gpu() -> None:
    net = torch.nn.Linear(8, 8).cuda()
    assert collect(Workload(lambda x: net(x.cuda()), [torch.ones(4, 8)]), 0.0).facts.device == "cuda"
    data = [torch.ones(4, 8).cuda()]
    steps = TrainingWorkload(net, lambda p: torch.optim.SGD(p, lr=0.1), lambda model, x: model(x).sum(), data)
    facts = collect(steps, 0.0).facts
    assert facts.device == "cuda"
    assert facts.cuda_capability > (0, 0)


def test_of_a_training_loop_a_step_is_diagnosed(tmp_path: Path) -> None:
    target = write(
        tmp_path,
        """
        import fettle
        def loss(model, batch):
            value = model(batch).square().mean()
            value.item()
            return value
        def workload():
            block = lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.BatchNorm1d(16))
            net = nn.Sequential(*[block() for _ in range(20)])
            slow = lambda rows: (time.sleep(0.02), torch.stack(rows))[1]
            data = torch.utils.data.DataLoader(torch.ones(12, 16), batch_size=4, collate_fn=slow)
            return fettle.TrainingWorkload(net, lambda p: torch.optim.AdamW(p, foreach=False), loss, data)
        """,
    )
    with pytest.raises(UsageError, match="is for training"):
        diagnose(target, mode="inference")
    with pytest.raises(UsageError, match="unknown mode"):
        diagnose(target, mode="serving")
    found = diagnose(target, seconds=0.2)
    every = {finding.rule for finding in (*found.findings, *found.opportunities)}
    assert "syncs" in every
    assert not every & {"train-mode", "grad-recorded", "batch-norm", "random", "weight-bound", "leak"}
    seen = found.evidence
    assert seen is not None
    assert seen.facts.samples == 4
    assert seen.loading.seconds >= 0.02  # each step waits for a batch that takes this long to make
    # What is counted is real; how long it takes is another thing on each machine, so it is set here.
    steady = [replace(op, seconds=10e-6 * op.calls) for op in seen.operations]
    step_s = 2 * sum(op.seconds for op in steady)
    loading = replace(seen.loading, seconds=5 * step_s, at_hand_s=step_s)
    pinned = replace(seen, operations=steady, wall_s=6 * step_s, loading=loading, slept_s=0.0, gc_s=0.0, pauses={})
    first, *rest = findings(pinned)
    assert first.rule == "data-wait"
    assert {"optimizer", "syncs"} <= {finding.rule for finding in rest}
    # Of a step without its loader, the update takes the share that it has among the operators.
    update = sum(op.calls for op in steady if op.function == "TrainingSteps.update" and op.calls >= 16)
    share = update / sum(op.calls for op in steady)
    assert 0.3 < share < 0.8
    assert next(item.bound for item in rest if item.rule == "optimizer") == pytest.approx(share / 6)


def op(group: str, seconds: float, **more: object) -> Operation:
    values = {"name": "aten.mm", "module": "m", "kind": "Linear", "line": "a.py:1", "dtype": "float32", "calls": 1,
              "flops": 0, "bytes": 0}  # fmt: skip
    return Operation(group=group, seconds=seconds, **{**values, **more})  # type: ignore[arg-type]


def test_there_are_more_than_thirty_rules_and_a_healthy_workload_triggers_none() -> None:
    assert len(RULES) >= 30
    peaks = {"matmul_float32": 1e11, "matmul_bfloat16": 1e12, "copy": 1e10}
    work = op("matrix", 0.0098, flops=int(0.95 * 0.0098e12), dtype="bfloat16")
    healthy = Evidence(Facts(dtype="bfloat16"), wall_s=0.01, operations=[work], peaks=peaks)
    assert findings(healthy) == []


def test_a_bound_is_what_the_peak_leaves() -> None:
    peaks = {"matmul_float32": 1e11, "matmul_bfloat16": 1e12}
    seen = Evidence(Facts(), wall_s=0.01, operations=[op("matrix", 0.01, flops=10**9)], peaks=peaks)
    found = {finding.rule: finding for finding in findings(seen)}
    assert found["float32"].bound == pytest.approx(0.9)  # 1 GFLOP needs 1 ms of the 10 at the 16-bit peak
    assert found["float32"].speedup == pytest.approx(10)
    assert found["float32"].levels == {"precision": "bf16"}
    assert found["float32"].formula


def test_a_report_escapes_what_it_is_given_and_shows_what_was_measured() -> None:
    parts = (("net.py:3", 0.2), ("<i>net.py:4</i>", 0.05))
    finding = Finding(
        "casts", "<script>alert(1)</script>", 0.5, levels={"precision": "bf16"}, advice="a & b", parts=parts
    )
    found = Diagnosis("<b>x</b>", [finding], {"casts": 0.5, "rest": 0.5}, 0.01)
    kept = Verified(finding, "precision=bf16", Interval(1.8, 1.7, 1.9))
    beyond = Verified(finding, "precision=bf16", Interval(2.5, 2.4, 2.6))
    assert kept.bound_kept
    assert not beyond.bound_kept
    text = page(found, [kept])
    assert "<script>alert" not in text
    assert "<i>net.py" not in text
    assert 'width: 25.0%"></i><b>5%</b>' in text  # drawn beside the largest, told as a share of the call
    assert "1.80x [1.70, 1.90]" in text
    assert "within the bound" in text
    assert "the rule is wrong" in page(found, [beyond])
    beside = Interval(3.1, 2.9, 3.3)
    busy = page(found, [replace(beyond, is_quiet=False, load=Load(others=0.24), elapsed_speedup=beside)])
    assert "On a busy machine (others took 24% of the cores), with the time spent waiting for a core taken out:" in busy
    assert "; in time elapsed beside that load 3.10x [2.90, 3.30]: " in busy
    assert "beyond the bound" in busy
    assert "the rule is wrong" not in busy
    assert json.dumps(diagnosis_json(found))


def test_a_diagnosis_beside_a_neighbour_says_so_first() -> None:
    seen = Evidence(Facts(), wall_s=0.01, load=Load(others=0.5))
    found = Diagnosis("x", [Finding("casts", "Casts.", 0.5)], wall_s=0.01, evidence=seen)
    assert found.verdict.startswith("On a busy machine (others took 50% of the cores): Casts. Mending it could save")
    told = diagnosis_json(found)
    assert (told["is_quiet"], told["load"]["others"]) == (False, 0.5)


def test_what_disturbs_the_compile_check_alone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*args: object, **options: object) -> None:
        raise UsageError("too slow")

    loads = iter([Load(others=0.0), Load(others=0.5)])
    monkeypatch.setattr(Surroundings, "look", lambda self: next(loads))
    monkeypatch.setattr("fettle.diagnose.diagnosis.compile_health", compiled)
    found = diagnose(write(tmp_path, CASES["waiting"]), seconds=0.1, record=False)
    assert found.evidence is not None
    assert found.evidence.load.others == 0.5
    assert found.verdict.startswith("On a busy machine (")


def test_compiling_of_which_nothing_came_is_not_known(tmp_path: Path) -> None:
    """A call of a method of the model's own: no code that was compiled ran."""
    target = write(
        tmp_path,
        """
        class Net(nn.Module):
            def answer(self, x):
                print("looking", end="")
                return x * 2
        def workload():
            return dict(model=Net().eval(), inputs=[torch.ones(4)], call=lambda model, x: model.answer(x))
        """,
    )
    found = diagnose(target, seconds=0.1, record=False)
    assert found.count("graph-breaks") is None
    assert any(note.startswith("compile health: not known") for note in found.notes)


PLANTED = Path(__file__).parents[2] / "bench" / "diagnosis_cases"


@pytest.mark.parametrize(
    ("kind", "name", "rule"),
    [
        pytest.param("inputs", "every_item_twice", "duplicate-data", marks=pytest.mark.slow),
        pytest.param("compute", "no_key_value_cache", "recomputation", marks=pytest.mark.slow),
        pytest.param("compute", "broadcast_distances", "spike", marks=pytest.mark.slow),
        pytest.param("compute", "row_by_row", "python-loop", marks=pytest.mark.slow),
        ("settings", "graph_kept_alive", "leak"),
        ("settings", "model_built_every_call", "built-in-call"),
    ],
)
def test_a_planted_cause_is_named_and_a_mended_program_is_not_accused(kind: str, name: str, rule: str) -> None:
    cause, mended = (_collected(kind, f"{name}{end}") for end in ("", "_fixed"))
    named = {finding.rule: finding for finding in findings(cause)}
    assert named[rule].bound <= 1
    assert named[rule].bound > 0 or named[rule].bound_bytes > 0
    assert rule not in {finding.rule for finding in findings(mended)}


def test_a_slow_call_is_made_as_seldom_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def slow(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        time.sleep(0.1)
        return model(batch)

    for place in ("collect", "collectors.variants"):
        monkeypatch.setattr(f"fettle.diagnose.{place}.SLOW_S", 0.05)
    evidence = collect(Workload(torch.nn.Linear(2, 2).eval(), [torch.ones(1, 2)], call=slow), 0.0)
    assert calls <= 25
    assert evidence.wall_s >= 0.1
    assert "grad=inference_mode" in evidence.variants


def test_settings_come_back_as_they_were() -> None:
    def settings() -> list[bool]:
        return [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled()]  # fmt: skip

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        tried = variants(lambda: torch.ones(64).sum(), 1e-3, 0.0)
        assert {"anomaly=off", "deterministic=off"} <= set(tried)
        assert settings() == [True, False, True]
        with without_anomaly_checks():
            assert not torch.is_anomaly_enabled()
        assert settings() == [True, False, True]
    finally:
        torch.autograd.set_detect_anomaly(False)
        torch.use_deterministic_algorithms(False)


def test_kept_tensors_are_found_while_others_go_away() -> None:
    """Counting all tensors of the process missed a leak when a collection took those that something else had left."""
    others = [torch.zeros(3) for _ in range(90)]
    weight = torch.ones(8, requires_grad=True)
    kept: list[torch.Tensor] = []

    def call() -> None:
        del others[-20:]
        kept.append((weight * 2).sum())

    found = kept_alive(call)
    assert (found.tensors, found.graphs, found.bytes) == (1, 1, 4)


def test_what_the_next_call_replaces_is_no_leak() -> None:
    state: dict[str, torch.Tensor] = {}
    assert kept_alive(lambda: state.update(last=torch.zeros(4))).tensors == 0


def test_a_program_that_sets_tf32_by_its_new_name_is_looked_at() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert _settings()["matmul"] == "high"
    finally:
        matmul.fp32_precision = before
    assert _settings()["matmul"] == "highest"


def test_weights_that_begin_as_zeros_are_not_stored_twice() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(512, 512, bias=False) for name in "abcd"})
    for name in "ab":
        torch.nn.init.zeros_(model[name].weight)
    assert weights(model).duplicate_bytes == 0
    model["d"].weight.data.copy_(model["c"].weight)
    assert weights(model).duplicate_bytes == 1 << 20


def test_layers_that_begin_as_copies_of_each_other_are_not_stored_twice() -> None:
    layer = torch.nn.TransformerEncoderLayer(256, 4, 256)
    assert weights(torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)).duplicate_bytes == 0


def test_what_is_no_padding() -> None:
    def share(**batch: torch.Tensor) -> float:
        return padding(Workload(torch.nn.Identity(), [batch])).share

    ids = 1 + torch.arange(128).view(4, 32)
    causal = torch.ones(32, 32, dtype=torch.long).tril()
    assert share(ids=ids, attention_mask=causal) == 0
    assert share(ids=ids, attention_mask=causal[:4]) == pytest.approx(1 - 10 / 128)
    assert share(features=torch.randn(4, 32, 8), attention_mask=causal[:4]) > 0.9
    flags = torch.zeros(8, 200, dtype=torch.long)
    flags[:, ::50] = 1  # each row ends in 49 zeros, and has three times as many before
    assert share(flags=flags) == 0
    ids[1:, 16:] = 0
    assert share(ids=ids) == pytest.approx(48 / 128)


def test_of_a_batch_without_rows_nothing_is_padding() -> None:
    assert padding(Workload(torch.nn.Identity(), [torch.zeros(0, 8, dtype=torch.long)])).share == 0


def test_ragged_tokens_have_no_padding() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(3).long(), torch.ones(9).long()], layout=torch.jagged)
    assert padding(Workload(torch.nn.Identity(), [ragged])).share == 0


def test_weights_that_are_quantised_count_as_they_are_stored() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(2)))
    quantization.quantize_(net, quantization.Int8WeightOnlyConfig())
    seen = weights(net)
    assert 2 * 512 * 512 <= seen.bytes < 3 * 512 * 512
    assert (seen.duplicate_bytes, seen.subnormal) == (0, 0)


def test_threads_are_tried_with_the_number_that_the_rule_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the physical cores within a quota: neither all logical ones nor what the machine has."""
    monkeypatch.setattr("fettle.procs.limits.physical_cores", lambda: 4)
    monkeypatch.setattr("fettle.procs.limits.quota_cores", lambda: 3.0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seen = collect(Workload(torch.nn.Linear(8, 8).eval(), [torch.ones(4, 8)]), 0.0)
    finally:
        torch.set_num_threads(before)
    assert (seen.facts.threads, seen.facts.physical_cores) == (1, 3)
    assert RULES["threads"](replace(seen, variants=dict.fromkeys(seen.variants, (0.5, 0.4, 0.6)))) is not None


def test_facts_of_a_training_loop_are_those_of_its_model() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2)).bfloat16()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    work = TrainingWorkload(
        net, lambda p: torch.optim.SGD(p, lr=0.0), lambda model, x: model(x).sum(), [torch.ones(5, 3, 8, 8).bfloat16()]
    )
    facts = collect(work, 0.0).facts
    assert (facts.mode, facts.training, facts.samples) == ("training", True, 5)
    assert (facts.dtype, facts.num_conv, facts.num_4d_inputs) == ("bfloat16", 1, 1)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_optimizer_of_a_loop_is_given_what_is_trained() -> None:
    net, given = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), []
    net[0].requires_grad_(False)

    def make(parameters: list[torch.nn.Parameter]) -> None:
        given.extend(parameters)

    with pytest.raises(UsageError, match=r"factory returned None, not a torch\.optim\.Optimizer"):
        as_workload(TrainingWorkload(net, make, lambda model, x: model(x).sum(), [torch.ones(1, 2)]))
    assert [id(one) for one in given] == [id(one) for one in net[1].parameters()]


def test_a_program_computes_where_its_answer_or_a_module_that_it_holds_lies() -> None:
    """On a device that has no memory, in place of a GPU."""

    class Holder:
        def __init__(self) -> None:
            self.net = torch.nn.Linear(2, 2, device="meta")

        def __call__(self, x: torch.Tensor) -> str:
            return "a text"

    x = torch.ones(2)
    assert device_type(Workload(torch.nn.Identity(), [x])) == "cpu"
    assert device_type(Workload(Holder(), [x])) == "meta"


def test_the_optimizer_is_charged_with_its_step_and_not_with_the_backward_pass() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(16)))
    data = [torch.ones(4, 8)] * 2
    seen = collect(
        TrainingWorkload(net, lambda p: torch.optim.AdamW(p, lr=1e-4), lambda model, x: model(x).sum(), data), 0.0
    )
    update = [op for op in seen.operations if op.function == "TrainingSteps.update"]
    assert {"aten.addcdiv_", "aten.addcmul_", "aten.lerp_"} <= {op.name for op in update}
    assert not any(op.group == "matrix" for op in update)
    steady = [replace(op, seconds=10e-6 * op.calls) for op in seen.operations]
    step_s = sum(op.seconds for op in steady)
    found = RULES["optimizer"](Evidence(seen.facts, wall_s=step_s, operations=steady))
    assert found is not None
    assert found.bound == pytest.approx(sum(10e-6 * op.calls for op in update if op.calls >= 16) / step_s)
    assert found.bound < 0.7


@pytest.mark.slow
def test_a_loader_that_reads_slowly_is_named_and_takes_its_time() -> None:
    """One that is read in the same process always takes some of the time: mended it may still be named, for less."""
    cause, mended = (_collected("inputs", f"slow_read{end}") for end in ("", "_fixed"))
    assert "data-wait" in {finding.rule for finding in findings(cause)}
    assert cause.loading.seconds >= 64 * 0.003
    assert mended.loading.seconds < 0.5 * cause.loading.seconds  # a tenth on a machine that does nothing else


def _collected(kind: str, name: str) -> Evidence:
    return collect(find_target(f"{PLANTED / kind}.py:{name}").load(), 0.1)
