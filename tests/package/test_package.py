"""The package: written, opened, and refused where it is not sound."""

import hashlib
import importlib.util
import json
import os
import py_compile
import shutil
import stat
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from fettle.errors import UsageError
from fettle.files import sha256_of
from fettle.package import manifest, model_runner
from fettle.package.export import _output_name, write_package
from fettle.package.flat import Flat
from fettle.package.handler import find_handler
from fettle.package.manifest import Package, check_name, name_for, open_package, read_manifest, seal, write_settings
from fettle.package.model_runner import ModelRunner, load_model
from fettle.package.program import GRAPH, load_program, tables
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.workload import Workload


class Odd(torch.nn.Module):
    """Dict in, dataclass-like dict out, a constant, a buffer that is not saved, tied weights."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.register_buffer("shift", torch.ones(1), persistent=False)

    def forward(self, x, mask, scale=2.0):
        y = self.two(self.one(x)) * scale + self.shift
        return {"scores": y * mask, "sums": (y * mask).sum(-1)}


def odd(rows=3):
    torch.manual_seed(0)
    batch = {"x": torch.rand(rows, 5, 4), "mask": torch.ones(rows, 5, 1), "scale": 3.0}
    return Workload(Odd().eval(), [batch, {**batch, "x": torch.rand(rows, 7, 4), "mask": torch.ones(rows, 7, 1)}])


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_what_is_written_answers_as_the_model_did(tmp_path, form):
    work = odd()
    path = tmp_path / ("odd.zip" if form == "zip" else "odd")
    package = write_package(work, Recipe(), path, name="odd", settings=ServeSettings(max_rows=4))
    assert [(s.name, s.shape) for s in package.manifest.inputs] == [("x", (-1, -1, 4)), ("mask", (-1, -1, 1))]
    assert [(s.name, s.shape) for s in package.manifest.outputs] == [("scores", (-1, -1, 4)), ("sums", (-1, -1))]
    run, samples = load_model(package)
    assert len(samples) == 2
    batch = {"x": torch.rand(2, 6, 4), "mask": torch.rand(2, 6, 1), "scale": 3.0}  # other rows, another length
    wanted = work.model(**batch)
    scores, sums = run(batch["x"], batch["mask"])
    torch.testing.assert_close(scores, wanted["scores"])
    torch.testing.assert_close(sums, wanted["sums"])


def test_a_sample_may_lie_in_memory_as_it_likes(tmp_path):
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    package = write_package(Workload(torch.nn.Conv2d(3, 2, 1), [image]), Recipe(), tmp_path / "p", name="p")
    run, samples = load_model(package)
    assert torch.equal(samples[0], image)
    assert run(image)[0].shape == (2, 2, 4, 5)


class Adding(torch.nn.Module):
    """It answers in the dictionary that it is given."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, batch):
        batch["hidden"] = self.layer(batch["x"])
        return batch


@pytest.mark.parametrize(
    "recipe",
    ["precision=bf16", "runtime=openvino",
     pytest.param("compile=default grad=inference_mode", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_model_may_answer_in_the_dictionary_that_it_is_given(tmp_path, recipe):
    model, x = Adding().eval(), torch.rand(2, 4)
    package = write_package(Workload(model, [({"x": x},)]), Recipe.parse(recipe), tmp_path / "p", name="p")
    assert [spec.name for spec in package.manifest.outputs] == ["x", "hidden"]
    x = torch.rand(3, 4)
    wanted = model({"x": x})["hidden"]
    run, _ = load_model(package)
    torch.testing.assert_close(run(x)[1].float(), wanted, rtol=0, atol=0.02)


class Begins(torch.nn.Module):
    """Its keys are joined to those of a cache with nothing in it, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x):
        return torch.cat([torch.tensor([]), self.layer(x)], dim=-2)


def test_a_model_may_begin_a_cache_in_its_call(tmp_path):
    pytest.importorskip("openvino")
    model, x = Begins().eval(), torch.rand(2, 5, 4)
    package = write_package(Workload(model, [x]), Recipe.parse("runtime=openvino"), tmp_path / "p", name="p")
    run, _ = load_model(package)
    torch.testing.assert_close(run(x)[0], model(x))


def test_a_model_that_was_exported_already_has_no_modes_to_set(tmp_path):
    batch, rows = torch.rand(3, 4), {0: torch.export.Dim.AUTO}
    program = torch.export.export(torch.nn.Linear(4, 2), (batch,), dynamic_shapes=(rows,)).module()
    run, _ = load_model(write_package(Workload(program, [batch]), Recipe(), tmp_path / "p", name="p"))
    torch.testing.assert_close(run(batch[:2])[0], program(batch[:2]))


class Masked(torch.nn.Module):
    def forward(self, x):
        return x.masked_fill(x < 0, -torch.inf).softmax(-1)


def test_scores_are_masked_with_infinity_as_they_usually_are(tmp_path):
    batch = torch.tensor([[1.0, -1.0, 2.0]])
    package = write_package(Workload(Masked(), [batch]), Recipe(), tmp_path / "p", name="p")
    torch.testing.assert_close(load_model(package)[0](batch)[0], Masked()(batch))
    graph = (package.folder / GRAPH).read_text()
    (package.folder / GRAPH).write_text(graph.replace('"-Infinity"', '"-Inf(x)"'))
    with pytest.raises(UsageError, match="could not convert"):
        load_program(package.folder)


class Windows(torch.nn.Module):
    def forward(self, x):
        return x.view(x.shape[0], -1, 4).mean(1)


def test_a_size_may_have_to_be_a_multiple_of_another(tmp_path):
    batches = [torch.rand(2, 8), torch.rand(2, 12)]
    run, _ = load_model(write_package(Workload(Windows(), batches), Recipe(), tmp_path / "p", name="p"))
    other = torch.rand(3, 16)
    torch.testing.assert_close(run(other)[0], Windows()(other))
    with pytest.raises(UsageError, match="takes no inputs of these sizes"):
        run(torch.rand(3, 15))


class OneLength(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.shape[1] == 8 else x


def test_why_a_size_cannot_be_left_open_is_said(tmp_path):
    with pytest.raises(UsageError, match=r"Not all values of .*size\(\)\[1\] .*the generated guard"):
        write_package(Workload(OneLength(), [torch.rand(2, 9), torch.rand(2, 8)]), Recipe(), tmp_path / "p", name="p")


class Fixed(torch.nn.Module):
    def forward(self, x):
        return x.view(3, 4) + 1


class Found(torch.nn.Module):
    """As a detector: how many it finds depends on what it sees."""

    def forward(self, x):
        return x[torch.nonzero(x[:, 0] > 0).squeeze(-1)]


@pytest.mark.parametrize("model", [Fixed(), Found()])
def test_what_has_no_row_for_each_row_may_be_one_request(tmp_path, model):
    batch = torch.tensor([[1.0, 2, 3, 4], [-1, 2, 3, 4], [1, 2, 3, 4]])
    with pytest.raises(UsageError, match=r"rows? .*give the workload samples=1"):
        write_package(Workload(model, [batch]), Recipe(), tmp_path / "p", name="p")
    run, _ = load_model(write_package(Workload(model, [batch], samples=1), Recipe(), tmp_path / "p", name="p"))
    for given in (batch, -batch):
        torch.testing.assert_close(run(given)[0], model(given))


def test_a_recipe_is_applied_to_the_exported_model(tmp_path):
    recipe = Recipe.parse("precision=bf16 grad=inference_mode weights=as-given runtime=torch")  # two are the defaults
    package = write_package(odd(), recipe, tmp_path / "odd", name="odd")
    assert package.manifest.recipe == {"precision": "bf16", "grad": "inference_mode"}
    assert 0 < package.manifest.accuracy["relative_error"] < 0.05


def test_a_runtime_of_float32_is_refused_to_a_model_in_16_bits_as_apply_does(tmp_path):
    for dtype, text, why in (
        (torch.bfloat16, "runtime=openvino", "runtime=openvino cannot be packaged: the weights are bfloat16"),
        (torch.float32, "runtime=openvino precision=bf16", "precision=bf16 is torch's"),
    ):
        work = Workload(torch.nn.Linear(4, 3, dtype=dtype), [torch.rand(2, 4, dtype=dtype)])
        with pytest.raises(UsageError, match=why):
            write_package(work, Recipe.parse(text), tmp_path / "p", name="p")


def test_a_recipe_that_an_exported_model_cannot_have_is_refused(tmp_path):
    for text in ("quantize=int8-dynamic", "runtime=openvino algebra=fewer-products", "attention=windowed"):
        with pytest.raises(UsageError, match=f"{text.split()[-1]} cannot be packaged"):
            write_package(odd(), Recipe.parse(text), tmp_path / "odd", name="odd")
    assert not list(tmp_path.iterdir())  # nothing half-written is left


@pytest.mark.parametrize(
    ("model", "batch", "more", "why"),
    [
        (torch.sin, torch.ones(2), {}, "only an nn.Module can be packaged"),
        (torch.nn.ReLU(), torch.ones(2, dtype=torch.complex64), {}, "type torch.complex64 cannot be served"),
        (torch.nn.ReLU(), torch.ones(0, 3), {}, "the first batch of the inputs has no rows"),
        (torch.nn.ReLU(), torch.ones(2), {"handler": Path("mine.py"), "handler_settings": {"top": 1}}, "for a ready"),
        (torch.nn.ReLU(), torch.ones(2), {"handler": Path("mine.py")}, "no such file"),
    ],
)
def test_what_cannot_be_packaged_is_one_line(tmp_path, model, batch, more, why):
    with pytest.raises(UsageError, match=why):
        write_package(Workload(model, [batch]), Recipe(), tmp_path / "p", name="p", **more)
    assert not list(tmp_path.iterdir())


def test_what_exists_is_not_overwritten(tmp_path):
    (tmp_path / "odd").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        write_package(odd(), Recipe(), tmp_path / "odd", name="odd")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_package(odd(), Recipe(), tmp_path_factory.mktemp("odd") / "odd", name="odd")


@pytest.fixture
def sound(written, tmp_path):
    """A package of the test's own, which it may damage."""
    return open_package(shutil.copytree(written.folder, tmp_path / "odd"))


def test_whoever_may_read_its_manifest_may_read_all_of_it(written):
    assert len({file.stat().st_mode for file in written.folder.iterdir()}) == 1


@pytest.mark.parametrize("file", ["graph.json", "weights.safetensors", "serve.toml", "samples.safetensors"])
def test_a_changed_or_missing_file_is_noticed(sound, file):
    path = sound.folder / file
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(UsageError, match="damaged or was changed"):
        open_package(sound.folder)
    path.unlink()
    with pytest.raises(UsageError, match="lacks"):
        open_package(sound.folder)


def test_a_package_whose_manifest_names_no_samples_is_refused(sound):
    (sound.folder / "samples.safetensors").unlink()
    seal(sound.folder, sound.manifest)
    with pytest.raises(UsageError, match="names no samples"):
        open_package(sound.folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format": 1}', '{"format": "x"}', "[" * 100_000, '{"format": 99, "name": "a"}'],
)
def test_a_manifest_that_is_none_is_one_line(sound, text):
    (sound.folder / "manifest.json").write_text(text)
    why = "format 99; this fettle reads format 1" if "99" in text else "cannot be read"
    with pytest.raises(UsageError, match=why) as error:
        open_package(sound.folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("max_rows = 1000000000", "max_rows is 1 to"),
        ("workers = 100000", "workers is 1 to"),
        ("workers = 0", "workers is 1 to"),
        ("threads = -1", "threads is 0 to"),
        ("timeout_ms = nan", "timeout_ms"),
        ("limit_ms = -1.0", "limit_ms"),
        ('policy = "best"', "no such policy"),
        ("buckets = [4, 2]", "buckets must increase"),
        ("max_rows = 4\nbuckets = [2]", "the largest bucket must hold max_rows"),
        ("prefill_tokens = 0", "prefill_tokens 1 or more"),
        ("[curve]\nrows = [1, 2]\nseconds = [0.1]", "as many times as batch sizes"),
        ("[curve]\nrows = [2, 1]\nseconds = [0.1, 0.2]", "must increase from 1"),
        ("[curve]\nrows = [1]\nseconds = [0.0]", "must be positive"),
        ("delay_ms = inf", "delay_ms must be"),
    ],
)
def test_settings_that_no_machine_can_have_are_one_line(sound, text, why):
    (sound.folder / "serve.toml").write_text(text)
    seal(sound.folder, sound.manifest)
    with pytest.raises(UsageError, match=why):
        open_package(sound.folder)


def test_settings_of_earlier_versions_are_served_greedily_and_said_so(sound, caplog):
    curve = "[curve]\nrows = [1, 2]\nseconds = [0.01, 0.02]\n"
    for text, said in (('policy = "curve"', 0), (f'policy = "greedy"\npad = false\n{curve}', 0),
                       (f'policy = "curve"\n{curve}', 1), ("pad = true", 1)):  # fmt: skip
        (sound.folder / "serve.toml").write_text(f"max_rows = 4\n{text}")
        seal(sound.folder, sound.manifest)
        caplog.clear()
        assert open_package(sound.folder).settings.max_rows == 4
        assert [("batches are greedy" in record.message) for record in caplog.records] == [True] * said


def test_without_settings_of_its_own_the_manifest_is_checked_alike(sound):
    (sound.folder / "serve.toml").unlink()
    seal(sound.folder, sound.manifest)
    assert open_package(sound.folder).settings.max_rows == sound.manifest.max_rows
    seal(sound.folder, msgspec.structs.replace(sound.manifest, max_rows=10**9))
    with pytest.raises(UsageError, match=r"manifest\.json cannot be used: .*max_rows is 1 to"):
        open_package(sound.folder)


def test_a_manifest_cannot_name_files_elsewhere(sound):
    data = json.loads((sound.folder / "manifest.json").read_text())
    for name in ("../odd/graph.json", "/etc/passwd", ".hidden"):
        (sound.folder / "manifest.json").write_text(json.dumps({**data, "files": {name: "0" * 64}}))
        with pytest.raises(UsageError, match="outside itself"):
            open_package(sound.folder)


HOSTILE = {
    "operator": ('"torch.ops.aten.linear.default"', '"torch.hub.load"'),
    "system": ('"torch.ops.aten.linear.default"', '"torch.ops.aten.from_file.default"'),
    "name": ('"name":"linear"', "\"name\":\"x=__import__('os').system('false')\""),
    "guards": ('"guards_code":[]', '"guards_code":["__import__(\'os\').abort()"]'),
    "type": ('"builtins.tuple"', '"os.system"'),
    "types": ('"builtins.tuple"', '["builtins.tuple"]'),
    "key": ('"guards_code":[]', '"guards_code":[],"a b":1'),
    "version": ('"torch_version":"', '"torch_version":"1; import os '),
    "whole": ('"graph_module"', '"graph"'),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_graph_is_refused_or_harmless(sound, what):
    old, new = HOSTILE[what]
    path = sound.folder / "graph.json"
    text = path.read_text()
    if what in ("type", "types"):
        old, new = json.dumps(old)[1:-1], json.dumps(new)[1:-1]
    assert old in text, what
    path.write_text(text.replace(old, new))
    seal(sound.folder, sound.manifest)  # a stranger can compute digests too
    if what == "guards":  # dropped, never run
        load_program(open_package(sound.folder).folder)
        return
    with pytest.raises(UsageError):
        load_program(open_package(sound.folder).folder)


@pytest.mark.parametrize(
    "hostile",
    ["__import__('os').abort()", "s0 +* s1", "9**9**9**9", "1<<99999999999", "Pow(Integer(9), Integer(99999999999))",
     "Pow(Pow(Pow(Integer(9), Integer(9)), Integer(9)), Integer(9))", "Mod(1e9999999999, 3)"],
)  # fmt: skip
def test_an_expression_is_not_evaluated(sound, hostile):
    path = sound.folder / "graph.json"
    graph = json.loads(path.read_text())

    for table in tables(graph):
        if "expr_str" in table:
            table["expr_str"] = hostile
    path.write_text(json.dumps(graph))
    with pytest.raises(UsageError, match=r"expression|power"):
        load_program(sound.folder)


def test_no_file_is_read_by_an_operator_that_is_an_argument(sound):
    """Another one would call it."""
    graph = json.loads((sound.folder / GRAPH).read_text())
    node = next(table for table in tables(graph) if table.get("target") == "torch.ops.aten.linear.default")
    given = [{"as_bool": False}, {"as_operator": "torch.ops.aten.from_file.default"}, {"as_string": "/etc/passwd"},
             {"as_bool": False}, {"as_int": 8}]  # fmt: skip
    node["target"] = "torch.ops.higher_order.wrap_with_set_grad_enabled"
    node["inputs"] = [{"name": "", "arg": one, "kind": 1} for one in given]
    (sound.folder / GRAPH).write_text(json.dumps(graph))
    with pytest.raises(UsageError, match=r"from_file\.default' may not be in a package"):
        load_program(sound.folder)


def test_the_keys_of_a_structure_import_nothing(sound, tmp_path, monkeypatch):
    """torch reads a table among them as an Enum's member, whose module it imports."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close(); member = {{'x': 1}}")
    graph = json.loads((sound.folder / GRAPH).read_text())
    for table in tables(graph):
        if "in_spec" in table:
            spec = json.loads(table["in_spec"])
            spec[1]["context"] = json.dumps({"__enum__": True, "fqn": "planted:member", "name": "x"})
            table["in_spec"] = json.dumps(spec)
    (sound.folder / GRAPH).write_text(json.dumps(graph))
    with pytest.raises(UsageError, match="keys are no plain values"):
        load_program(sound.folder)
    assert not (tmp_path / "ran").exists()


def test_a_link_is_no_part_of_a_package(sound):
    """Labels are read where there are any, named or not: clients would see the lines of another file."""
    (sound.folder / "labels.txt").symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match=r"'labels\.txt' is a link"):
        open_package(sound.folder)


def archive(path, entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data, mode in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "mode", "why"),
    [
        ("../evil", b"x", 0o644, "plain files"),
        ("/abs", b"x", 0o644, "plain files"),
        ("a/b", b"x", 0o644, "plain files"),
        ("link", b"/etc/passwd", stat.S_IFLNK | 0o777, "link"),
        ("bomb", b"\0" * (64 << 20), 0o644, "suspiciously"),
    ],
)
def test_archives_cannot_escape_link_or_explode(tmp_path, name, data, mode, why):
    path = archive(tmp_path / "p.zip", [("manifest.json", b"{}", 0o644), (name, data, mode)])
    with pytest.raises(UsageError, match=why):
        open_package(path)
    assert [item.name for item in tmp_path.iterdir()] == ["p.zip"]


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_what_unpacks_all_at_once_is_not_unpacked(tmp_path, kind):
    with zipfile.ZipFile(tmp_path / "p.zip", "w", kind) as file:
        file.writestr("manifest.json", b" " * (1 << 20))
    for read in (open_package, read_manifest):
        with pytest.raises(UsageError, match="neither stored nor deflated"):
            read(tmp_path / "p.zip")


def test_a_file_that_is_no_archive(tmp_path):
    (tmp_path / "p.zip").write_bytes(b"not a zip")
    with pytest.raises(UsageError, match="cannot be unpacked"):
        open_package(tmp_path / "p.zip")
    (tmp_path / "p").touch()
    with pytest.raises(UsageError, match="is not a package"):
        open_package(tmp_path / "p")


def test_an_archive_that_was_written_anew_is_not_served_as_it_was(tmp_path):
    def zipped(created):
        facts = {"format": 1, "name": "a", "version": "1", "inputs": [], "outputs": [], "max_rows": 8,
                 "files": {"samples.safetensors": hashlib.sha256(b"").hexdigest()}, "created": created}  # fmt: skip
        entries = [("manifest.json", json.dumps(facts).encode(), 0o644), ("samples.safetensors", b"", 0o644)]
        return archive(tmp_path / "p.zip", entries)

    package = open_package(zipped("yesterday"))
    write_settings(package, ServeSettings(max_rows=4))  # as fettle serve slo does
    assert open_package(tmp_path / "p.zip").settings.max_rows == 4
    zipped("today")
    with pytest.raises(UsageError, match="move the folder away"):
        open_package(tmp_path / "p.zip")


def test_answers_are_of_the_type_that_the_manifest_says(sound):
    outputs = tuple(msgspec.structs.replace(spec, datatype="FP64") for spec in sound.manifest.outputs)
    runner = ModelRunner(replace(sound, manifest=msgspec.structs.replace(sound.manifest, outputs=outputs)))
    assert {str(answer.dtype) for answer in runner.run([runner.sample(2)], 2)} == {"float64"}


def test_of_a_handler_its_source_runs_and_no_bytecode_that_was_laid_beside_it(tmp_path):
    source = "class Handler:\n    def initialize(self, context):\n        self.said = '{}'\n"
    path, other = tmp_path / "m" / "handler.py", tmp_path / "other.py"
    path.parent.mkdir()
    path.write_text(source.format("trusted"))
    other.write_text(source.format("not trusted"))
    py_compile.compile(
        str(other), importlib.util.cache_from_source(str(path)),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = SimpleNamespace(files={"handler.py": digest}, name="m", handler=None)
    package = Package(path.parent, manifest, ServeSettings())
    assert find_handler(package, None, digest).handler.said == "trusted"
    path.write_text(source.format("changed"))
    with pytest.raises(UsageError, match="was changed"):
        find_handler(package, None, digest)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_settings_whose_writing_is_cut_short_leave_a_sound_package(sound, monkeypatch, at):
    replace_file, done = os.replace, []

    def cut_short(source, target):
        if len(done) == at:
            raise KeyboardInterrupt
        done.append(target)
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", cut_short)
    with pytest.raises(KeyboardInterrupt):
        write_settings(sound, ServeSettings(max_rows=2))
    monkeypatch.undo()
    package = open_package(sound.folder)
    assert package.settings.max_rows == (2 if at == 2 else sound.settings.max_rows)
    again = write_settings(package, ServeSettings(max_rows=3))
    assert (again.settings.max_rows, len(again.manifest.files["serve.toml"])) == (3, 64)


def test_what_python_or_a_desktop_leaves_in_a_package_is_no_part_of_it(sound):
    (sound.folder / "__pycache__").mkdir()
    (sound.folder / ".DS_Store").touch()
    assert write_settings(sound, ServeSettings(max_rows=4)).settings.max_rows == 4


class Positions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 8)
        self.places = torch.nn.Parameter(torch.randn(16, 8))

    def forward(self, ids):
        return self.table(ids) + self.places[: ids.shape[1]]


def test_a_model_with_so_many_positions_takes_texts_up_to_that_length(tmp_path):
    """Compiled ahead of time it is in `test_compiled`."""
    torch.manual_seed(0)
    batches = [torch.randint(50, (2, length)) for length in (5, 7)]
    package = write_package(Workload(Positions().eval(), batches), Recipe(), tmp_path / "p", name="p")
    run, _ = load_model(package)
    assert run(torch.randint(50, (3, 16)))[0].shape == (3, 16, 8)
    with pytest.raises(UsageError, match=r"no inputs of these sizes: .* 16.* 17"):
        run(torch.randint(50, (3, 17)))


def test_a_folder_that_another_package_was_unpacked_to_is_not_taken_for_this_one(tmp_path):
    path = tmp_path / "odd.zip"
    package = write_package(odd(), Recipe(), path, name="odd")
    package = write_settings(package, msgspec.structs.replace(package.settings, max_rows=2))
    assert open_package(path).settings.max_rows == 2  # other settings are no other package
    path.unlink()
    with pytest.raises(UsageError, match=r"odd exists already: give another `output`"):  # and not after the work
        write_package(odd(), Recipe(), path, name="odd", version="2", on_progress=pytest.fail)
    with pytest.raises(UsageError, match=r"cannot write .*: Not a directory"):
        write_package(odd(), Recipe(), tmp_path / "odd" / "serve.toml" / "in", name="odd", on_progress=pytest.fail)


def test_a_disk_that_is_full_is_one_line(tmp_path, monkeypatch):
    def full(tensors, path):
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(UsageError, match=r"cannot write .*odd: SafetensorError: No space left"):
        write_package(odd(), Recipe(), tmp_path / "odd", name="odd")
    assert not list(tmp_path.iterdir())


def test_of_two_that_unpack_a_package_at_once_both_have_it(tmp_path, monkeypatch):
    path = tmp_path / "odd.zip"
    write_package(odd(), Recipe(), path, name="odd")
    folder = path.with_suffix("")
    shutil.rmtree(folder)
    plain = manifest.unzip

    def meanwhile(archive, scratch, **options):
        plain(archive, scratch, **options)
        shutil.copytree(scratch, folder)

    monkeypatch.setattr(manifest, "unzip", meanwhile)
    assert open_package(path).folder == folder
    assert sorted(one.name for one in tmp_path.iterdir()) == ["odd", "odd.zip"]
    assert folder.stat().st_mode & 0o055 == 0o055  # another user may serve it


def test_settings_that_are_nested_too_deep_are_one_line(tmp_path):
    package = write_package(odd(), Recipe(), tmp_path / "odd", name="odd")
    (path := package.folder / "serve.toml").write_text("a = " + "[" * 5000)
    files = {**package.manifest.files, "serve.toml": sha256_of(path)}
    manifest._write(package.folder, package.manifest, files)
    with pytest.raises(UsageError, match="cannot be used"):
        open_package(package.folder)


def test_a_zip_that_is_broken_off_leaves_nothing_behind(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(zipfile.ZipFile, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        write_package(odd(), Recipe(), tmp_path / "odd.zip", name="odd")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("device", "calls"), [("cpu", [1, 2, 3]), ("meta", [1, 1, 2, 2, 3, 3])])
def test_each_size_is_warmed_once_and_where_calls_may_be_recorded_twice(written, monkeypatch, device, calls):
    runner, sizes = ModelRunner(written), []
    monkeypatch.setattr(runner, "device", device)
    monkeypatch.setattr(runner, "run", lambda parts, size: sizes.append(len(parts[0][0])))
    runner.warm([1, 2, 3])
    assert sizes == calls


def test_of_many_sizes_powers_of_two_and_the_most_are_warmed():
    assert ServeSettings().warm_sizes(5) == [1, 2, 3, 4, 5]
    assert ServeSettings().warm_sizes(1000) == [*range(1, 33), 64, 128, 256, 512, 1000]
    assert ServeSettings(max_rows=100, buckets=(40, 70, 100)).warm_sizes(100) == [40, 70, 100]


def test_whoever_calls_the_model_its_call_has_a_size_that_exists(written, monkeypatch):
    runner, sizes = ModelRunner(replace(written, settings=ServeSettings(max_rows=4, buckets=(1, 4)))), []
    call = runner.call
    monkeypatch.setattr(runner, "call", lambda tensors: sizes.append(len(tensors[0])) or call(tensors))
    for rows in (1, 3, 6):
        assert {len(answer) for answer in runner.run([runner.sample(rows)], 0)} == {rows}
    assert sizes == [1, 4, 6]


@pytest.mark.parametrize(
    ("path", "name"), [("[1]", "output_1"), ("[0].boxes", "0__boxes"), (".scores", "scores"), ("[0][2]", "0__2")]
)
def test_outputs_have_names_that_can_be_written(path, name):
    assert _output_name(path) == name


def test_what_a_handler_left_beside_the_packages_files_is_none_of_them(sound):
    (sound.folder / "__pycache__").mkdir()
    (sound.folder / ".DS_Store").write_text("")
    changed = write_settings(sound, msgspec.structs.replace(sound.settings, max_rows=2))
    assert changed.manifest.files.keys() == {*sound.manifest.files}


def test_a_damaged_archive_is_one_line(tmp_path):
    path = archive(tmp_path / "p.zip", [("manifest.json", os.urandom(9000).hex().encode(), 0o644)])
    data = path.read_bytes()
    for at in range(60, len(data) - 200, 997):
        path.write_bytes(data[:at] + b"\xff" * 20 + data[at + 20 :])
        with pytest.raises(UsageError):
            open_package(path)


class Scores(torch.nn.Module):
    """Every image against every text."""

    def forward(self, images, texts):
        return {"scores": images @ texts.T, "images": 2 * images}


class Sequence(torch.nn.Module):
    """One sequence without a batch: each step is told from the mean of all."""

    def forward(self, x):
        return x - x.mean(0)


def statistics_of_the_batch():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4, track_running_stats=False), torch.nn.Flatten()
    )


MIXES = {
    "scores": (Scores(), [{"images": torch.rand(4, 6), "texts": torch.rand(4, 6)}]),
    "one pair": (Scores(), [{"images": torch.rand(1, 6), "texts": torch.rand(1, 6)}]),
    "time first": (torch.nn.LSTM(4, 8), [torch.randn(5, 2, 4)]),
    "a sequence": (Sequence(), [torch.randn(5, 8), torch.randn(7, 8)]),
    "statistics": (statistics_of_the_batch(), [torch.randn(4, 3, 8, 8)]),
}


@pytest.mark.parametrize("what", MIXES)
def test_a_model_that_mixes_rows_is_refused(tmp_path, what):
    model, inputs = MIXES[what]
    with pytest.raises(UsageError, match=r"mixes rows.*samples=1") as failure:
        write_package(Workload(model.eval(), inputs), Recipe(), tmp_path / "m", name="m")
    assert "\n" not in str(failure.value)
    if what != "one pair":  # as it advises
        package = write_package(Workload(model, inputs, samples=1), Recipe(), tmp_path / "m", name="m")
        assert not any(spec.batched for spec in (*package.manifest.inputs, *package.manifest.outputs))
        ModelRunner(package).warm([1, 2])


@pytest.mark.parametrize("scales", [(2.0, 3.0), ("2", "3"), (None, 3.0), (np.full(4, 2.0), np.full(4, 3.0))])
def test_a_number_or_text_that_differs_between_batches_is_refused_as_no_client_could_send_it(tmp_path, scales):
    batches = [{**odd().inputs[0], "scale": scale} for scale in scales]
    with pytest.raises(UsageError, match=r"'scale' is no tensor and differs between the sample batches") as failure:
        write_package(Workload(Odd().eval(), batches), Recipe(), tmp_path / "m", name="m")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(("device", "current"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
def test_a_runner_works_on_its_own_gpu(device, current, written, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(model_runner, "load_model", lambda package, device: (None, []))
    ModelRunner(written, device)
    assert chosen == current


class Noisy(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x), x.sum(1).relu()


class Longest(torch.nn.Module):
    """As long as the longest row, and 0 beyond a row's own end."""

    def forward(self, x):
        return x[:, : x.count_nonzero(1).max().item()]


def test_random_answers_and_those_as_long_as_the_longest_row_are_no_mixed_rows(tmp_path):
    for model, x in ((Noisy(), torch.rand(4, 3)), (Longest(), torch.tril(torch.ones(4, 4)))):
        flat = Flat(Workload(model.eval(), [x]), Recipe())
        assert flat.cuts == 2
    package = write_package(Workload(Noisy().eval(), [torch.rand(4, 3)]), Recipe(), tmp_path / "m", name="m")
    assert all(spec.batched for spec in package.manifest.outputs)


class Rounds(torch.nn.Module):
    """Its answers move by hundredths with the number of rows, as a deep model's do that computes in 16 bits inside."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype).float() * (1 + 0.01 * len(x))


def test_what_is_computed_in_16_bits_may_move_further():
    x = torch.rand(4, 3) + 1
    assert Flat(Workload(Rounds(torch.bfloat16), [x]), Recipe()).cuts == 2
    with pytest.raises(UsageError, match="mixes rows"):
        Flat(Workload(Rounds(torch.float32), [x]), Recipe())


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        self.calls += 1
        return self.norm(x) * self.calls


def test_what_a_model_draws_is_no_reason_to_refuse_it():
    Flat(Workload(Noisy(), [torch.rand(4, 4)]), Recipe())


def test_a_model_that_keeps_something_from_one_client_for_the_next_is_refused(tmp_path):
    with pytest.raises(UsageError, match="writes to its buffer calls"):
        write_package(Workload(Counts().eval(), [torch.rand(4, 4)]), Recipe(), tmp_path / "m", name="m")
    write_package(Workload(Counts().norm.eval(), [torch.rand(4, 4)]), Recipe(), tmp_path / "m", name="m")


class Remembers(torch.nn.Module):
    """Keeps something of the last call where no buffer is: in an attribute, a dictionary or a list."""

    def __init__(self, where):
        super().__init__()
        self.where, self.calls, self.last, self.kept, self.seen = where, 0, torch.zeros(4), {}, []

    def forward(self, x):
        self.calls += 1
        before = {"counter": self.calls, "tensor": self.last, "dictionary": self.kept.get("last", 0)}
        self.last = self.kept["last"] = x.detach().mean(0)
        self.seen.append(x)
        return torch.cat(self.seen) if self.where == "list" else x + before.get(self.where, 0)


@pytest.mark.parametrize("where", ["counter", "tensor", "dictionary", "list"])
def test_a_model_that_remembers_a_call_in_an_attribute_is_refused(tmp_path, where):
    batch = torch.rand(4, 4)
    Flat(Workload(Remembers("nowhere").eval(), [batch]), Recipe())
    with pytest.raises(UsageError, match="keeps something from one call for the next") as failure:
        write_package(Workload(Remembers(where).eval(), [batch]), Recipe(), tmp_path / "m", name="m")
    assert "\n" not in str(failure.value)


class Counted(torch.nn.Module):
    """Answers with a number of Python's beside its tensor."""

    def forward(self, x):
        y = 2 * x
        return y, y.sum().item()


def test_of_a_number_beside_the_answer_the_tensors_are_packaged(tmp_path):
    package = write_package(Workload(Counted(), [torch.rand(4, 3)]), Recipe(), tmp_path / "m", name="m")
    assert [spec.name for spec in package.manifest.outputs] == ["output_0"]


class Gives(torch.nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x)


@pytest.mark.parametrize(
    ("change", "x", "kind"),
    [
        (torch.Tensor.to_dense, torch.eye(4).to_sparse(), "sparse"),
        (torch.Tensor.to_sparse, torch.eye(4), "sparse"),
        (torch.relu, torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged), "nested"),
        (torch.relu, torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]), "nested"),
    ],
)
def test_sparse_and_nested_tensors_are_refused_in_one_line(tmp_path, change, x, kind):
    with pytest.raises(UsageError, match=f"^{kind} tensors cannot be served: make them dense ones$"):
        write_package(Workload(Gives(change), [x], samples=1), Recipe(), tmp_path / "m", name="m")


@pytest.mark.parametrize("target", ["mödel 1", "_net", "net-tiny", "モデル", "x" * 200])
def test_any_target_has_a_name_that_its_package_may_have(target):
    check_name(name_for(target), "1")


class Flattened(torch.nn.Module):
    def forward(self, x):
        return x.reshape(-1, 3)


def test_answers_for_each_place_of_each_row_are_no_rows(tmp_path):
    with pytest.raises(UsageError, match="do not have a row for each row of the input"):
        write_package(Workload(Flattened(), [torch.rand(4, 5, 3)]), Recipe(), tmp_path / "m", name="m")


def test_outputs_without_rows_are_not_computed_with_rows_that_only_fill_up(tmp_path, monkeypatch):
    model = torch.nn.LSTM(4, 8, num_layers=2, batch_first=True).eval()
    settings = ServeSettings(max_rows=4, buckets=(4,))
    package = write_package(Workload(model, [torch.randn(4, 6, 4)]), Recipe(), tmp_path / "m", name="m",
                            settings=settings)  # fmt: skip
    assert [(spec.batched, spec.shape) for spec in package.manifest.outputs] == [
        (True, (-1, 6, 8)), (False, (2, -1, 8)), (False, (2, -1, 8))
    ]  # fmt: skip
    x = torch.randn(1, 6, 4)
    with torch.no_grad():
        scores, state = model(x)
    for answer, wanted in zip(ModelRunner(package).run([[x.numpy()]], 4), (scores, *state), strict=True):
        torch.testing.assert_close(torch.from_numpy(answer), wanted)


def test_an_answer_with_another_number_of_rows_is_not_cut_up(written, monkeypatch):
    runner = ModelRunner(written)
    call = runner.call
    monkeypatch.setattr(runner, "call", lambda tensors: [answer[1:] for answer in call(tensors)])
    with pytest.raises(RuntimeError, match="answers 1 rows for 2"):
        runner.run([runner.sample(1), runner.sample(1)], 2)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_a_traced_models_input_is_not_called_output_and_a_named_tuples_have_its_names():
    traced = torch.jit.trace(torch.nn.Linear(3, 2), torch.rand(2, 3))
    assert Flat(Workload(traced, [torch.rand(2, 3)]), Recipe()).names == ["input"]
    pairs = Workload(Typed(), [Pair(torch.ones(2, 3), torch.ones(2, 3))], call=lambda model, pair: model(*pair))
    assert Flat(pairs, Recipe()).names == ["left", "right"]


class Typed(torch.nn.Module):
    def forward(self, ids, mask=None, types=None):
        return ids if types is None else ids + types


@pytest.mark.parametrize(
    ("batch", "call", "names"),
    [
        (torch.ones(2, 3), None, ["ids"]),
        ((torch.ones(2, 3),), None, ["ids"]),
        ((torch.ones(2, 3), None, torch.ones(2, 3)), None, ["ids", "types"]),
        ((torch.ones(2, 3), 2.0, torch.ones(2, 3)), None, ["ids", "types"]),
        ((torch.ones(2, 3), torch.ones(2, 3)), lambda model, types, ids: model(ids, None, types), ["types", "ids"]),
        ((torch.ones(2, 3), torch.ones(2, 3)), lambda model, *given: model(*given), ["ids", "mask"]),
        (([torch.ones(2, 3)] * 2, torch.ones(2, 3)), lambda model, pair, x: model(x), ["0__0", "0__1", "x"]),
        ({"types": torch.ones(2, 3), "ids": torch.ones(2, 3)}, None, ["types", "ids"]),
    ],
)
def test_inputs_are_called_by_the_arguments_that_they_are(batch, call, names):
    assert Flat(Workload(Typed(), [batch], call=call), Recipe()).names == names
