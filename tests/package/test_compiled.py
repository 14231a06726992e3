"""What was compiled ahead of time: made once, loaded the next time, made again where it does not fit."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fettle.package import compiled
from fettle.package.export import write_package
from fettle.package.model_runner import load_model
from fettle.recipe import Recipe
from fettle.workload import Workload
from tests.forking import forked

RECIPE = Recipe.parse("compile=default freeze=on grad=inference_mode precision=bf16")


class Scores(torch.nn.Module):
    """Two inputs whose rows and lengths move, up to sixteen places, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.places = torch.nn.Linear(8, 4), torch.nn.Parameter(torch.randn(16, 8))

    def forward(self, x, mask):
        scores = self.layer(x + self.places[: x.shape[1]]).relu() * mask[..., None]
        return {"scores": scores, "sum": scores.sum(1)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A package, and the folder its library was kept in when it was judged."""
    torch.manual_seed(0)
    batches = [{"x": torch.randn(3, n, 8), "mask": torch.ones(3, n)} for n in (5, 7)]
    with forked(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("FETTLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        model = Scores().eval()
        yield model, write_package(Workload(model, batches), RECIPE, tmp_path_factory.mktemp("scores") / "p", name="p")


def said(caplog, package):
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="fettle.package.compiled"):
        run, _ = load_model(package)
    return run, caplog.text


def test_one_library_answers_any_number_of_rows_and_any_length(written, caplog):
    model, package = written
    run, text = said(caplog, package)
    assert "compiled before: loaded" in text
    for rows, length in ((1, 5), (2, 7), (6, 3), (3, 1), (2, 16)):
        x, mask = torch.randn(rows, length, 8), torch.ones(rows, length)
        with torch.inference_mode():
            scores, total = run(x, mask)
            wanted = model(x, mask)
        assert (scores - wanted["scores"]).norm() <= 0.02 * wanted["scores"].norm()
        assert (total - wanted["sum"]).norm() <= 0.02 * wanted["sum"].norm()


def test_inputs_may_lie_in_memory_as_they_like_and_are_no_larger_than_the_model_takes(written, caplog):
    model, package = written
    run, _ = said(caplog, package)
    x, mask = torch.randn(8, 5, 3).permute(2, 1, 0), torch.ones(1, 5).expand(3, 5)
    with torch.inference_mode():
        wanted = model(x, mask)["scores"]
        assert (run(x, mask)[0] - wanted).norm() <= 0.02 * wanted.norm()
        with pytest.raises(RuntimeError, match=r"unmatched dim value|API call failed"):  # torch 2.11 prints the reason
            run(torch.randn(3, 5, 9), mask)
        with pytest.raises(RuntimeError, match=r"16|API call failed"):  # the model has no more places
            run(torch.randn(3, 17, 8), torch.ones(3, 17))


def test_a_process_that_loads_it_imports_no_compiler(written):
    _, package = written
    code = (
        "import sys, torch; from pathlib import Path; from fettle.package.manifest import open_package\n"
        "from fettle.package.model_runner import ModelRunner\n"
        f"runner = ModelRunner(open_package(Path({str(package.folder)!r})))\n"
        "print(len(runner.run([runner.sample(2)], 2)[0]), 'torch._dynamo' in sys.modules)"
    )
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "2 False\n", done.stderr


@pytest.mark.parametrize("change", ["bytes", "digest", "both"])
def test_a_library_that_was_changed_is_never_loaded(written, change, caplog, monkeypatch):
    _, package = written
    (library,) = compiled.cache_folder("compiled").glob("*/model.pt2")
    digest, made = library.with_name("sums.json"), []
    before = library.read_bytes(), digest.read_text()
    if change in ("bytes", "both"):
        library.write_bytes(b"PK" + before[0][2:-100] + b"x" * 100)
    if change in ("digest", "both"):
        digest.write_text(digest.read_text().replace(digest.read_text()[20:30], "0" * 10))
    monkeypatch.setattr(compiled, "_compile", lambda *arguments: made.append(1) or arguments[-1].write_bytes(before[0]))
    try:
        _, text = said(caplog, package)
    finally:
        library.write_bytes(before[0])
        digest.write_text(before[1])
    assert made
    assert "kept for the next start" in text


def test_where_it_cannot_be_compiled_the_first_call_does_it(written, caplog, monkeypatch, tmp_path):
    _, package = written
    monkeypatch.setenv("FETTLE_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")

    def fails(*arguments):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled, "_compile", fails)
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    _, text = said(caplog, package)
    assert "not compiled ahead of time: RuntimeError: no compiler here" in text


def test_one_that_ends_the_process_that_loads_it_is_told(tmp_path):
    (tmp_path / "model.pt2").write_bytes(b"none")
    with pytest.raises(RuntimeError, match=r"a process that loads it ended with exit code 1: \w+"):
        compiled._try_to_load(tmp_path / "model.pt2", 0)


def test_a_library_is_loaded_on_the_gpu_that_its_inputs_lie_on(monkeypatch):
    asked = []
    loader = SimpleNamespace(AOTIModelPackageLoader=lambda *how: asked.append(how) or SimpleNamespace(run=None))
    monkeypatch.setattr(torch._C, "_aoti", loader)
    for place in ("cuda:1", "cpu"):
        compiled._load(Path("model.pt2"), [SimpleNamespace(device=torch.device(place))])
    assert asked == [("model.pt2", "model", True, 1, 1), ("model.pt2", "model", False, 1, -1)]


def test_a_library_that_answers_otherwise_is_not_kept(written, caplog, monkeypatch, tmp_path):
    _, package = written
    (library,) = compiled.cache_folder("compiled").glob("*/model.pt2")
    other = library.read_bytes()
    monkeypatch.setenv("FETTLE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "_compile", lambda *arguments: arguments[-1].write_bytes(other))
    monkeypatch.setattr(compiled._Tuned, "forward", lambda self, *tensors: [3 * out for out in self.run(*tensors)])
    _, text = said(caplog, package)
    assert "not compiled ahead of time: ValueError: compiled ahead of time, its answers are off by 0.67" in text
    assert not list(tmp_path.rglob("*.pt2"))


@pytest.mark.parametrize(
    ("recipe", "answer"),
    [
        ("compile=default", True), ("runtime=aoti", True), ("compile=default shapes=static", False),
        ("compile=default quantize=int8-static", False),
        ("compile=max-autotune", False), ("precision=bf16", False), ("runtime=openvino", False),
        ("runtime=onnxruntime", True),
    ],
)  # fmt: skip
def test_which_recipes_one_library_can_stand_for(recipe, answer):
    assert compiled.wanted(Recipe.parse(recipe)) is answer


def test_a_graph_of_onnx_runtime_is_kept_as_it_has_optimised_it(written, caplog, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setenv("FETTLE_CACHE", str(tmp_path / "cache"))
    model, _ = written
    batches = [{"x": torch.randn(3, n, 8), "mask": torch.ones(3, n)} for n in (5, 7)]
    with caplog.at_level(logging.INFO, logger="fettle.package.compiled"):
        package = write_package(Workload(model, batches), Recipe.parse("runtime=onnxruntime"), tmp_path / "p", name="p")
    assert "kept for the next start" in caplog.text
    monkeypatch.setattr(compiled, "_compile", lambda *arguments: pytest.fail("it was compiled before"))
    run, text = said(caplog, package)
    assert "compiled before: loaded" in text
    for rows, length in ((1, 5), (6, 3)):
        x, mask = torch.randn(rows, length, 8), torch.ones(rows, length)
        with torch.inference_mode():
            for answer, right in zip(run(x, mask), model(x, mask).values(), strict=True):
                torch.testing.assert_close(answer, right)
    (kept,) = (tmp_path / "cache").rglob("*.onnx")
    sound, made = kept.read_bytes(), []
    monkeypatch.setattr(compiled, "_compile", lambda *arguments: made.append(arguments[-1].name))
    kept.write_bytes(sound[:-1] + b"x")
    said(caplog, package)
    kept.write_bytes(sound)
    monkeypatch.setattr(compiled, "installed", lambda names: dict.fromkeys(names, "another"))
    said(caplog, package)
    assert made == ["model.onnx", "model.onnx"]
