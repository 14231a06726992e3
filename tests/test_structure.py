"""An edited model is another one, whatever its weights: and the same one where only its looks were edited."""

import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fettle.measure._inference import build
from fettle.measure._state import State
from fettle.measure.messages import Build
from fettle.structure import structure
from fettle.workload import Target, Workload

MODEL = """
import torch
SCALE = 2

def helper(x):
    return x + 1

class Config:
    attention = "eager"

    def __init__(self):
        self.layers, self.owner = {"wide": [1, 2]}, self

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        self.act, self.kinds, self.config = torch.relu, {"a", "b", "c"}, Config()

    @torch.no_grad()
    def forward(self, x):
        return helper(self.inner(x)) * SCALE if x.dim() in {1, 2, 3} else None
"""


def made(folder: Path, text: str) -> str:
    names: dict = {}
    exec(compile(text, str(folder / "net.py"), "exec"), names)
    return structure(names["Net"](), names.get("call"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ReLU", "GELU"),
        ("* SCALE", "/ SCALE"),
        ("x + 1", "x - 1"),
        ("SCALE = 2", "SCALE = 3"),
        ("2, 2)", "2, 4)"),
        ("torch.relu", "torch.tanh"),
        ('{"a", ', '{"d", '),
        ("[1, 2]", "[1, 3]"),
    ],
)
def test_an_edit_counts(tmp_path: Path, old: str, new: str) -> None:
    assert old in MODEL
    assert made(tmp_path, MODEL) != made(tmp_path, MODEL.replace(old, new))


def test_comments_and_layout_do_not_count(tmp_path: Path) -> None:
    assert made(tmp_path, MODEL) == made(tmp_path, "# said\n\n" + MODEL.replace("def forward", "\n    def forward"))


def test_a_function_that_calls_the_model_counts(tmp_path: Path) -> None:
    once, twice = "def call(model, x): return model(x)\n", "def call(model, x): return model(model(x))\n"
    assert made(tmp_path, MODEL + once) != made(tmp_path, MODEL + twice)


def test_it_is_the_same_in_every_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    code = textwrap.dedent(f"""
        import cloudpickle, runpy
        from fettle.structure import structure
        net = runpy.run_path({str(path)!r})["Net"]()
        print(structure(net), structure(cloudpickle.loads(cloudpickle.dumps(net))))
    """)
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    exec(code, {})
    assert capsys.readouterr().out == other.stdout


class Scaled(nn.Module):
    def __init__(self, steps: int = 2, act: object = F.relu, **others: object) -> None:
        super().__init__()
        self.layer, self.steps, self.act = nn.Linear(2, 2), steps, act
        vars(self).update(others)


def hooked(hook: object) -> nn.Module:
    model = Scaled()
    model.layer.register_forward_hook(hook)  # type: ignore[arg-type]
    return model


def test_settings_that_do_not_print_count() -> None:
    layer = partial(nn.TransformerEncoderLayer, 8, dim_feedforward=8, dropout=0.0)
    made = [
        layer(nhead=2), layer(nhead=4), layer(nhead=2, activation="gelu"), layer(nhead=2).eval(),
        Scaled(), Scaled(20), Scaled(act=F.gelu), Scaled(act=lambda x: x), Scaled(act=lambda x: 2 * x),
        Scaled(act=partial(F.softmax, dim=0)), Scaled(act=partial(F.softmax, dim=1)), Scaled(_act=F.gelu),
        Scaled(sizes=[1, {"a": (2, None)}]), Scaled(sizes=[1, {"a": (3, None)}]),
        Scaled(config=SimpleNamespace(_attn_implementation_internal="sdpa")),
        Scaled(config=SimpleNamespace(_attn_implementation_internal="eager")),
        hooked(lambda module, given, output: output), hooked(lambda module, given, output: 2 * output),
    ]  # fmt: skip
    assert len({structure(model) for model in made}) == len(made)


def test_what_a_model_remembers_or_holds_by_address_does_not_count() -> None:
    others = {"_calls": 3, "cache": torch.ones(2), "name_or_path": "/tmp/one", "warnings_issued": {"long": True}}
    known = structure(Scaled(cache=None, lock=object(), table={object(): 1}))
    assert structure(Scaled(**others)) == known == structure(Scaled(table={object(): 2}, seen=[torch.ones(2)]))


def test_what_a_call_was_made_with_counts() -> None:
    def made(steps: int, act: object = F.relu) -> object:
        def call(model: nn.Module, x: torch.Tensor, most: int = steps) -> object:
            return [act(x) for _ in range(most)]  # type: ignore[operator]

        return call

    class Call:
        def __init__(self, steps: int) -> None:
            self.steps = steps

        def __call__(self, model: nn.Module, x: torch.Tensor) -> object:
            return model(x)

        def run(self, model: nn.Module, x: torch.Tensor) -> object:
            return model(x)

    calls = [
        made(2), made(20), made(2, F.gelu), made(2, lambda x: x),
        partial(made(2), most=3), partial(made(2), most=4), partial(made(2, F.gelu), most=3),
        Call(2), Call(20), Call(2).run, Call(20).run,
    ]  # fmt: skip
    assert len({structure(Scaled(), call) for call in calls}) == len(calls)


def test_the_data_that_a_metric_is_computed_on_counts() -> None:
    class Metric:
        def __init__(self, split: torch.Tensor) -> None:
            self.split = split

        def __call__(self, run: object) -> float:
            return 0.0

    def made(split: object) -> object:
        def metric(run: object) -> object:
            return split

        return metric

    def sets(start: int) -> list[object]:
        whole = torch.arange(100.0)
        part = torch.utils.data.Subset(torch.utils.data.TensorDataset(whole), [start, start + 1])
        split, loader = whole[start : start + 2], torch.utils.data.DataLoader(part)
        return [made(split), made(split.numpy()), made([(split, 1)]), made(loader), Metric(split)]

    hashes = [[structure(nn.ReLU(), metric) for metric in sets(start)] for start in (0, 0, 50)]
    assert hashes[0] == hashes[1]
    assert not set(hashes[0]) & set(hashes[2])


def test_code_that_was_typed_into_a_shell_counts() -> None:
    def typed(text: str) -> str:
        names: dict = {"__name__": "__main__"}
        exec(compile(text, "<stdin>", "exec"), names)
        return structure(names["Net"]())

    assert typed(MODEL) != typed(MODEL.replace("* SCALE", "/ SCALE"))


def test_rows_and_what_is_set_for_all_of_torch_count() -> None:
    def built(samples: int) -> str:
        state = State(target=Target("made/up.py:workload"), made=Workload(nn.ReLU(), [torch.ones(4)], samples=samples))
        state.begin_to_build()
        return build(state, Build(state.target)).structure

    known = built(4)
    assert built(4) == known != built(2)
    torch.set_float32_matmul_precision("medium")
    assert built(4) != known


def test_any_callable_will_do() -> None:
    assert len({structure(abs), structure(max), structure(nn.ReLU()), structure(lambda x: x)}) >= 3


def test_where_a_model_lies_counts() -> None:
    model = nn.Linear(2, 2)
    here = structure(model)
    assert structure(model.to("meta")) != here


def test_two_kinds_of_gpus_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["Large", "Large", "Small"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    model = nn.ReLU()

    def on(device: str) -> str:
        monkeypatch.setattr(model, "buffers", partial(list, [SimpleNamespace(device=torch.device(device))]))
        return structure(model)

    assert on("cuda:0") == on("cuda:1")
    assert len({on(device) for device in ("cpu", "meta", "cuda:1", "cuda:2")}) == 4
    one_of_two = on("cuda:0")
    del names[2]
    alike = on("cuda:0")
    names[:] = ["Small"]
    assert on("cuda:0") == alike != one_of_two  # a study says by its machine which
