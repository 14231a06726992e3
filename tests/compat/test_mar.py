"""TorchServe's archives: converted where it is safe or trusted, refused with one line where it is not."""

import io
import json
import pickle
import stat
import zipfile
from pathlib import Path

import pytest
import torch

from fettle.compat.mar import _load_weights, import_mar, read_mar
from fettle.errors import UsageError
from fettle.package import export
from fettle.package.model_runner import load_model
from fettle.workload import Workload

CODE = """
import torch
from sizes import HIDDEN
open({mark!r}, "w").close()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, HIDDEN, 3)
        self.head = torch.nn.Linear(HIDDEN, 5)
    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))
"""
SHAPE = "FP32[-1,3,8,8]"


class Net(torch.nn.Module):
    """What the archive's code defines, as the operator's own."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x):
        y = torch.relu(self.conv(x)).mean((2, 3))
        return self.head(y.view(y.size(0), -1))


def net():
    torch.manual_seed(3)
    return Net().eval()


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def mar(path, entries, **model):
    model = {"modelName": "net", "modelVersion": "1.0", "serializedFile": "net.pt", **model}
    manifest = {
        "createdOn": "now",
        "runtime": model.pop("runtime", "python"),
        "model": model,
        "archiverVersion": "0.12",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        for name, data in entries.items():
            file.writestr(name, data)
    return read_mar(path)


@pytest.fixture
def eager(tmp_path):
    """An archive of class, weights and labels; `ran` exists once its code has run."""
    code = CODE.format(mark=str(tmp_path / "ran"))
    names = json.dumps({str(i): [f"n{i}", f"class {i}"] for i in range(5)})
    entries = {
        "net.pt": saved(net().state_dict()), "model.py": code, "sizes.py": "HIDDEN = 4", "index_to_name.json": names
    }  # fmt: skip
    return mar(tmp_path / "net.mar", entries, modelFile="model.py", handler="image_classifier")


def test_a_trusted_archive_becomes_a_package_without_code(eager, tmp_path):
    package = import_mar(eager, tmp_path / "out", trust=eager.digest, inputs=[SHAPE])
    assert (package.manifest.name, package.manifest.version) == ("net", "1.0")
    assert not list(package.folder.glob("*.py"))
    assert (package.folder / "labels.txt").read_text().splitlines()[4] == "class 4"
    assert package.manifest.handler.decoding.size == (8, 8)
    x = torch.rand(3, 3, 8, 8)
    torch.testing.assert_close(load_model(package)[0](x)[0], net()(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("trust", ["", "0" * 64])
def test_nothing_runs_without_the_archives_own_digest(eager, tmp_path, trust):
    with pytest.raises(UsageError, match=eager.digest):
        import_mar(eager, tmp_path / "out", trust=trust, inputs=[SHAPE])
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_with_ones_own_class_nothing_of_the_archive_runs(eager, tmp_path):
    torch.manual_seed(9)
    workload = Workload(Net().eval(), [torch.rand(2, 3, 8, 8)])
    package = import_mar(eager, tmp_path / "out", workload=workload)
    assert not (tmp_path / "ran").exists()
    x = torch.rand(3, 3, 8, 8)
    torch.testing.assert_close(load_model(package)[0](x)[0], net()(x), atol=1e-5, rtol=1e-4)


def test_without_safetensors_the_extra_is_named_before_anything_runs(eager, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs safetensors: pip install .*serve"):
        import_mar(eager, tmp_path / "out", trust=eager.digest, inputs=[SHAPE])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_is_a_program_and_needs_trust_too(tmp_path, how):
    made = torch.jit.script(net()) if how == "script" else torch.jit.trace(net(), torch.rand(2, 3, 8, 8))
    file = io.BytesIO()
    torch.jit.save(made, file)
    archive = mar(tmp_path / "net.mar", {"net.pt": file.getvalue()})
    with pytest.raises(UsageError, match="`trust="):
        import_mar(archive, tmp_path / "out", inputs=[SHAPE])
    package = import_mar(archive, tmp_path / "out", trust=archive.digest, inputs=[SHAPE])
    x = torch.rand(5, 3, 8, 8)  # another number of rows than was traced
    torch.testing.assert_close(load_model(package)[0](x)[0], net()(x), atol=1e-5, rtol=1e-4)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_pickle_with_more_than_weights_is_never_unpickled(tmp_path, form):
    evil = {"weight": Evil(tmp_path / "owned")}
    data = saved(evil) if form == "torch" else pickle.dumps(evil)
    archive = mar(tmp_path / "net.mar", {"net.pt": data, "model.py": "", "sizes.py": ""}, modelFile="model.py")
    with pytest.raises(UsageError, match="more than weights"):
        import_mar(archive, tmp_path / "out", workload=Workload(net(), [torch.rand(2, 3, 8, 8)]))
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "out").exists()


def raw(path, entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": {"modelName": "net", "serializedFile": "net.pt"}}))
        for name, data, mode in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            file.writestr(info, data)
    return read_mar(path)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([("../evil", b"x", 0o644)], "not a path inside"),
        ([("/evil", b"x", 0o644)], "not a path inside"),
        ([("a/../../evil", b"x", 0o644)], "not a path inside"),
        ([("a\\..\\evil", b"x", 0o644)], "not a path inside"),
        ([("link", b"/etc/passwd", stat.S_IFLNK | 0o777)], "a link"),
        ([("bomb", b"\0" * (64 << 20), 0o644)], "suspiciously well"),
        ([("a", b"x", 0o644), ("A", b"y", 0o644)], "a name twice"),
        ([("a", b"x", 0o644), ("a/b", b"y", 0o644)], "cannot be unpacked"),
    ],
)
def test_hostile_archives_are_one_line_and_leave_nothing(tmp_path, entries, why):
    archive = raw(tmp_path / "net.mar", entries)
    with pytest.raises(UsageError, match=why) as error:
        import_mar(archive, tmp_path / "out", workload=Workload(net(), [torch.rand(2, 3, 8, 8)]))
    assert "\n" not in str(error.value)
    assert [item.name for item in tmp_path.iterdir()] == ["net.mar"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"model": 1}', '{"model": {"modelName": "../x"}}', '{"model": {"modelName": "a b"}}',
     '{"runtime": "LSP", "model": {"modelName": "a"}}', "[" * 100_000],
)  # fmt: skip
def test_a_manifest_that_is_none_is_one_line(tmp_path, text):
    with zipfile.ZipFile(tmp_path / "net.mar", "w") as file:
        file.writestr("MAR-INF/MANIFEST.json", text)
    with pytest.raises(UsageError) as error:
        read_mar(tmp_path / "net.mar")
    assert "\n" not in str(error.value)


def test_what_is_no_archive_is_one_line(tmp_path):
    for data in (b"", b"nonsense"):
        (tmp_path / "x.mar").write_bytes(data)
        with pytest.raises(UsageError, match="not a model archive"):
            read_mar(tmp_path / "x.mar")
    with pytest.raises(UsageError, match="no such file"):
        read_mar(tmp_path / "none.mar")
    with zipfile.ZipFile(tmp_path / "damaged.mar", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("MAR-INF/MANIFEST.json", b" " * 1000)
    data = bytearray((tmp_path / "damaged.mar").read_bytes())
    data[30 + len("MAR-INF/MANIFEST.json")] = 0xFF  # the first byte of what was packed
    (tmp_path / "damaged.mar").write_bytes(data)
    with pytest.raises(UsageError, match=r"not a model archive: .*invalid block type"):
        read_mar(tmp_path / "damaged.mar")
    with zipfile.ZipFile(tmp_path / "y.mar", "w") as file:
        file.writestr("other", "")
    with pytest.raises(UsageError, match=r"MANIFEST\.json"):
        read_mar(tmp_path / "y.mar")


def test_refusals_say_what_to_do(eager, tmp_path):
    weights = saved(net().state_dict())
    out = tmp_path / "out"

    def convert(entries, inputs=(SHAPE,), **model):
        archive = mar(tmp_path / "other.mar", entries, **model)
        return import_mar(archive, out, trust=archive.digest, inputs=inputs)

    with pytest.raises(UsageError, match="give `handler`"):
        convert({"net.pt": weights, "mine.py": ""}, handler="mine.py")
    with pytest.raises(UsageError, match="`target="):
        convert({"net.pt": weights})  # a state dict without a class
    with pytest.raises(UsageError, match="defines 0 models"):
        convert({"net.pt": weights, "model.py": "x = 1"}, modelFile="model.py")
    with pytest.raises(UsageError, match="cannot be imported"):
        convert({"net.pt": weights, "model.py": "1 / 0"}, modelFile="model.py")
    with pytest.raises(UsageError, match="cannot be imported"):  # no exit with 0
        convert({"net.pt": weights, "model.py": "raise SystemExit"}, modelFile="model.py")
    with pytest.raises(UsageError, match="lacks"):
        convert({"net.pt": weights}, modelFile="../model.py")
    with pytest.raises(UsageError, match="nothing to convert"):
        convert({}, serializedFile="")
    with pytest.raises(UsageError, match="`input="):
        import_mar(eager, out, trust=eager.digest, handler="tensor")
    with pytest.raises(UsageError, match="not this model's"):
        import_mar(eager, out, workload=Workload(torch.nn.Linear(2, 2), [torch.rand(2, 2)]))
    for wrong in ("FP32", "FP33[1]", "FP32[0]", "FP32[99999,99999,99999]"):
        with pytest.raises(UsageError, match="`input="):
            import_mar(eager, out, trust=eager.digest, inputs=[wrong])
    assert not out.exists()


def test_weights_are_read_in_every_form_that_people_save(tmp_path):
    torch.manual_seed(0)
    wanted = torch.nn.Linear(3, 2).state_dict()
    safetensors = pytest.importorskip("safetensors.torch")
    forms = {"a.pt": wanted, "b.pt": {"state_dict": wanted, "epoch": 3},
             "c.pt": {f"module.{name}": value for name, value in wanted.items()}}  # fmt: skip
    for name, saved in forms.items():
        torch.save(saved, tmp_path / name)
    safetensors.save_file(wanted, tmp_path / "d.safetensors")
    for name in (*forms, "d.safetensors"):
        model = torch.nn.Linear(3, 2)
        _load_weights(model, tmp_path / name)
        assert torch.equal(model.weight, wanted["weight"])
    whole = torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2)})  # all of whose names begin so
    _load_weights(whole, tmp_path / "c.pt")
    assert torch.equal(whole["module"].weight, wanted["weight"])
    torch.save({"epoch": 3}, tmp_path / "e.pt")
    (tmp_path / "f.safetensors").write_bytes(b"none")
    for name, why in (("e.pt", "no state dict"), ("f.safetensors", "holds no weights")):
        with pytest.raises(UsageError, match=why):
            _load_weights(torch.nn.Linear(3, 2), tmp_path / name)
    with pytest.raises(UsageError, match="takes weights"):
        _load_weights(len, tmp_path / "a.pt")
