"""The doctor on a real disk and in a real process: nothing that is looked at is imported, whatever it is."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from rich.console import Console
from torch import nn

from fettle.cli import doctor
from fettle.cli._show import after_spoilers
from fettle.doctor import (
    Advisories,
    Environment,
    Files,
    Finding,
    Program,
    allocator,
    program,
    spoilers,
    this_environment,
    this_program,
)
from fettle.doctor.advisories import read_advisories, shipped_advisories
from fettle.errors import UsageError
from tests.doctor.planted import HEALTHY, Planted

SUSPECTS = {"lightning": "2.6.3", "litellm": "1.82.8", "ultralytics": "8.3.41", "torchtriton": "3.0.0"}


def _install(folder: Path, name: str, version: str) -> None:
    """A package that shouts when it is imported."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{name}/__init__.py,sha256=AAAA,3\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {name}:load\n[console_scripts]\nx = {name}:x\n")


HOOK = """
import sys
import fettle.doctor
del fettle.doctor.CHECKS["changed-files"]  # reads every file of this environment, which takes seconds
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"lightning", "litellm", "ultralytics", "torchtriton", "triton", "torch"}:
            print("IMPORTED", name)
sys.meta_path.insert(0, Hook())
sys.argv = ["fettle", "doctor", sys.argv[1], "--json"]
from fettle.cli import main
main()
"""


def test_compromised_releases_are_found_and_never_imported(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for name, version in SUSPECTS.items():
        _install(site, name, version)
    (tmp_path / "work.py").write_text("import lightning\ndef workload(): return 1\n")
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", HOOK, str(tmp_path / "work.py")], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert "IMPORTED" not in done.stdout
    assert done.returncode == 1
    assert "was imported" not in done.stderr
    said = [finding["seen"] for finding in json.loads(done.stdout)["findings"] if finding["level"] == "error"]
    assert all(any(f"{name} {version}" in line for line in said) for name, version in SUSPECTS.items())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "does not say when"),
        ("format = 2\nchecked = 2026-01-01", "Invalid enum value 2"),
        ("checked = 2026-01-01\nmore = 1", "unknown field `more`"),
        ("checked = [", "not a list of advisories"),
        ("a" + "=[" * 100_000, "not a list of advisories"),
        ("checked = 2026-01-01\nadvisory = [{package = 'x', versions = [], published = 2026-01-01, does = 'x', "
         "sources = ['x']}]", "Expected `array` of length >= 1"),
        ("checked = 2026-01-01\nadvisory = [{package = 'x', versions = ['1'], published = 2026-01-01, "
         "does = '\\u001b[2J', sources = ['x']}]".replace("'\\u001b[2J'", '"\\u001b[2J"'), "matching regex"),
        ("checked = 2026-01-01\n# " + "x" * (1 << 20), "too large: more than 1 MiB"),
    ],
)  # fmt: skip
def test_a_list_of_advisories_from_anywhere(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "advisories.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match="advisories") as caught:
        read_advisories(path)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_shipped_list_has_what_it_needs() -> None:
    known = {item.package: item for item in shipped_advisories().advisory}
    assert set(SUSPECTS) <= set(known)
    assert known["torchtriton"].markers[0].sha256.startswith("2385b294")
    assert all(source.startswith("https://") for item in known.values() for source in item.sources)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    def this_environment(known: Advisories) -> Environment:
        return replace(HEALTHY, variables=dict(HEALTHY.variables) | {"TORCH_COMPILE_DISABLE": "1"}, advisories=known)

    monkeypatch.setattr("fettle.cli.doctor.this_environment", this_environment)


def test_a_newer_list_is_used_and_its_age_said(tmp_path: Path, run_fettle, healthy: None) -> None:
    path = tmp_path / "newer.toml"
    path.write_text(
        'checked = 2026-05-30\n[[advisory]]\npackage = "torch"\nversions = ["2.13.0"]\npublished = 2026-05-29\n'
        'does = "is a test"\nsources = ["https://example.com"]\n'
    )
    said = run_fettle("doctor", "--advisories", str(path))
    assert said.code == 1
    assert "torch 2.13.0+cu130" in said.out
    assert "known up to 2026-05-30 (2 days ago)" in said.out
    assert run_fettle("doctor", "--advisories", str(path), "--ignore", "compromised-release").code == 0


def test_levels_decide_the_exit_code(run_fettle, healthy: None) -> None:
    for arguments, code in (([], 0), (["--fail-on", "warning"], 1), (["--fail-on", "never"], 0)):
        assert run_fettle("doctor", *arguments).code == code
    clean = run_fettle("doctor", "--fail-on", "note", "--ignore", "compiler-variables")
    assert (clean.code, len(clean.out.splitlines())) == (0, 1)
    assert clean.out.startswith("Nothing found: ")
    assert run_fettle("doctor", "--fail-on", "fatal").code == 2
    assert run_fettle("doctor", "--ignore", "nothing").code == 2
    found = json.loads(run_fettle("doctor", "--json").out)
    assert [item["check"] for item in found["findings"]] == ["compiler-variables"]
    assert found["advisories"]["age_days"] == 20


def test_a_terminal_obeys_no_name_of_a_file() -> None:
    out = io.StringIO()
    doctor._print(Console(file=out), [Finding("c", "error", "a\x1b[2Jb [bold]", "why", "less \x9b1m")])
    assert "error a\ufffd[2Jb [bold]" in out.getvalue()
    assert not {"\x1b", "\x9b"} & set(out.getvalue())


class Pictures(torch.utils.data.Dataset):
    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = str(folder), ["x"] * 100_000
        self.targets = [1] * 100_000  # one object, the interpreter's own

    def __getitem__(self, index: int) -> tuple[torch.Tensor, numpy.ndarray, int]:
        return torch.zeros(128), numpy.zeros(128, numpy.float32), 1

    def __len__(self) -> int:
        return 100_000


def test_what_a_program_has_set_and_built_is_seen(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 8)).double()
    small = nn.Linear(8, 8)
    with torch.no_grad():
        small.weight.fill_(1e-40)
    loader = torch.utils.data.DataLoader(Pictures(tmp_path), batch_size=4, num_workers=3)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        torch.use_deterministic_algorithms(True)
        seen = this_program({"model": model, "more": (small, loader), "scripted": torch.jit.script(small)})
    assert {"anomaly", "deterministic"} <= set(seen.switches)
    assert not seen.tf32_mixed
    assert "gloo" in (seen.backends or ())
    first, second, scripted = seen.models
    assert (first.dtypes, first.odd) == (("float64",), ("0 (7 x 8)",))
    assert second.tiny == pytest.approx(64 / 72)
    assert scripted.deprecated == ("ScriptModule",)
    (found,) = seen.loaders
    assert (found.workers, found.batch_bytes, found.lists) == (3, 4 * 1024, (("paths", 100_000),))
    assert found.folders == (str(tmp_path),)
    assert found.start_method == torch.multiprocessing.get_context().get_start_method()  # where nobody chose one


def test_weights_that_torchao_holds_in_8_bits_are_not_compared() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    (seen,) = this_program(model).models
    assert (seen.dtypes, seen.tiny) == (("float32",), 0.0)


def test_tf32_by_two_names_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, source = torch.backends.cuda.matmul, tmp_path / "train.py"
    monkeypatch.setattr(program, "_own_files", lambda: {str(source)})
    source.write_text("torch.backends.fp32_precision = 'tf32'\n")
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert not this_program().tf32_mixed
        source.write_text(source.read_text() + "torch.backends.cuda.matmul.allow_tf32 = True\n")
        assert this_program().tf32_mixed
    finally:
        matmul.fp32_precision = before
    assert not this_program().tf32_mixed


def test_the_real_files_cannot_be_made_to_wait_or_fail(tmp_path: Path) -> None:
    files = Files()
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path), "/no/such/file", "nul\0byte"):
        assert (files.text(path), files.sha256(path), files.size(path)) == ("", "", -1)
    (tmp_path / "a").write_bytes(b"abc")
    assert files.sha256(str(tmp_path / "a")).startswith("ba7816bf")
    assert files.can_write(str(tmp_path / "new" / "folder"))
    assert files.free_bytes(str(tmp_path / "new")) > 0


def test_a_folder_named_from_where_we_are_can_be_made_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of TORCHINDUCTOR_CACHE_DIR=cache/compiled."""
    monkeypatch.chdir(tmp_path)
    assert Files().can_write("cache/compiled")
    assert Files().free_bytes("cache/compiled") > 0


def test_a_folder_is_looked_for_where_its_links_lead(tmp_path: Path) -> None:
    (tmp_path / "nas").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "nas")
    mounts = f"/dev/sda / ext4 rw 0 0\nserver:/all {tmp_path}/nas nfs4 rw 0 0\n"
    here = replace(HEALTHY, files=Planted({"/proc/self/mounts": mounts}))
    assert here.mount(f"{tmp_path}/home/cache") == ("nfs4", "rw")


def test_the_quick_checks_read_variables_and_say_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spoilers(Environment()) == []
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    assert "TORCH_COMPILE_DISABLE=1 is set." in [finding.seen for finding in spoilers()]
    assert not any("TORCH_LOGS" in finding.seen for finding in spoilers())
    assert this_environment(quick=True).packages == ()
    assert this_environment(quick=True).program == Program()


def test_tune_says_what_would_spoil_its_figures_once_it_begins(run_fettle, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert len(run_fettle("tune", "absent.py").err.splitlines()) == 1  # that there is no such file
    shown: list[object] = []
    show = after_spoilers(shown.append)
    show("first")
    said = [line for line in capsys.readouterr().err.splitlines() if "TORCH_COMPILE_DISABLE" in line]
    assert len(said) == 1
    assert said[0].startswith("fettle: TORCH_COMPILE_DISABLE=1 is set. torch.compile does nothing")
    assert said[0].endswith("unset TORCH_COMPILE_DISABLE")
    show("second")
    assert capsys.readouterr().err == ""
    assert shown == ["first", "second"]


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:true", "expandable_segments:1", "expandable_segments:", "max_split_size_mb",
        "max_split_size_mb=64", "max_split_size_mb:19", "max_split_size_mb:x", "max_split_size_mb:64;backend:native",
        "max_non_split_rounding_mb:10", "large_segment_size_mb:2", "garbage_collection_threshold:0",
        "garbage_collection_threshold:1.0", "garbage_collection_threshold:x", "roundup_power2_divisions:3",
        "roundup_power2_divisions:0", "roundup_power2_divisions:[256:3]", "roundup_power2_divisions:[257:1]",
        "pinned_use_background_threads:yes", "pinned_max_cached_size_mb:x",
    ],
)  # fmt: skip
def test_torch_itself_refuses_what_the_allocator_check_calls_an_error(text: str) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        torch._C._accelerator_setAllocatorSettings(text)
    here = Environment({"PYTORCH_ALLOC_CONF": text})
    assert [finding.level for finding in allocator.allocator_settings(here)] == ["error"]


def test_a_lock_is_held_against_the_advisories(tmp_path: Path, run_fettle) -> None:
    """fettle's own pins are clean; a compromised one is found in any spelling; a file without pins is refused."""
    root = Path(__file__).parents[2]
    said = run_fettle("doctor", "--lock", root / "constraints.txt")
    assert (said.code, said.err) == (0, "")
    assert "none of them compromised" in said.out
    lock = tmp_path / "requirements.lock"
    spelt = ("litellm==1.82.8 --hash=sha256:00", "LiteLLM [proxy] == 1.82.8 ; python_version > '3'", "litellm===1.82.8")
    for line in spelt:
        lock.write_text(f"# litellm==1.82.8\n--index-url https://example.org/simple\ntorch==2.13.0+cpu\n{line}\n")
        said = run_fettle("doctor", "--lock", lock, "--json")
        found = json.loads(said.out)
        assert (said.code, found["pins"]) == (1, 2)
        assert f"litellm 1.82.8, pinned by {lock}, is compromised" in found["findings"][0]["seen"]
    lock.write_text("torch>=2\n# litellm==1.82.8\n")
    said = run_fettle("doctor", "--lock", lock)
    assert (said.code, said.out) == (2, "")
    assert "pins nothing" in said.err
