"""The wheel and the source distribution hold what is needed: both are built from a copy of the sources, and the wheel
runs in an environment of its own, which borrows the dependencies of this one."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import fettle

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    for kind in ("wheel", "sdist"):
        code = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    return folder


def test_what_an_image_pins_installs_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    """All of it, by the real pip: needs a package index."""
    from fettle.container import write_image

    (wheel,) = built.glob("*.whl")
    (tmp_path / "recipe.toml").write_text('format = 1\n[levels]\ncompile = "default"\n')
    image = write_image(tmp_path / "recipe.toml", tmp_path / "image", wheel)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (
        *(f"pip install --quiet --no-cache-dir --require-hashes --no-deps -r {name}" for name in image.locks),
        "pip check", "fettle --version",
    ):  # fmt: skip
        program, *rest = command.split()
        done = subprocess.run([str(tmp_path / "fresh" / "bin" / program), *rest], cwd=tmp_path / "image",
                              env=environment, capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def _names(built: Path) -> tuple[set[str], set[str]]:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as packed, tarfile.open(sdist) as tar:
        inside = {name for name in packed.namelist() if name.startswith("fettle/")}
        source = {name.partition("/src/")[2] for name in tar.getnames() if "/src/fettle/" in name}
    return inside, source


def test_both_hold_every_file_of_the_package(built: Path) -> None:
    files = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "fettle").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside, source = _names(built)
    assert not files - inside
    assert not files - source


def test_the_wheel_runs_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
                               capture_output=True, text=True, check=True).stdout.strip())  # fmt: skip
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:  # what installing a pure wheel comes to
        packed.extractall(site)
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = "import fettle; print(fettle.__file__)"
    rooms = "import fettle.gate, fettle.report, fettle.trace, fettle.memory; print('imported')"
    checks = {where: str(site), rooms: "imported"}
    for code, says in checks.items():
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert says in done.stdout, done.stderr
    for arguments, says in ((["--version"], f"fettle {fettle.__version__}"), (["techniques"], "precision")):
        command = [python, "-m", "fettle", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0
        assert says in done.stdout
