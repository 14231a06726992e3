"""fettle package with handlers, import-mar, export: what people type, what they get, one line where it is wrong."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fettle.cli.serve import run
from fettle.errors import UsageError
from fettle.serve.server import Address
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
    shown = out.replace("\n", " ")
    assert "kind=image size=8,8 resize=0 " in shown
    assert "{" not in shown
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


def test_json_of_a_server_that_is_tuned_first_is_json_alone(monkeypatch, run_fettle, tmp_path):
    (tmp_path / "p").mkdir()
    package = SimpleNamespace(folder=tmp_path / "p", manifest=SimpleNamespace(max_rows=8, name="net"))
    monkeypatch.setattr("fettle.package.manifest.open_package", lambda path: package)
    monkeypatch.setattr("fettle.cli.serve.slo.command", lambda *_, **__: print("a table"))
    monkeypatch.setattr("fettle.serve.server.serve", lambda *_: None)
    monkeypatch.setattr("fettle.loop.run", lambda _: print("{}"))
    said = run_fettle("serve", "run", tmp_path / "p", "--p99", "1s", "--json")
    assert (said.code, said.out, said.err) == (0, "{}\n", "a table\n")


def test_what_a_server_would_ignore_is_refused(fettle, tmp_path):
    code, _, errors = fettle("serve", "run", "m.py", "--rate", "5")
    assert (code, "--p99" in errors[0]) == (2, True)
    for command in (("run",), ("slo", "--p99", "1s")):
        code, _, errors = fettle("serve", *command, "bert-9")
        assert (code, len(errors), "there is no package bert-9; and" in errors[0]) == (2, 1, True)
    with pytest.raises(UsageError, match="packaged with its recipe"):
        run._packaged(str(tmp_path), Path("recipe.toml"), print)


def test_an_address_of_ipv6_is_in_brackets(capsys):
    server = SimpleNamespace(ports=[8080], registry=SimpleNamespace(versions=list))
    run._say_where(server, Address("::1"), True, print)
    assert json.loads(capsys.readouterr().out)["url"] == "http://[::1]:8080"
