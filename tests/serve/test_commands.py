"""fettle package with handlers, import-mar, export: what people type, what they get, one line where it is wrong."""

import json

import pytest

from tests.compat.test_mar import mar, net, saved

TARGET = """
import torch


class Colours(torch.nn.Module):
    def forward(self, x):
        return x.mean((2, 3))

def workload():
    return {"model": Colours().eval(), "inputs": [torch.rand(2, 3, 8, 8)], "name": "colours"}

def net():
    from tests.compat.test_mar import Net
    return {"model": Net().eval(), "inputs": [torch.rand(2, 3, 8, 8)], "name": "net"}
"""


@pytest.fixture
def fettle(tmp_path, monkeypatch, run_fettle):
    """Run a command in a folder with ``m.py``; exit code, output and error lines."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text(TARGET)
    (tmp_path / "labels.txt").write_text("red\ngreen\nblue\n")

    def run(*arguments):
        said = run_fettle(*arguments)
        return said.code, said.out, [line for line in said.err.splitlines() if line.startswith("fettle:")]

    return run


def test_package_with_a_ready_handler_then_export(fettle, tmp_path):
    (tmp_path / "s.toml").write_text("top = 2\n[decoding]\nresize = 0\n")
    code, out, _ = fettle(
        "serve", "package", "m.py", "--handler", "image", "--labels", "labels.txt", "--handler-settings", "s.toml"
    )
    assert code == 0
    assert "kind=image" in out.replace("\n", " ")
    assert "fettle serve m-1" in out
    manifest = json.loads((tmp_path / "m-1" / "manifest.json").read_text())
    assert (manifest["handler"]["top"], manifest["handler"]["decoding"]["resize"]) == (2, 0)
    assert manifest["handler"]["decoding"]["size"] == [8, 8]
    code, out, _ = fettle("serve", "export", "ray", "m-1", "--output", "cluster", "--json")
    assert (code, json.loads(out)["path"]) == (0, "cluster")
    code, _, errors = fettle("serve", "export", "ray", "m-1", "--output", "cluster")
    assert (code, len(errors)) == (2, 1)


def test_import_mar_says_what_it_would_run_and_then_does(fettle, tmp_path):
    code = "import torch\nfrom tests.compat.test_mar import Net as Base\nclass Net(Base):\n    pass\n"
    archive = mar(tmp_path / "net.mar", {"net.pt": saved(net().state_dict()), "model.py": code}, modelFile="model.py")
    status, _, errors = fettle("serve", "import-mar", "net.mar", "--input", "FP32[-1,3,8,8]")
    assert (status, len(errors)) == (2, 1)
    assert archive.digest in errors[0]
    said = ("--input", "FP32[-1,3,8,8]", "--trust", archive.digest, "--json")
    status, out, _ = fettle("serve", "import-mar", "net.mar", *said)
    assert (status, json.loads(out)["name"]) == (0, "net")
    said = ("--target", "m.py:net", "-o", "other", "--handler", "image")
    status, out, _ = fettle("serve", "import-mar", "net.mar", *said)
    assert (status, "kind=image" in out.replace("\n", " ")) == (0, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("package", "m.py", "--handler", "video"), ("package", "m.py", "--handler", "none.py"),
        ("package", "m.py", "--handler", "text"), ("package", "m.py", "--handler", "image", "--labels", "none"),
        ("package", "m.py", "--handler", "image", "--handler-settings", "labels.txt"),
        ("package", "m.py", "--tokenizer", "none"), ("import-mar", "none.mar"), ("import-mar", "labels.txt"),
        ("export", "ray", "none", "--output", "x"), ("export", "triton", "none"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_and_leaves_nothing(fettle, tmp_path, arguments):
    before = sorted(tmp_path.iterdir())
    code, _, errors = fettle("serve", *arguments)
    assert (code, len(errors)) == (2, 1)
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before
