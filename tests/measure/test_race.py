"""Worker processes and the race, on models that merely wait: one is twenty times as fast as the other, so that no busy
machine turns them round."""

import gc
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import psutil
import pytest
import torch

from fettle.errors import UsageError
from fettle.measure import (
    Candidate,
    Held,
    Interval,
    Judge,
    Progress,
    Rules,
    Trial,
    Worker,
    WorkerError,
    _candidates,
    _inference,
    _meters,
    _process,
    _rounds,
    _state,
    close_all,
    messages,
    race,
)
from fettle.measure._clock import Clock
from fettle.measure._process import close_each
from fettle.measure._state import State, settled, take_slice
from fettle.measure.messages import (
    Answer,
    Asked,
    Build,
    Built,
    Examine,
    Prepare,
    Probe,
    Probed,
    SliceTaken,
    TakeSlice,
    WriteReference,
)
from fettle.measure.race import _go_on
from fettle.recipe import Recipe
from fettle.workload import Target, Workload, find_target
from tests.forking import run_script
from tests.processes import alive, left_behind

A = TypeVar("A", bound=Answer)
Reference = Callable[[Target, Path], tuple[str, Judge]]
SLEEPER = """
import time, torch
def model(x):
    time.sleep(model.delay)
    return x * 2
model.delay = 0.04
def workload():
    return model, [torch.ones(4, 3), torch.full((4, 3), 2.0)]
def other():
    return model, [torch.full((4, 3), 5.0), torch.ones(4, 3)]
"""


@pytest.fixture(autouse=True)
def room_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs on this machine may hold its memory."""
    monkeypatch.setattr(_candidates, "_memory_is_short", lambda running: False)


@pytest.fixture(autouse=True)
def quick_starts(request: pytest.FixtureRequest) -> None:
    """Workers begin as forks, but for one whose start is looked at."""
    if request.function is not test_a_worker_is_ended_when_its_time_is_over:
        request.getfixturevalue("forks")


@pytest.fixture(scope="module")
def builder() -> Iterator[Worker]:
    """One process for all that only see how it answers a target that cannot be built."""
    with Worker() as worker:
        yield worker


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return _write(tmp_path, SLEEPER)


def _write(folder: Path, text: str, factory: str = "workload") -> Target:
    path = folder / "work.py"
    path.write_text(textwrap.dedent(text))
    return find_target(f"{path}:{factory}")


def _candidate(name: str, body: str = "", result: str = "model") -> Candidate:
    levels = {} if name == "baseline" else {"technique": name}
    lines = [f"    {line}" for line in body.splitlines()] + [f"    return {result}"]
    return Candidate(Recipe(levels), "def optimize(model, batches):\n" + "\n".join(lines) + "\n")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def reference(builder: Worker) -> Reference:
    """Writes the reference outputs of a target to a path; gives its fingerprint, and what judges by them."""

    def written(target: Target, path: Path) -> tuple[str, Judge]:
        fingerprint = builder.ask(Build(target), Built, 60).fingerprint
        builder.ask(WriteReference(str(path)), messages.Reference, 60)
        return fingerprint, Judge(str(path), max_error=0.02)

    return written


def test_a_workload_whose_calls_take_long_is_not_timed_alone_for_longer_than_needed(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_rounds, "_EXPENSIVE_CALL_NS", 10_000_000)
    rules = Rules(slice_s=0.01, max_rounds=4)
    alone = race(target, "", [_candidate("baseline")], Judge(), rules)[0]
    assert alone.rounds == 1
    assert alone.speedup == Interval(1.0, 1.0, 1.0)
    both = race(target, "", [_candidate("baseline"), _candidate("other")], Judge(), rules)
    assert [trial.rounds for trial in both] > [1, 1]


@pytest.mark.parametrize("judges", ["none", "all"])
def test_a_race_ranks_rejects_and_survives(judges: Any, target: Target, tmp_path: Path, reference: Reference) -> None:
    fingerprint, judging = reference(target, tmp_path / "reference.pt")
    before = alive("fettle.measure._worker")
    candidates = [
        _candidate("baseline"),
        _candidate("faster", "model.delay = 0.002"),
        _candidate("wrong", "model.delay = 0.001", "lambda x: model(x) * 1.5"),
        _candidate("raises", "raise ValueError('no such layer')"),
        _candidate("dies", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"),
    ]
    base, faster, wrong, raises, dies = race(
        target, fingerprint, candidates, judging,
        Rules(slice_s=0.05, max_rounds=8, abreast=2, judges_abreast=judges),
    )  # fmt: skip
    assert base.ok
    assert base.speedup is not None
    assert base.speedup.estimate == 1
    assert faster.ok
    assert faster.speedup is not None
    assert 1.2 < faster.speedup.low <= faster.speedup.estimate <= faster.speedup.high
    assert faster.speedup.estimate < 40  # twenty times as fast, so it was made
    assert wrong.status == "rejected"
    assert "relative error" in wrong.reason
    assert wrong.time_ms > 0  # shown with its speed, though it may not win
    assert raises.status == "failed"
    assert raises.reason == "ValueError: no such layer"
    assert dies.status == "failed"
    assert "SIGSEGV" in dies.reason
    assert not left_behind(before, "fettle.measure._worker")


def test_recipes_are_applied_side_by_side_and_timed_one_at_a_time(target: Target, tmp_path: Path) -> None:
    meets = """
import os, time
open({own!r}, "w").close()
while not os.path.exists({other!r}):
    time.sleep(0.01)
"""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    one = _candidate("one", meets.format(own=first, other=second) + "model.delay = 0.01")
    other = _candidate("other", meets.format(own=second, other=first))
    rules = Rules(slice_s=0.02, max_rounds=3, abreast=2, judges_abreast="all")
    faster, slower = race(target, "", [one, other], Judge(), rules)
    assert faster.ok
    assert slower.ok
    assert faster.time_ms < slower.time_ms


def test_a_time_limit_kills_the_worker_with_its_children(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "child.pid"

    class Timed(Worker):
        """Its time is over as soon as it hangs, however long it took to get there."""

        def _next(self, deadline: float, timeout_s: float, do: str) -> bytes:
            if do == "prepare":
                until(lambda: mark.exists() and mark.read_text())
                deadline = time.monotonic() + 0.2
            return super()._next(deadline, timeout_s, do)

    monkeypatch.setattr(_candidates, "Worker", Timed)
    spawn = "subprocess.Popen(['sleep', '300']).pid"
    body = f"import subprocess, time\nopen({str(mark)!r}, 'w').write(str({spawn}))\ntime.sleep(300)"
    trials = race(target, "", [_candidate("hangs", body)], Judge(), Rules(prepare_timeout_s=300))
    assert trials[0].status == "failed"
    assert "timed out" in trials[0].reason
    child = int(mark.read_text())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_a_worker_is_ended_when_its_time_is_over() -> None:
    with Worker() as worker, pytest.raises(WorkerError, match="timed out after 0 s in build") as caught:
        worker.ask(Build(Target("")), Built, 0.01)  # it has not even started
    assert caught.value.kind == "timeout"
    assert not psutil.pid_exists(worker.pid)


def test_a_worker_killed_from_outside_is_one_failed_trial(target: Target) -> None:
    with Worker() as worker:
        worker.ask(Build(target), Built, 60)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="SIGKILL") as caught:
            worker.ask(TakeSlice(1.0), SliceTaken, 10)
        assert caught.value.kind == "memory"


def test_a_recipe_that_dies_during_the_race_fails_and_the_others_go_on(
    target: Target, tmp_path: Path, reference: Reference
) -> None:
    fingerprint, judging = reference(target, tmp_path / "reference.pt")
    mark = tmp_path / "now"
    body = f"import os\ndef run(x):\n    if os.path.exists({str(mark)!r}): os._exit(7)\n    return model(x)"
    trials = race(
        target, fingerprint, [_candidate("baseline"), _candidate("dies", body, "run")], judging,
        Rules(slice_s=0.05, max_rounds=8, settle_verdicts=True),
        on_progress=lambda progress: mark.touch() if progress.doing.startswith("round") else None,
    )  # fmt: skip
    assert trials[0].ok
    assert trials[1].status == "failed"
    assert trials[1].reason.startswith("ended during the race: ended with exit code 7")
    assert trials[1].rounds == 1


def test_a_factory_that_builds_something_else_is_told(target: Target) -> None:
    trials = race(target, "0123456789abcdef", [_candidate("baseline")], Judge(), Rules(max_rounds=3))
    assert trials[0].status == "failed"
    assert "deterministic" in trials[0].reason


def test_memory_error_is_called_out_of_memory(target: Target) -> None:
    trials = race(target, "", [_candidate("hungry", "raise MemoryError('4 GiB')")], Judge(), Rules(max_rounds=3))
    assert trials[0].reason.startswith("out of memory")


def test_where_the_baseline_cannot_run_nothing_is_compared_with_another_in_its_place(target: Target) -> None:
    candidates = [_candidate("baseline", "raise ValueError('too large')"), _candidate("one"), _candidate("two")]
    base, *others = race(target, "", candidates, Judge(), Rules(slice_s=0.01, max_rounds=3))
    assert base.status == "failed"
    assert all(trial.ok and trial.time_ms > 0 and trial.speedup is None for trial in others)


def test_a_factory_that_runs_out_of_memory_costs_a_trial_and_not_the_study(tmp_path: Path, builder: Worker) -> None:
    """What else holds memory at that moment, other processes of the race above all, is no fault of the factory's."""
    target = _write(tmp_path, "def workload():\n    raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')")
    with pytest.raises(WorkerError, match="out of memory: RuntimeError: CUDA out of memory") as caught:
        builder.ask(Build(target), Built, 60)
    assert caught.value.kind == "memory"


def test_all_processes_are_told_to_end_before_one_is_waited_for() -> None:
    """A GPU's driver takes its time to let go of each."""
    told: list[str] = []
    workers: Any = [
        SimpleNamespace(kill=partial(told.append, f"kill {n}"), close=partial(told.append, f"close {n}"))
        for n in range(2)
    ]
    close_each(iter(workers))
    assert told == ["kill 0", "kill 1", "close 0", "close 1"]


def test_the_end_of_one_call_leaves_the_workers_of_another_thread() -> None:
    class Told:
        told: tuple[str, ...] = ()

        def kill(self) -> None:
            self.told += ("kill",)

        def close(self) -> None:
            self.told += ("close",)

    ours, theirs = Told(), Told()

    def call() -> None:
        _process._OWN.workers.add(cast("Worker", theirs))
        close_all()

    _process._OWN.workers.add(cast("Worker", ours))
    try:
        another = threading.Thread(target=call)
        another.start()
        another.join()
    finally:
        _process._OWN.workers.discard(cast("Worker", ours))
    assert (ours.told, theirs.told) == ((), ("kill", "close"))


def test_a_process_that_died_while_it_waited_is_started_anew() -> None:
    def held(code: int | None) -> Held:
        worker: Any = SimpleNamespace(wait=lambda timeout_s: code, close=lambda: None)
        answer: Any = None
        return Held({Recipe(): _candidates.Runner(_candidate("baseline"), worker, answer, "", 0.0)})

    assert held(None).take(Recipe()) is not None
    assert held(-9).take(Recipe()) is None


def test_what_is_far_too_slow_is_ended_while_it_is_made_ready(
    target: Target, tmp_path: Path, reference: Reference
) -> None:
    fingerprint, judging = reference(target, tmp_path / "reference.pt")
    stumbles = "calls = iter([0.2] * 3)\ndef run(x):\n    model.delay = next(calls, 0.001)\n    return model(x)"
    candidates = [
        _candidate("baseline"),
        _candidate("slow", "model.delay = 0.2"),
        _candidate("stumbles", stumbles, "run"),  # in its judged calls and one more, as where something recompiles
    ]
    base, slow, stumbling = race(
        target, fingerprint, candidates, judging, Rules(slice_s=0.01, max_rounds=3, longest_ms=30.0)
    )
    assert base.ok  # whatever it takes, the others are compared with it
    assert (slow.status, slow.too_slow, slow.rounds) == ("failed", True, 0)
    assert "more than 5 times as long as that of the workload as given" in slow.reason
    assert stumbling.ok


def test_a_deadline_leaves_out_what_was_not_begun(target: Target, tmp_path: Path, reference: Reference) -> None:
    fingerprint, judging = reference(target, tmp_path / "reference.pt")
    candidates = [_candidate("baseline"), _candidate("late")]
    trials = race(target, fingerprint, candidates, judging, Rules(deadline=time.monotonic() - 1, slice_s=0.05))
    assert [trial.recipe for trial in trials] == [Recipe()]
    assert trials[0].rounds == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def workload():\n    raise RuntimeError('no weights')", "raised RuntimeError: no weights"),
        ("def workload():\n    return 3", "returned an int"),
        ("import torch\ndef workload():\n    return torch.nn.Linear(2, 2), []", "empty"),
        ("import nothing_here as workload", "importing"),
        ("workload = 1", "no factory named 'workload'"),
    ],
)
def test_what_is_wrong_with_a_factory_is_one_line(tmp_path: Path, text: str, words: str, builder: Worker) -> None:
    target = _write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        builder.ask(Build(target), Built, 60)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_inputs_that_the_model_rejects_are_one_line_with_the_place(tmp_path: Path, builder: Worker) -> None:
    target = _write(
        tmp_path,
        """
        import torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 2)
            def forward(self, x):
                return self.layer(x)
        def workload():
            return Net(), [torch.ones(4, 5)]
        """,
    )
    builder.ask(Build(target), Built, 60)
    with pytest.raises(UsageError, match="the model does not take the inputs") as caught:
        builder.ask(Probe(), Probed, 60)
    assert "work.py:8" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "inputs", "words"),
    [
        ("return self.layer(x)", "[torch.ones(0, 3)]", "first batch of the inputs has no rows"),
        ("return self.layer(x)", "[torch.ones(4, 3), torch.ones(4, 5)]", "does not take batch 2 of 2 of the inputs"),
        ("return self.layer(x) / 0 * 0", "[torch.ones(4, 3)]", "NaN throughout"),
        ("return (y for y in x)", "[torch.ones(4, 3)]", "holds no tensor"),
        ("x.requires_grad_(); return torch.autograd.grad(self.layer(x).sum(), x)[0]", "[torch.ones(4, 3)]",
         r"torch.enable_grad\(\)"),
        ("exit(3)", "[torch.ones(4, 3)]", "SystemExit: 3"),
        ("return self.layer(x)", "[(torch.ones(4, 3), torch.ones(4))] * 2", r"\[first for first, \*_ in inputs\]"),
        ("return {'boxes': x[:0], 'labels': x[:0].long()}", "[torch.ones(4, 3)]", "outputs are empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_model_is_one_line(body: str, inputs: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        _probed(_module(tmp_path, body, inputs), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "inputs", "model"),
    [
        ("return self.layer(x.mul_(2))", "[torch.randn(4, 3), torch.randn(4, 3)]", "Net()"),  # writes into its input
        ("return self.layer(x.pop('x'))", "[({'x': torch.randn(4, 3)},)]", "Net()"),
        ("x.x = self.layer(x.x); return x.x", "[types.SimpleNamespace(x=torch.randn(4, 3))]", "Net()"),
        ("return self.lazy(x)", "[torch.randn(4, 3)]", "Net()"),
        ("self.mean = (self.mean + x.mean()) / 2; return self.layer(x) + self.mean", "[torch.ones(4, 3)]", "Net()"),
        ("self.step = getattr(self, 'step', 0) + 1; return self.layer(x) * self.step", "[torch.ones(4, 3)]", "Net()"),
        ("return self.layer(x)", "[torch.randn(4, 3)]", "torch.export.export(Net(), (torch.randn(4, 3),)).module()"),
        ("return self.layer(x)", "[torch.randn(4, 3)]", "torch.jit.script(torch.nn.Linear(3, 2))"),
    ],
)
def test_odd_models_are_judged_right(body: str, inputs: str, model: str, tmp_path: Path) -> None:
    target = _module(tmp_path, body, inputs, model)
    reference = _probed(target, tmp_path)
    state = State()
    _inference.build(state, Build(target))
    plain = "def optimize(model, batches):\n    return model\n"
    prepared = _inference.prepare(state, Prepare(plain, "plain", reference))
    assert prepared.accuracy.error < 1e-5
    assert prepared.accuracy.problem == ""


def test_a_lazy_module_has_the_same_weights_whatever_the_recipe_makes_of_them(tmp_path: Path) -> None:
    target = _module(tmp_path, "return self.lazy(x)", "[torch.randn(4, 3)]")
    reference, state = _probed(target, tmp_path), State()
    _inference.build(state, Build(target))
    text = "def optimize(model, batches):\n    model.bfloat16()\n    return lambda x: model(x.bfloat16())\n"
    assert _inference.prepare(state, Prepare(text, "bf16", reference)).accuracy.error < 0.02


@pytest.mark.parametrize(("samples", "counted"), [("", 2 * (4 + 1) / 2), (", samples=3", 2 * 3)])
def test_batches_of_unlike_rows_are_timed_together_and_counted_by_their_mean(samples, counted, tmp_path: Path) -> None:
    made = f"fettle.Workload(torch.nn.Linear(3, 2), [torch.ones(4, 3), torch.ones(1, 3)]{samples})"
    state = State()
    _inference.build(state, Build(_write(tmp_path, f"import fettle, torch\ndef workload():\n    return {made}")))
    plain = "def optimize(model, batches):\n    return model\n"
    assert _inference.prepare(state, Prepare(plain, "plain", "", factor=2)).samples == counted


def test_each_judged_call_draws_what_the_references_drew(tmp_path: Path) -> None:
    """From a generator among the inputs, which looking at the model and optimizing it draw from too."""
    text = """
    import torch
    class Net(torch.nn.Module):
        def forward(self, x, generator):
            return x + torch.randn(x.shape, generator=generator)
    def workload():
        return Net(), [(torch.ones(4, 3), torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    """
    target, state = _write(tmp_path, text), State()
    reference = _probed(target, tmp_path)
    _inference.build(state, Build(target))
    looks = "def optimize(model, batches):\n    model(*batches[0])\n    return model\n"
    assert _inference.prepare(state, Prepare(looks, "looks", reference)).accuracy.error < 1e-5


def test_texts_have_no_error(tmp_path: Path) -> None:
    text = """
    def workload():
        return {"model": lambda x: ["a"] * x, "inputs": [2, 3], "metric": lambda run: len(run(2))}
    """
    target, state = _write(tmp_path, text), State()
    reference = _probed(target, tmp_path)
    _inference.build(state, Build(target))
    plain = "def optimize(model, batches):\n    return model\n"
    accuracy = _inference.prepare(state, Prepare(plain, "plain", reference)).accuracy
    assert (accuracy.problem, accuracy.metric, math.isnan(accuracy.error)) == ("", 2.0, True)
    assert Judge(reference, max_metric_drop=0.1, reference_metric=2.0).reason(accuracy) == ""


def test_an_output_that_is_nothing_but_rounding_is_not_judged(tmp_path: Path) -> None:
    wide = "torch.sin(self.layer(x).repeat(1, 64) * torch.arange(128))"
    body = f"y = torch.nn.functional.layer_norm({wide}, (128,)); return {{'y': y, 'mean': y.mean()}}"
    target, path = _module(tmp_path, body, "[torch.randn(4, 3), torch.randn(4, 3)]"), str(tmp_path / "reference.pt")
    first, second = State(), State()
    _inference.build(first, Build(target))
    written = _inference.reference(first, WriteReference(path))
    (note,) = written.notes
    assert note.startswith("zero but for rounding, and not judged: the output's ")
    assert note.endswith("mean")
    _inference.build(second, Build(target))
    plain = "def optimize(model, batches):\n    return model\n"
    assert _inference.prepare(second, Prepare(plain, "plain", path)).accuracy.error < 1e-5


def test_the_reference_of_padded_rows_is_what_the_model_as_given_answers(tmp_path: Path) -> None:
    """Without gradients torch's encoder leaves padding out, and answers zeros there."""
    encoder = "torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()"
    batch = "dict(src=torch.randn(2, 5, 8), src_key_padding_mask=torch.arange(5)[None] > torch.tensor([[4], [2]]))"
    target = _write(tmp_path, f"import torch\ndef workload():\n    return {encoder}, [{batch}, {batch}]")
    state, path = State(), str(tmp_path / "reference.pt")
    _inference.build(state, Build(target))
    (note,) = _inference.reference(state, WriteReference(path)).notes
    assert "leaves out what is padded" in note
    plain = "def optimize(model, batches):\n    return model\n"
    state = State()
    _inference.build(state, Build(target))
    assert _inference.prepare(state, Prepare(plain, "plain", path)).accuracy.error < 1e-5


def _module(folder: Path, body: str, inputs: str, model: str = "Net()") -> Target:
    lazy = "self.lazy = torch.nn.LazyLinear(2)" if "lazy" in body else ""
    mean = "self.register_buffer('mean', torch.zeros(()))" if "self.mean" in body else ""
    return _write(
        folder,
        f"""
        import torch, types
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 2)
                {lazy}{mean}
            def forward(self, x):
                {body}
        def workload():
            return {model}, {inputs}
        """,
    )


def _probed(target: Target, folder: Path) -> str:
    """What the first worker of a study does, in this process; returns the reference's path."""
    state, path = State(), str(folder / "reference.pt")
    _inference.build(state, Build(target))
    _inference.probe(state, Probe())
    _inference.examine(state, Examine("fettle.diagnose.collect:glance"))
    _inference.reference(state, WriteReference(path))
    return path


def test_a_nested_tensor_without_a_shape_is_one_line() -> None:
    rows = [torch.ones(3, 4), torch.ones(5, 4)]
    with pytest.raises(UsageError, match=r"layout=torch\.jagged"):
        _inference.with_check(Workload(torch.nn.Linear(4, 2), [torch.nested.nested_tensor(rows)]))


def test_one_batch_is_judged_on_another_too(tmp_path: Path, reference: Reference) -> None:
    target = _write(tmp_path, "import torch\ndef workload():\n    return torch.nn.Linear(3, 2), torch.randn(4, 3)")
    fingerprint, judging = reference(target, tmp_path / "reference.pt")
    memo = "seen = {}\ndef run(x):\n    if 'y' not in seen: seen['y'] = model(x)\n    return seen['y']"
    trial = race(target, fingerprint, [_candidate("remembers", memo, "run")], judging, Rules(max_rounds=3))[0]
    assert trial.status == "rejected"


@pytest.mark.parametrize(("batches", "notes"), [(1, 1), (2, 0)])
def test_a_batch_whose_rows_have_an_order_is_judged_alone(batches: int, notes: int, tmp_path: Path) -> None:
    """Lengths that must fall, offsets that must rise: the second batch that is made of the first is none."""
    state, path = State(), str(tmp_path / "reference.pt")
    pack = "torch.nn.utils.rnn.pack_padded_sequence(x[0], x[1], batch_first=True).data * 2"
    batch = "([torch.randn(3, 5, 4), torch.tensor([5, 3, 2])],)"
    _inference.build(state, Build(_module(tmp_path, f"return {pack}", f"[{', '.join([batch] * batches)}]")))
    written = _inference.reference(state, WriteReference(path))
    assert len(written.notes) == notes
    assert all("rows in another order" in note for note in written.notes)
    plain = "def optimize(model, batches):\n    return model\n"
    prepared = _inference.prepare(state, Prepare(plain, "plain", path))
    assert prepared.accuracy.judged_batches == batches
    assert not prepared.accuracy.problem


def test_a_model_whose_buffers_change_is_judged_in_the_reference_order(tmp_path: Path, reference: Reference) -> None:
    target = _write(
        tmp_path,
        """
        import torch
        class Counter(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))
            def forward(self, x):
                self.calls += 1
                return x * self.calls
        def workload():
            return Counter().eval(), [torch.ones(2, 2), torch.ones(2, 2) * 3]
        """,
    )
    fingerprint, judging = reference(target, tmp_path / "reference.pt")
    trial = race(target, fingerprint, [_candidate("plain")], judging, Rules(max_rounds=3))[0]
    assert trial.ok
    assert trial.accuracy.error < 1e-6


def test_a_metric_is_measured_and_a_broken_one_never_passes(tmp_path: Path, reference: Reference) -> None:
    text = """
    import torch
    def metric(run):
        return float(run(torch.ones(1, 3)).sum())
    def broken(run):
        return float("nan")
    def model(x):
        return x * 2
    def workload():
        return {"model": model, "inputs": [torch.ones(2, 3), torch.ones(2, 3)], "metric": metric}
    def bad():
        return {"model": model, "inputs": [torch.ones(2, 3), torch.ones(2, 3)], "metric": broken}
    """
    target = _write(tmp_path, text)
    fingerprint, _ = reference(target, tmp_path / "reference.pt")
    judging = Judge(str(tmp_path / "reference.pt"), max_metric_drop=0.1, reference_metric=6.0)
    good, low = race(
        target,
        fingerprint,
        [_candidate("same"), _candidate("low", "", "lambda x: model(x) * 0.5")],
        judging,
        Rules(max_rounds=3),
    )
    assert good.ok
    assert good.accuracy.metric == 6.0
    assert low.status == "rejected"
    assert "fell from 6 to 3" in low.reason
    target = _write(tmp_path, text, "bad")
    fingerprint, _ = reference(target, tmp_path / "reference.pt")
    trial = race(target, fingerprint, [_candidate("same")], judging, Rules(max_rounds=3))[0]
    assert trial.status == "rejected"
    assert "metric is nan" in trial.reason
    assert math.isnan(trial.accuracy.metric)


def test_replicates_show_what_differs_from_process_to_process(
    target: Target, tmp_path: Path, reference: Reference
) -> None:
    """Each process of the same code has a speed of its own: one process each would be certain of a difference."""
    fingerprint, judging = reference(target, tmp_path / "reference.pt")
    lottery = (
        f"import glob, os\nmine = os.path.join({str(tmp_path)!r}, f'process-{{os.getpid()}}')\n"
        f"open(mine, 'w').close()\nmodel.delay = 0.02 * len(glob.glob(os.path.join({str(tmp_path)!r}, 'process-*')))"
    )
    base, other = race(
        target, fingerprint, [_candidate("baseline", lottery), _candidate("other", lottery)], judging,
        Rules(slice_s=0.05, max_rounds=6, settle_verdicts=True, replicates=2, replicate_s=600),
    )  # fmt: skip
    assert base.processes == other.processes == 2
    assert len(list(tmp_path.glob("process-*"))) == 4
    assert other.speedup is not None
    assert other.speedup.low < 1 < other.speedup.high
    assert _mean_ms(other) > _mean_ms(base)


def _mean_ms(trial: Trial) -> float:
    """The mean of its processes, however often a slice of one was made again."""
    processes = {one.process for one in trial.slices}
    return statistics.fmean(
        statistics.median(one.ms for one in trial.slices if one.process == process) for process in processes
    )


def test_replicates_are_not_started_where_they_would_take_too_long(
    target: Target, tmp_path: Path, reference: Reference
) -> None:
    fingerprint, judging = reference(target, tmp_path / "reference.pt")
    rules = Rules(slice_s=0.05, max_rounds=3, replicates=3, replicate_s=0.1)
    trials = race(target, fingerprint, [_candidate("baseline"), _candidate("other")], judging, rules)
    assert [trial.processes for trial in trials] == [1, 1]


def test_a_replicate_that_dies_fails_its_recipe(target: Target, tmp_path: Path, reference: Reference) -> None:
    fingerprint, judging = reference(target, tmp_path / "reference.pt")
    second = (
        f"import os\nmark = {str(tmp_path / 'mark')!r}\nif os.path.exists(mark): raise ValueError('not twice')\n"
        "open(mark, 'w').close()"
    )
    rules = Rules(slice_s=0.05, max_rounds=3, replicates=2, replicate_s=600)
    base, other = race(target, fingerprint, [_candidate("baseline"), _candidate("other", second)], judging, rules)
    assert base.ok
    assert other.status == "failed"
    assert other.reason == "its process 2: ValueError: not twice"


@pytest.mark.slow
def test_a_process_that_is_slow_for_life_brings_in_more(target: Target, tmp_path: Path, reference: Reference) -> None:
    fingerprint, judging = reference(target, tmp_path / "reference.pt")
    first = (
        f"import os\nmark = {str(tmp_path / 'mark')!r}\nmodel.delay = 0.02 if os.path.exists(mark) else 0.06\n"
        "open(mark, 'w').close()"
    )
    candidates = [
        _candidate("baseline", "model.delay = 0.02"),
        _candidate("other", first),
        _candidate("tenth", "model.delay = 0.002"),
    ]
    candidates.append(replace(_candidate("once", "model.delay = 0.01"), once=True))
    rules = Rules(slice_s=0.02, max_rounds=4, settle_verdicts=True, replicates=2, further=(5,), replicate_s=600)
    told: list[str] = []
    trials = race(target, fingerprint, candidates, judging, rules, on_progress=lambda event: told.append(event.doing))
    other, once = trials[1], trials[3]
    assert [trial.processes for trial in trials] == [5, 5, 5, 1]
    assert sum(doing.startswith("not certain yet") for doing in told) == 1
    assert sum(doing.startswith("starting ") for doing in told) == 4 + 3 * 4
    assert 6 <= other.rounds <= 8  # three or four of the first processes, as many again of all
    assert once.speedup is not None  # from the rounds that it was in
    assert other.speedup is not None
    assert 0.6 < other.speedup.low < other.speedup.high < 1.6  # 1 or so: the slow one is left out


def test_no_further_processes_are_announced_when_the_time_is_up() -> None:
    told: list[Progress] = []
    rules = Rules(deadline=time.monotonic() - 1, is_enough=lambda trials: False)
    start = SimpleNamespace(rules=rules, on_progress=told.append)
    anchor = SimpleNamespace(failure="", runners=[None])
    running: Any = [SimpleNamespace(trial=SimpleNamespace(ok=True, processes=2))]
    assert not _go_on(cast(Any, start), cast(Any, None), running, cast(Any, anchor), 5)
    assert told == []


@pytest.mark.parametrize(
    ("number", "asked", "slices", "reason"),
    [
        pytest.param(3, TakeSlice, 0, "ended during the race: gone", id="its second before it was timed",
                     marks=pytest.mark.slow),
        pytest.param(5, Prepare, 0, "ended during the race: its process 3: gone", id="its third as it starts",
                     marks=pytest.mark.slow),
        pytest.param(5, TakeSlice, 1, "ended during the race: gone", id="its third in a round", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_further_process_that_dies_fails_its_recipe(
    number: int, asked: type, slices: int, reason: str, target: Target, tmp_path: Path, reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fingerprint, judging = reference(target, tmp_path / "reference.pt")
    started: list[Worker] = []

    class Mortal(Worker):
        """The given one goes when it is asked for that and has run so many slices."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.number, self.slices = len(started), 0
            started.append(self)

        def ask(self, request: Asked, answer: type[A], timeout_s: float) -> A:
            if (self.number, type(request)) == (number, asked) and self.slices >= slices:
                self.close()
                raise WorkerError("gone")
            self.slices += isinstance(request, TakeSlice)
            return super().ask(request, answer, timeout_s)

    monkeypatch.setattr(_candidates, "Worker", Mortal)
    lottery = f"import os\nmodel.delay = 0.02 + 0.02 * os.path.exists({str(tmp_path / 'mark')!r})\n"
    lottery += f"open({str(tmp_path / 'mark')!r}, 'w').close()"
    rules = Rules(slice_s=0.05, max_rounds=3, settle_verdicts=True, replicates=2, further=(3,), replicate_s=600)
    base, other = race(target, fingerprint, [_candidate("baseline"), _candidate("other", lottery)], judging, rules)
    assert base.ok
    assert other.status == "failed"
    assert other.reason == reason
    assert math.isfinite(other.time_ms)


def test_a_race_of_what_memory_was_short_for_leaves_the_logs_of_the_first_one(
    target: Target, tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint, judging = reference(target, tmp_path / "reference.pt")
    monkeypatch.setattr(_candidates, "_memory_is_short", lambda running: True)
    candidates = [
        _candidate("baseline"),
        _candidate("one", "model.delay = 0.01"),
        _candidate("two", "model.delay = 0.02"),
    ]
    (tmp_path / "logs").mkdir()
    rules = Rules(slice_s=0.01, max_rounds=2)
    trials = race(target, fingerprint, candidates, judging, rules, log_folder=tmp_path / "logs")
    assert [trial.status for trial in trials] == ["measured"] * 3
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"000-0{number}.log" for number in range(4)]


def test_memory_is_short_where_a_peak_would_not_fit_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()  # the fixture's word that there is room
    groups: list[Path] = []
    monkeypatch.setattr("fettle.procs.limits.control_groups", lambda controller: groups)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 << 30, total=24 << 30))

    def started(peak_gib: float | None, gpu: str = "") -> _candidates.Started:
        peak = None if peak_gib is None else int(peak_gib * 2**30)
        answer = SimpleNamespace(peak_bytes=peak, gpu=gpu)
        return _candidates.Started([_candidates.Runner(_candidate("some"), None, answer, "", 0.0)])  # type: ignore[arg-type]

    assert not _candidates._memory_is_short([])
    assert not _candidates._memory_is_short([started(7), started(None)])
    assert _candidates._memory_is_short([started(1), started(7.5)])
    assert not _candidates._memory_is_short(
        [started(7.5, "GPU-1")]
    )  # that is the GPU's memory, of which nothing is known
    monkeypatch.setattr(_candidates, "gpu_memory", lambda uuid: (7.0 * 2**30, 16.0 * 2**30))
    assert not _candidates._memory_is_short([started(1), started(6, "GPU-1")])
    assert _candidates._memory_is_short([started(1), started(6.5, "GPU-1")])
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=5 << 30, total=24 << 30))
    assert _candidates._memory_is_short([started(1)])
    assert _candidates._beside([started(1), started(6, "GPU-1")]).endswith(", which needs 6.00 GiB of the GPU")
    assert not _candidates._beside([started(1), started(None, "GPU-1")])
    groups.append(tmp_path)  # a container of 4 GiB on a large host
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=99 << 30, total=256 << 30))
    (tmp_path / "memory.max").write_text(str(4 << 30))
    (tmp_path / "memory.current").write_text(str(2 << 30))
    assert not _candidates._memory_is_short([started(1)])
    assert _candidates._memory_is_short([started(2)])


@pytest.mark.parametrize(("seconds", "collected"), [(0.002, True), (0.1, False)])
def test_long_calls_leave_nothing_behind_for_the_others_to_miss(seconds: float, collected: bool) -> None:
    """Free memory stays with a process until it is given back, and what hangs in a cycle until it is collected."""

    class Loop:
        def __init__(self) -> None:
            self.itself = self

    left: list[weakref.ref[Loop]] = []

    def run(batch: torch.Tensor) -> None:
        time.sleep(0.03)
        left.append(weakref.ref(Loop()))

    state = State(run=run, clock=Clock("cpu"), cycle=itertools.cycle([[torch.ones(1)]]), call_ns=30_000_000)
    gc.collect()
    gc.disable()
    try:
        take_slice(state, TakeSlice(seconds))
        assert (left[-1]() is None) == collected
    finally:
        gc.enable()


def test_slices_account_for_all_of_their_process() -> None:
    """What a slice does not say of its own time would be taken for a neighbour's: a call that warms up, a child."""

    def run(batch: torch.Tensor) -> None:
        if len(calls) == 2:
            subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
        calls.append(sum(range(400_000)))

    def spent_s() -> float:
        return time.process_time() + os.times().children_user + os.times().children_system

    calls: list[int] = []
    state = State(run=run, clock=Clock("cpu"), cycle=itertools.cycle([[torch.ones(1)]]), call_ns=10_000_000)
    told, before_s = [], spent_s()
    for _ in range(4):
        told.append(take_slice(state, TakeSlice(0.06)).cpu_s)
        run(torch.ones(1))  # between two slices
    unknown_s = spent_s() - before_s - sum(told)
    assert unknown_s < 0.1 * sum(told)


@pytest.mark.parametrize(
    ("is_pool", "stopped_s", "neighbours", "left_ms"),
    [
        (False, 0.0, 1, 40), (False, None, 1, 40), (False, 0.3, 1, 70), (False, 0.3, 2, 70), (False, 0.0, 2, 49),
        (True, 0.0, 1, 55), (True, None, 1, 55), (True, 0.3, 1, 55), (True, 0.0, 2, 55),
    ],
)  # fmt: skip
def test_what_waiting_is_taken_out(monkeypatch: pytest.MonkeyPatch, is_pool, stopped_s, neighbours, left_ms) -> None:
    """Of two threads that wait one after the other a call waits for both; stopped together by a quota, for one of
    them; beside two neighbours some of the waiting falls together. Those of a pool share what there is to do."""

    class Counters:
        ms = 0.0

        def refresh(self) -> None:
            pass

        def children_s(self) -> float:
            return 0.0

        def by_thread(self) -> dict[int, tuple[int, int]]:
            return {thread: (int(self.ms / 30 * ran * 1e6), int(self.ms * 1e6)) for thread, ran in ((1, 50), (2, 60))}

    class Fixed:
        def time_ns(self, function: Callable[[], None]) -> int:
            function()
            return 100_000_000

    def run(batch: torch.Tensor) -> None:
        counters.ms += 30.0
        time.sleep(0.02)

    counters, readings = Counters(), iter([stopped_s and 1.0, stopped_s and 1.0 + stopped_s])
    monkeypatch.setattr(_state, "throttled_s", lambda: next(readings))
    state = State(run=run, clock=Fixed(), cycle=itertools.cycle([[torch.ones(1)]]), call_ns=100_000_000)
    state.waits, state.computing, state.is_pool = counters, (1, 2), is_pool
    told = take_slice(state, TakeSlice(0.05, neighbours=neighbours))
    assert told.unhindered_ns == pytest.approx(left_ms * 1e6)
    assert told.waits == pytest.approx(0.6)


def test_what_the_clock_holds_is_no_memory_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_meters, "peak_bytes", lambda device: 150)
    batches = itertools.cycle([[torch.ones(1)]])
    state = State(run=lambda batch: time.sleep(0.01), clock=Clock("cpu"), cycle=batches)
    state.clock.held_bytes = 100
    assert settled(state, True, []) == 50


@pytest.mark.parametrize("by_another", [True, False])
def test_threads_that_compute_while_the_one_that_calls_sleeps_are_a_pool(by_another: bool) -> None:
    def compute() -> None:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass

    with ThreadPoolExecutor(1) as pool:
        run = (lambda batch: pool.submit(compute).result()) if by_another else (lambda batch: compute())
        state = State(run=run, clock=Clock("cpu"), cycle=itertools.cycle([[torch.ones(1)]]))
        settled(state, False, [])
    assert state.is_pool == by_another
    assert len(state.computing) == 1


def test_energy_is_that_of_one_call_where_batches_differ_in_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    joules, calls = iter((0.0, 100.0)), list[torch.Tensor]()
    monkeypatch.setattr(_meters, "energy_j", lambda gpus: next(joules))
    batches = itertools.cycle([[torch.ones(1), torch.ones(2)]])
    state = State(run=calls.append, clock=Clock("cpu"), cycle=batches, call_ns=1_000_000_000)
    assert take_slice(state, TakeSlice(0.01)).energy_j == pytest.approx(100 / len(calls))


def test_a_process_that_measures_imports_no_compiler(tmp_path: Path) -> None:
    """Each candidate starts several of them: what a recipe does not use must not cost every start a second."""
    code = "import sys, fettle.measure._worker; print({'torch._dynamo', 'optuna', 'polars'} & set(sys.modules))"
    (tmp_path / "imports.py").write_text(code)
    assert run_script(tmp_path / "imports.py", os.environ) == (0, "set()\n", "")
