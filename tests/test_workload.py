"""Workloads: where they come from, what they hold, and the one clear line when they cannot be had."""

import contextlib
import os
import sys
import textwrap
import threading
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fettle.errors import UsageError, first_line
from fettle.procs.limits import affinity_cores
from fettle.workload import (
    Target,
    Workload,
    again,
    device_of,
    find_target,
    fingerprint,
    fresh,
    leaves,
    map_tensors,
    size_bytes,
    spread,
    switches,
    target_from_objects,
    tensors,
    wait_for,
    workload_from,
)
from tests.forking import run_script

Point = namedtuple("Point", "x y")
ROWS = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1)


@dataclass
class Pair:
    left: object
    right: object = None


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def batch() -> torch.Tensor:
    return torch.ones(3, 4)


def write(folder: Path, text: str, name: str = "work.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), "utf-8")
    return path


class Refused:
    """Runs a block, and checks that it raised one line that a person can act on."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        assert kind is UsageError, f"raised {kind}: {error}"
        line = str(error)
        assert "\n" not in line
        assert all(part in line for part in self.parts), line
        return True


class TestWorkload:
    def test_model_must_be_callable(self) -> None:
        with Refused("model is a class", "Linear(...)"):
            Workload(torch.nn.Linear, [torch.ones(1)])
        with Refused("model is an int", "cannot be called"):
            Workload(3, [batch()])  # type: ignore[arg-type]

    @pytest.mark.parametrize("inputs", [None, {1, 2}, iter([1]), (batch for batch in [1])])
    def test_inputs_must_be_a_list_of_batches(self, inputs: object) -> None:
        with Refused("inputs must be a list of batches", "inputs=[batch]"):
            Workload(model(), inputs)  # type: ignore[arg-type]

    def test_inputs_must_not_be_empty(self) -> None:
        with Refused("inputs are empty", "inputs=[batch]"):
            Workload(model(), [])

    @pytest.mark.parametrize("check", [None, {1, 2}, iter([1])])
    def test_check_inputs_must_be_a_list_of_batches(self, check: object) -> None:
        with Refused("inputs must be a list of batches"):
            Workload(model(), [batch()], check_inputs=check)  # type: ignore[arg-type]

    def test_inputs_are_read_for_what_they_are(self) -> None:
        made = Workload(model(), {"input": batch()}, check_inputs=batch())  # type: ignore[arg-type]
        assert [list(item) for item in made.inputs] == [["input"]]
        assert torch.equal(made.check_inputs[0], batch())
        assert made.inputs_taken_for == "one batch of keyword arguments: input"

    @pytest.mark.parametrize("name", ["call", "metric"])
    def test_functions_must_be_callable(self, name: str) -> None:
        with Refused(f"{name} is a float"):
            Workload(model(), [batch()], **{name: 0.9})  # type: ignore[arg-type]

    @pytest.mark.parametrize("samples", [0, -1, 2.5, "8"])
    def test_samples_must_be_a_number_of_rows(self, samples: object) -> None:
        with Refused("samples are", "rows"):
            Workload(model(), [batch()], samples=samples)  # type: ignore[arg-type]

    def test_rows_that_numpy_has_counted_can_be_told_to_another_process(self) -> None:
        assert type(Workload(model(), [batch()], samples=np.int64(3)).samples) is int

    def test_what_calibrates_and_what_judges_are_apart(self) -> None:
        batches = [torch.full((1,), float(index)) for index in range(5)]
        assert Workload(model(), batches).calibration == batches[:2]
        assert Workload(model(), batches[:1]).calibration == []
        assert Workload(model(), batches[:3], check_inputs=batches[3:]).calibration == batches[:3]

    def test_run_calls_the_workloads_way(self) -> None:
        def add(a: int, b: int = 10) -> int:
            return a + b

        assert Workload(add, [1]).run(add, 1) == 11
        assert Workload(add, [(1, 2)]).run(add, (1, 2)) == 3
        assert Workload(add, [{"a": 1, "b": 3}]).run(add, {"a": 1, "b": 3}) == 4
        doubled = Workload(add, [1], call=lambda called, *args, **kwargs: 2 * called(*args, **kwargs))
        assert doubled.run(add, (1, 2)) == 6

    def test_a_tokenizers_batch_becomes_keywords(self) -> None:
        made = Workload(model(), [UserDict(input=batch())], check_inputs=[UserDict(input=batch())])
        assert type(made.inputs[0]) is dict
        assert type(made.check_inputs[0]) is dict
        assert made.run(made.model, made.inputs[0]).shape == (3, 2)


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        (5, (5,), {}),
        ((1, 2), (1, 2), {}),
        ((), (), {}),
        ([1, 2], ([1, 2],), {}),
        ({"a": 1}, (), {"a": 1}),
        ({}, (), {}),
        ({1: "a"}, ({1: "a"},), {}),
        ({"*": (1, 2), "a": 3}, (1, 2), {"a": 3}),
        (OrderedDict(a=1), (OrderedDict(a=1),), {}),
        (Point(1, 2), (Point(1, 2),), {}),
        (Pair(1, 2), (Pair(1, 2),), {}),
        (None, (None,), {}),
    ],
)
def test_spread(given: object, args: tuple, kwargs: dict) -> None:
    assert spread(given) == (args, kwargs)


def test_a_fresh_batch_may_be_written_into_and_drawn_from() -> None:
    given = {"x": torch.zeros(2), "array": np.zeros(2), "deep": [Pair(torch.Generator().manual_seed(3), "text")]}
    wanted = torch.rand(2, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        own = fresh(given)
        own["x"] += 1
        own["array"] += 1
        assert torch.equal(torch.rand(2, generator=own["deep"][0].left), wanted)
        assert own["deep"][0].right == "text"
    assert torch.equal(given["x"], torch.zeros(2))
    assert given["array"].tolist() == [0, 0]


class TestLeaves:
    @pytest.mark.parametrize(
        ("tree", "paths"),
        [
            (1, ["output"]),
            (None, []),
            ([], []),
            ((1, [2, {"a": 3}]), ["[0]", "[1][0]", "[1][1].a"]),
            ({"a": {"b": 1}, 0: 2, "none": None}, [".a.b", ".0"]),
            (Point(1, (2,)), ["[0]", "[1][0]"]),
            (Pair([1], Pair(2)), [".left[0]", ".right.left"]),
            (UserDict(a=1), [".a"]),
            ({"z": torch.distributions.Normal(torch.zeros(2), torch.ones(2))}, [".z.loc", ".z.scale"]),
            (ROWS, [".base_dist.loc", ".base_dist.scale"]),
            (SimpleNamespace(store=UserDict(x=torch.zeros(2), n=3), tensor=torch.ones(2)), [".store.x", ".tensor"]),
            (torch.nn.Linear(2, 2), ["output"]),
            ("text", ["output"]),
        ],
    )
    def test_paths(self, tree: object, paths: list[str]) -> None:
        assert [path for path, _ in leaves(tree)] == paths

    def test_a_dataclass_that_is_a_mapping_counts_once(self) -> None:
        @dataclass
        class Output(OrderedDict):  # as transformers' ModelOutput
            logits: object = None
            cache: object = field(default=None)

            def __post_init__(self) -> None:
                self["logits"] = self.logits

        assert list(leaves(Output(7))) == [(".logits", 7)]

    def test_a_class_is_a_leaf(self) -> None:
        assert list(leaves({"kind": Pair})) == [(".kind", Pair)]


class TestFindTarget:
    def test_file(self, tmp_path: Path) -> None:
        path = write(tmp_path, "workload = small = other = abs")
        target = find_target(str(path))
        assert (target.reference, target.name) == (f"{path}:workload", "work")
        assert target.search_path == (str(tmp_path), str(Path.cwd()))
        assert not target.is_live
        assert find_target(f"{path}:small") == Target(f"{path}:small", "work-small", target.search_path)

    def test_file_beside_us(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write(tmp_path, "workload = small = other = abs")
        monkeypatch.chdir(tmp_path)
        assert find_target("work.py").reference == f"{path}:workload"
        assert find_target("./work.py:other").reference == f"{path}:other"

    def test_file_in_a_folder_with_a_colon(self, tmp_path: Path) -> None:
        (tmp_path / "a:b").mkdir()
        path = write(tmp_path / "a:b", "def workload(): return abs, [1]")
        assert find_target(str(path)).load().inputs == [1]
        assert find_target(f"{path}:workload").load().inputs == [1]

    def test_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write(tmp_path, "workload = small = other = abs")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert find_target("~/work.py").reference == f"{path}:workload"

    def test_module(self) -> None:
        assert find_target("package.models:small") == Target("package.models:small", "models-small", (str(Path.cwd()),))
        assert find_target("models").reference == "models:workload"
        assert find_target("models").name == "models"

    @pytest.mark.parametrize("text", ["nowhere.py", "nowhere.py:factory", "no/such/file", "/no/such.py:small"])
    def test_no_such_file(self, text: str) -> None:
        with Refused("no such file: ", text.partition(":")[0]):
            find_target(text)

    @pytest.mark.parametrize(
        "text", ["", ":", ":workload", "models:", "models:a b", "a..b", "a-b:c", "models:1st", "a:b:c"]
    )
    def test_no_target(self, text: str) -> None:
        with Refused("is not a target", "path/to/file.py:factory", "package.module:factory"):
            find_target(text)

    def test_nobodys_home_and_a_link_to_itself(self, tmp_path: Path) -> None:
        (loop := tmp_path / "loop.py").symlink_to(loop)
        for text in ("~nobody-of-this-name/model.py", str(loop)):
            with Refused("no such file: ", text):
                find_target(text)

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        with Refused("no such file"):
            find_target(str(tmp_path))

    @pytest.mark.parametrize(
        ("text", "refused"),
        [
            ("def workload(): pass\n_x = 1", True),
            ("def outer():\n    def small(): pass", True),
            ("print(small)", True),
            ("from models import *", False),
            ("if True:\n    def small(): pass", False),
            ("import models as small", False),
            ("globals()['small'] = abs", False),
            ("def __getattr__(name): return abs", False),
            ("this is no Python", False),
        ],
    )
    def test_a_factory_that_a_file_plainly_lacks_is_told_before_it_runs(
        self, tmp_path: Path, text: str, refused: bool
    ) -> None:
        path = write(tmp_path, text)
        with Refused(f"{path} has no factory named 'small'") if refused else contextlib.nullcontext():
            find_target(f"{path}:small")

    def test_another_kind_of_file(self, tmp_path: Path) -> None:
        path = write(tmp_path, "", "weights.pt")
        with Refused("not a Python file"):
            find_target(f"{path}:workload")


class TestLoad:
    @pytest.mark.parametrize(
        ("made", "name", "count"),
        [
            ("abs, [1, 2]", "work", 2),
            ("abs, 1", "work", 1),
            ("{'model': abs, 'inputs': [1], 'check_inputs': [2]}", "work", 1),
            ("{'model': abs, 'inputs': [1], 'name': 'mine'}", "mine", 1),
            ("fettle.workload.Workload(abs, [1, 2, 3])", "work", 3),
            ("fettle.workload.Workload(abs, [1], name='mine')", "mine", 1),
        ],
    )
    def test_the_forms_of_a_factory(self, tmp_path: Path, made: str, name: str, count: int) -> None:
        path = write(tmp_path, f"import fettle.workload\ndef workload(): return {made}")
        found = find_target(str(path)).load()
        assert (found.name, len(found.inputs)) == (name, count)
        assert found.run(found.model, -1) == 1

    def test_modules_beside_the_file_are_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "path", list(sys.path))
        write(tmp_path, "VALUE = 7", "beside_the_workload.py")
        path = write(tmp_path, "import beside_the_workload as b\ndef workload(): return abs, [b.VALUE]")
        assert find_target(str(path)).load().inputs == [7]

    def test_module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.chdir(tmp_path)
        write(tmp_path, "def small(): return abs, [7]", "module_with_factory.py")
        assert find_target("module_with_factory:small").load().inputs == [7]

    def test_a_file_that_imports_relative_to_its_package_is_asked_for_as_a_module(self, tmp_path: Path) -> None:
        (tmp_path / "outer" / "inner").mkdir(parents=True)
        (tmp_path / "outer" / "inner" / "__init__.py").touch()
        path = write(tmp_path / "outer" / "inner", "from .layers import one\ndef workload(): return abs, [1]")
        with Refused("name it as a module, inner.work:factory", f"start fettle in {tmp_path / 'outer'}"):
            find_target(str(path)).load()

    def test_dataclasses_inside_the_file_work(self, tmp_path: Path) -> None:
        text = """
            from __future__ import annotations
            import dataclasses
            @dataclasses.dataclass
            class Batch:
                x: int = 1
            def workload(): return (lambda batch: batch.x), [Batch()]
        """
        found = find_target(str(write(tmp_path, text))).load()
        assert found.run(found.model, found.inputs[0]) == 1

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("def workload(: pass", ["importing", "work.py", "SyntaxError"]),
            (
                "import no_such_module_at_all\ndef workload(): pass",
                ["importing", "ModuleNotFoundError", "no_such_module_at_all"],
            ),
            ("raise SystemExit('bye')\ndef workload(): pass", ["importing", "SystemExit: bye"]),
            ("def other(): pass", ["no factory named 'workload'", "it has other"]),
            ("x = 1", ["no factory named 'workload'"]),
            ("workload = 3", ["no factory named 'workload'"]),
            ("def workload(): raise ValueError('first\\nsecond')", ["factory", "raised ValueError: first"]),
            ("def workload(): raise ValueError", ["factory", "raised ValueError"]),
            ("def workload(): raise SystemExit(3)", ["factory", "raised SystemExit: 3"]),
            ("def workload(size): return abs, [1]", ["factory", "raised TypeError", "size"]),
            ("def workload(): pass", ["returned None:", "fettle.Workload(model, [batch])", "(model, [batch])"]),
            ("def workload(): return abs", ["returned a builtin_function_or_method"]),
            ("def workload(): return abs, [1], 2", ["returned a tuple"]),
            ("def workload(): return {'model': abs}", ["returned a dict", "keys among", "check_inputs"]),
            ("def workload(): return dict(model=abs, inputs=[1], batch=3)", ["returned a dict", "keys among"]),
            ("def workload(): return abs, []", ["inputs are empty"]),
            ("def workload(): return 3, [1]", ["model is an int"]),
            ("def workload(): return dict(model=abs, inputs=[1], metric=2)", ["metric is an int"]),
        ],
    )
    def test_refusals(self, tmp_path: Path, text: str, parts: list[str]) -> None:
        path = write(tmp_path, text)
        with Refused(*parts):
            find_target(str(path)).load()

    def test_a_file_that_starts_workers_when_it_is_imported(self, tmp_path: Path) -> None:
        text = "from fettle.measure import Worker\nwith Worker(): pass\ndef workload(): return abs, [1]"
        with Refused("work.py calls fettle when it is imported", "if __name__ == '__main__':"):
            find_target(str(write(tmp_path, text))).load()

    def test_a_module_that_does_not_exist(self) -> None:
        with Refused("importing no.such.module failed", "ModuleNotFoundError"):
            find_target("no.such.module").load()

    def test_ctrl_c_stays_ctrl_c(self, tmp_path: Path) -> None:
        path = write(tmp_path, "def workload(): raise KeyboardInterrupt")
        with pytest.raises(KeyboardInterrupt):
            find_target(str(path)).load()


def test_a_method_of_a_module_is_the_module_called_by_it() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def predict(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
            return times * self(x)

    net, x = Net(), batch()
    made = Workload(net.predict, {"x": x})
    assert made.model is net
    assert torch.equal(made.run(made.model, {"x": x}), 2 * x)
    assert (Workload(net.forward, [x]).model, Workload(net.forward, [x]).call) == (net, None)
    again = replace(made, model=net.predict)  # as a result is applied to what was tuned
    assert (again.model, again.call) == (net, Net.predict)
    assert Workload("text".upper, [()]).model() == "TEXT"


def test_workload_from() -> None:
    made = Workload(abs, [1])
    assert workload_from(made, "here") is made
    assert workload_from((abs, (1, 2)), "here").inputs == [(1, 2)]
    assert workload_from((abs, {"x": 1}), "here").inputs == [{"x": 1}]
    from_dict = workload_from({"model": abs, "inputs": 1, "check_inputs": {"x": 2}}, "here")
    assert (from_dict.inputs, from_dict.check_inputs) == ([1], [{"x": 2}])
    assert workload_from({"model": abs, "inputs": [1], "check_inputs": ()}, "here").check_inputs == []
    with Refused("the factory here returned a str"):
        workload_from("text", "here")


class TestLiveObjects:
    def test_round_trip(self, tmp_path: Path) -> None:
        made = Workload(model(), [batch()], call=lambda called, x: called(x) + 1, metric=lambda called: 1.0)
        target = target_from_objects(made, tmp_path / "new" / "folder")
        assert target.is_live
        assert target.name == "Sequential"
        found = target.load()
        assert found.name == "Sequential"
        assert fingerprint(found) == fingerprint(made)
        assert torch.equal(found.run(found.model.eval(), batch()), made.run(made.model.eval(), batch()))

    def test_the_users_name_stays(self, tmp_path: Path) -> None:
        target = target_from_objects(Workload(model(), [batch()], name="mine"), tmp_path)
        assert (target.name, target.load().name) == ("mine", "mine")

    def test_tied_weights_stay_tied(self, tmp_path: Path) -> None:
        tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied[1].weight = tied[0].weight
        found = target_from_objects(Workload(tied, [batch()]), tmp_path).load().model
        assert found[0].weight is found[1].weight

    def test_a_class_of_the_main_script_travels(self, tmp_path: Path) -> None:
        """A script's own classes cannot be imported by a worker: they must be in the pickle."""
        script = """
            import sys, torch
            from pathlib import Path
            from torch import nn
            from fettle.workload import Workload, target_from_objects
            class Own(nn.Module):
                def forward(self, x):
                    return x * FACTOR
            FACTOR = 3
            target_from_objects(Workload(Own(), [torch.ones(2)]), Path(sys.argv[1]))
        """
        path = write(tmp_path, script, "script.py")
        assert run_script(path, os.environ, str(tmp_path))[0] == 0
        found = Target(str(tmp_path / "workload.pkl")).load()
        assert found.run(found.model, found.inputs[0]).tolist() == [3, 3]

    @pytest.mark.parametrize("where", ["model", "inputs"])
    def test_what_cannot_be_pickled(self, tmp_path: Path, where: str) -> None:
        bad = model()
        if where == "model":
            bad.lock = threading.Lock()
        made = Workload(bad, [threading.Lock() if where == "inputs" else batch()])
        with Refused(
            "cannot be handed to a worker process", "def workload(): return model, [batch]", "'file.py:workload'"
        ):
            target_from_objects(made, tmp_path)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(("part", "named"), [(None, "in place,"), ("1", "in place (its 1),")])
    def test_what_was_compiled_in_place_would_be_eager_there(self, tmp_path: Path, part: str, named: str) -> None:
        compiled = model()
        (compiled.get_submodule(part) if part else compiled).compile()
        with Refused(f"was compiled {named}", "before `compile()`", "'file.py:workload'"):
            target_from_objects(Workload(compiled, [batch()]), tmp_path)

    def test_torchs_default_type_goes_with_them(self, tmp_path: Path) -> None:
        torch.set_default_dtype(torch.float64)
        target = target_from_objects(Workload(model(), [batch()]), tmp_path)
        torch.set_default_dtype(torch.float32)
        target.load()
        assert torch.get_default_dtype() == torch.float64

    def test_what_is_set_for_all_of_torch_goes_with_them(self, tmp_path: Path) -> None:
        torch.set_num_threads(affinity_cores() + 1)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_default_device("meta")
        given = switches()
        try:
            target = target_from_objects(Workload(abs, [1]), tmp_path)
            torch.set_default_device(None)
            torch.set_num_threads(1)
            torch.set_float32_matmul_precision("highest")
            torch.use_deterministic_algorithms(False)
            target.load()
            assert len(given) == 5
            assert switches() == given
        finally:
            torch.set_default_device(None)

    def test_what_is_as_torch_chooses_it_stays_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        torch.set_num_threads(3)
        assert switches() == [("set_default_dtype", [torch.float32], {})]

    def test_what_cannot_be_unpickled(self, tmp_path: Path) -> None:
        path = tmp_path / "workload.pkl"
        path.write_bytes(b"cut off")
        with Refused("cannot be rebuilt in a worker process", "'file.py:workload'"):
            Target(str(path)).load()

    def test_what_cannot_be_written(self, tmp_path: Path) -> None:
        blocked = tmp_path / "file"
        blocked.touch()
        with Refused("cannot write", "workload.pkl"):
            target_from_objects(Workload(model(), [batch()]), blocked)


class TestFingerprint:
    def test_equal_workloads_agree(self) -> None:
        assert fingerprint(Workload(model(), [batch()])) == fingerprint(Workload(model(), [batch()]))
        assert len(fingerprint(Workload(model(), [batch()]))) == 16

    def test_an_array_may_run_backwards(self) -> None:
        values = np.arange(5.0)
        assert fingerprint(Workload(abs, [values[::-1]])) == fingerprint(Workload(abs, [values[::-1].copy()]))

    def test_layout_mode_and_name_do_not_count(self) -> None:
        images = torch.randn(2, 3, 4, 4)
        one = Workload(model(), [images])
        two = Workload(model().eval(), [images.to(memory_format=torch.channels_last)], name="other")
        assert fingerprint(one) == fingerprint(two)

    @pytest.mark.parametrize(
        "change",
        [
            lambda made, batches: made[0].weight.data[0, 0].add_(1),
            lambda made, batches: made[1].running_mean.add_(1),  # a buffer
            lambda made, batches: made.to(torch.float64),
            lambda made, batches: made.append(nn.ReLU()) and made.append(nn.Linear(2, 2)),
            lambda made, batches: batches[0].add_(1),
            lambda made, batches: batches[-1].add_(1),
            lambda made, batches: batches.append(batch()),
            lambda made, batches: batches.reverse(),
            lambda made, batches: batches.__setitem__(0, batches[0].reshape(4, 3)),
            lambda made, batches: batches.__setitem__(0, {"x": batches[0]}),
            lambda made, batches: batches.__setitem__(0, (batches[0], 5)),
        ],
    )
    def test_every_change_counts(self, change) -> None:
        made, batches = model(), [batch(), 2 * batch()]
        before = fingerprint(Workload(made, batches))
        change(made, batches)
        assert fingerprint(Workload(made, batches)) != before

    def test_large_tensors_count_from_end_to_end(self) -> None:
        values = torch.zeros(1_000_000)
        before = fingerprint(Workload(abs, [values]))
        values[500_000:501_000] = 1
        assert fingerprint(Workload(abs, [values])) != before

    def test_numbers_texts_and_arrays_count(self) -> None:
        prints = [fingerprint(Workload(abs, [leaf])) for leaf in (1, 2, 1.0, True, "a", np.zeros(3), np.ones(3))]
        assert len(set(prints)) == len(prints)

    @pytest.mark.parametrize(
        "value",
        [
            torch.zeros(0, 3),
            torch.tensor(2.0),
            torch.tensor([True, False]),
            torch.ones(3, dtype=torch.bfloat16),
            torch.ones(3).to(torch.float8_e4m3fn),
            torch.ones(3, dtype=torch.complex64).conj(),
            torch.eye(3).to_sparse(),
            torch.ones(3, device="meta"),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            np.array(["a text", "another"]),
            object(),
        ],
        ids=lambda value: str(getattr(value, "dtype", "object")),
    )
    def test_any_leaf_will_do(self, value: object) -> None:
        assert fingerprint(Workload(abs, [value])) == fingerprint(Workload(abs, [value]))

    def test_a_module_without_weights_yet(self) -> None:
        assert fingerprint(Workload(nn.LazyLinear(3), [batch()])) == fingerprint(Workload(nn.LazyLinear(3), [batch()]))


def test_tensors_are_changed_wherever_they_lie_and_the_tree_is_left_alone() -> None:
    one = torch.ones(2)
    tree = {"a": (one, [one, "text"]), "b": Pair(one, {"c": Point(one, 3)}), "d": None, "e": OrderedDict(f=one)}
    tree["g"] = UserDict(h=one)  # as tokenizers of transformers return
    tree["i"] = SimpleNamespace(tensor=one, others=[one], store={"j": UserDict(k=one)})  # as graphs
    tree["l"] = SimpleNamespace(boxes=SimpleNamespace(tensor=one))  # as what a detector found
    tree["i"].store["itself"] = tree["i"]
    changed = map_tensors(lambda tensor: tensor * 2, tree)
    assert changed["i"].store.pop("itself") is tree["i"]
    doubled = [leaf for _, leaf in leaves(changed) if isinstance(leaf, torch.Tensor)]
    assert len(doubled) == 10
    assert all(torch.equal(leaf, torch.full((2,), 2.0)) for leaf in doubled)
    assert isinstance(changed["b"], Pair)
    assert isinstance(changed["b"].right["c"], Point)
    assert changed["b"].right["c"].y == 3
    assert type(changed["g"]) is UserDict
    assert tree["i"].others[0] is tree["l"].boxes.tensor is one
    assert tree["g"]["h"] is one
    assert (type(changed["e"]), changed["a"][1][1], changed["d"]) == (OrderedDict, "text", None)
    assert torch.equal(one, torch.ones(2))
    assert tree["b"].left is one


class Parts(MutableMapping):
    """A batch whose class is made with more than its parts."""

    def __init__(self, source, parts):
        self.source, self.parts = source, parts

    def __getitem__(self, key):
        return self.parts[key]

    def __setitem__(self, key, value):
        self.parts[key] = value

    def __delitem__(self, key):
        del self.parts[key]

    def __iter__(self):
        return iter(self.parts)

    def __len__(self):
        return len(self.parts)


def test_objects_that_hold_one_another_are_entered_once() -> None:
    one = torch.ones(2)
    first, second = SimpleNamespace(tensor=one), SimpleNamespace(count=3)
    first.next, second.before, first.twice, second.itself = second, first, [second, second], [second]
    changed = map_tensors(lambda tensor: tensor * 2, {"a": first, "b": first})
    assert changed["a"] is changed["b"] is not first
    assert changed["a"].tensor.tolist() == [2, 2]
    assert [path for path, _ in leaves({"a": first, "b": first})] == [".a.tensor", ".b"]


def test_only_what_goes_on_from_a_cache_of_transformers_sees_what_it_holds() -> None:
    """Its tensors are no answer, and a model that is given one writes into it."""
    transformers = pytest.importorskip("transformers")
    cache, one = transformers.DynamicCache(), torch.ones(1, 2, 3, 4)
    cache.update(one, one, 0)
    assert tensors({"cache": cache}) == []
    assert map_tensors(lambda tensor: tensor * 2, [cache])[0] is cache
    for own in (again({"cache": cache})["cache"], fresh([cache])[0]):
        own.update(one, one, 0)
        assert (own.get_seq_length(), cache.get_seq_length()) == (6, 3)
    assert len([*leaves(cache, caches=True)]) == 2


def test_a_mapping_of_another_class_is_left_alone_when_its_copy_is_changed() -> None:
    one = torch.ones(2)
    given = Parts("a file", {"x": one})
    changed = map_tensors(lambda tensor: tensor * 2, given)
    assert (type(changed), changed.source, changed["x"].tolist()) == (Parts, "a file", [2, 2])
    assert given["x"] is one


def test_tensors_are_changed_in_tuples_and_lists_of_other_classes() -> None:
    class Row(tuple):
        label = ""

    class Listed(list):
        pass

    one, row = torch.ones(2), Row([torch.ones(2), 3])
    row.label = "first"
    size, listed = torch.Size([2]), Listed([one, row])
    rows = map_tensors(lambda tensor: tensor + 1, ROWS)
    assert torch.equal(rows.mean, torch.ones(2))
    assert torch.equal(ROWS.mean, torch.zeros(2))
    changed, same = map_tensors(lambda tensor: tensor * 2, (listed, size))
    assert (type(changed), type(changed[1]), changed[1].label, changed[1][1]) == (Listed, Row, "first", 3)
    assert torch.equal(changed[0], changed[1][0])
    assert changed[0].tolist() == [2, 2]
    assert listed == [one, row]
    assert same is size


def test_a_model_on_several_devices_is_waited_for_on_the_one_that_is_not_the_cpu() -> None:
    class Spread(nn.Module):
        def __init__(self, *kinds: str) -> None:
            super().__init__()
            self.kinds = kinds

        def parameters(self, recurse: bool = True):  # type: ignore[no-untyped-def]
            return iter([SimpleNamespace(device=torch.device(kind)) for kind in self.kinds])

    batch = torch.ones(2)
    assert device_of(Spread("cpu", "cuda", "cpu"), batch) == "cuda"
    assert device_of(Spread("cpu", "meta"), batch) == device_of(Spread(), batch) == "cpu"
    assert device_of(len, "no tensor") == "cpu"


def test_any_device_but_the_cpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int | None] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for device in ("cpu", "mps", torch.device("xpu:1"), torch.device("cpu")):
        wait_for(device)
    assert waited == [None, 1]


def test_of_several_gpus_those_that_hold_something_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int | None] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: 0 if gpu == 1 else 1 << 20)
    for device in ("cuda", "cuda:1", None):
        wait_for(device)
    assert waited == [0, 2, 1, 0, 2]


def test_a_line_of_an_error_has_no_colours() -> None:
    assert first_line(ValueError("\x1b[96mred\x1b[0m\nmore")) == "ValueError: red"
    openvino = "Check 'false' failed at src/report.cpp:151:\nFrontEnd API failed:\n-- No conversion rule for x\n"
    assert first_line(RuntimeError(openvino)) == "RuntimeError: No conversion rule for x"
    torch_says = "Could not run 'f' on the 'SparseCPU' backend. This could be because the operator is not there"
    assert first_line(RuntimeError(torch_says)).endswith("backend.")


def test_a_model_without_weights_is_one_line() -> None:
    from fettle.measure._inference import check_inputs

    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    workload = Workload(empty, [torch.ones(2, 4)])
    fingerprint(workload)
    with pytest.raises(UsageError, match="on the meta device"):
        check_inputs(workload)


def test_a_factory_is_called_with_the_arguments_of_its_target(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        def workload(batch=1, size=2.0, seed=7):
            return batch, (size, seed)

        def anything(**given):
            return 0, given
        """,
    )
    target = find_target(str(path))
    assert target.make() == (1, (2.0, 0))
    assert replace(target, arguments={"batch": 4}).make(seed=3) == (4, (2.0, 3))
    assert replace(target, arguments={"seed": 5, "size": 1.5}).make() == (1, (1.5, 5))
    with Refused("has no parameter 'width'"):
        replace(target, arguments={"width": 4}).make()
    assert replace(find_target(f"{path}:anything"), arguments={"width": 4}).make() == (0, {"width": 4})


def test_only_texts_of_the_search_path_are_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])  # type: ignore[list-item]
    target = target_from_objects(Workload(nn.Identity(), torch.ones(2)), tmp_path)
    assert target.search_path
    assert str(tmp_path) not in target.search_path
    monkeypatch.setattr(sys, "path", ["/mod\udce8le", *sys.path])
    with Refused(r"'/mod\udce8le' is not a name in UTF-8"):
        target_from_objects(Workload(nn.Identity(), torch.ones(2)), tmp_path)
    folder = tmp_path / os.fsdecode(b"mod\xe8le")
    folder.mkdir()
    with Refused("is not a name in UTF-8"):
        find_target(str(write(folder, "def workload(): pass")))


@pytest.mark.parametrize("way", ["to_dense", "to_sparse", "to_sparse_csr"])
def test_a_sparse_tensor_is_as_large_as_what_it_stores(way: str) -> None:
    matrix = torch.eye(100)
    assert size_bytes(getattr(matrix, way)()) == (40_000 if way == "to_dense" else 400)
    assert size_bytes(np.zeros(3)) == 24
    assert size_bytes("text") == 0
