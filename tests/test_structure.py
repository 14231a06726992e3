"""An edited model is another one, whatever its weights: and the same one where only its looks were edited."""

import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fettle.structure import structure

MODEL = """
import torch
SCALE = 2

def helper(x):
    return x + 1

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())

    def forward(self, x):
        return helper(self.inner(x)) * SCALE if x.dim() in {1, 2, 3} else None
"""


def made(folder: Path, text: str) -> str:
    names: dict = {}
    exec(compile(text, str(folder / "net.py"), "exec"), names)
    return structure(names["Net"](), names.get("call"))


@pytest.mark.parametrize(
    ("old", "new"),
    [("ReLU", "GELU"), ("* SCALE", "/ SCALE"), ("x + 1", "x - 1"), ("SCALE = 2", "SCALE = 3"), ("2, 2)", "2, 4)")],
)
def test_an_edit_counts(tmp_path: Path, old: str, new: str) -> None:
    assert old in MODEL
    assert made(tmp_path, MODEL) != made(tmp_path, MODEL.replace(old, new))


def test_comments_and_layout_do_not_count(tmp_path: Path) -> None:
    assert made(tmp_path, MODEL) == made(tmp_path, "# said\n\n" + MODEL.replace("def forward", "\n    def forward"))


def test_a_function_that_calls_the_model_counts(tmp_path: Path) -> None:
    once, twice = "def call(model, x): return model(x)\n", "def call(model, x): return model(model(x))\n"
    assert made(tmp_path, MODEL + once) != made(tmp_path, MODEL + twice)


def test_it_is_the_same_in_every_process(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    code = textwrap.dedent(f"""
        import runpy
        from fettle.structure import structure
        print(structure(runpy.run_path({str(path)!r})["Net"]()))
    """)
    command = [sys.executable, "-c", code]
    said = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in "ab"}
    assert len(said) == 1


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
        monkeypatch.setattr(model, "buffers", lambda: [SimpleNamespace(device=torch.device(device))])
        return structure(model)

    assert on("cuda:0") == on("cuda:1")
    assert len({on(device) for device in ("cpu", "meta", "cuda:1", "cuda:2")}) == 4
    one_of_two = on("cuda:0")
    del names[2]
    alike = on("cuda:0")
    names[:] = ["Small"]
    assert on("cuda:0") == alike != one_of_two  # a study says by its machine which
