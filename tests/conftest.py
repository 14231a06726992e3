"""What one test sets for the whole process, the next must not find. Tests run two at a time, see the Makefile."""

import contextlib
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import pytest

from tests.forking import LITTLE, forked

# Threads that wait by spinning would take the core from the other half of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What compiles would start a process that imports torch, for kernels of a GPU.
os.environ.setdefault("TORCH_WARM_POOL", "0")
# What one child has compiled of fettle's own files the next need not.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What is printed depends on none of what a terminal or a build server says of itself.
os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"
os.environ["COLUMNS"] = "80"
os.environ.pop("FORCE_COLOR", None)
os.environ.pop("TTY_COMPATIBLE", None)
os.environ.pop("TERMINAL_WIDTH", None)

# What one run of the tests compiled or read, the next must not find.
_CACHE = tempfile.TemporaryDirectory(prefix="fettle-cache-")
os.environ["FETTLE_CACHE"] = _CACHE.name

# The same examples in every run: what a random one finds should not stop somebody else's change. `make test-all` draws
# new ones (HYPOTHESIS_PROFILE=default); what they find becomes a test of its own.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def examples(most: int) -> int:
    """How many examples of what takes long: half of them where each run has the same."""
    return most if os.environ.get("HYPOTHESIS_PROFILE") == "default" else most // 2


_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
"""How each is read and written, and what it was before any test: a fixture of a module may change it before that
module's first test begins."""


def _all_settings() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    import torch._dynamo

    return [
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (
            lambda: torch.backends.mkldnn.conv.fp32_precision,
            lambda x: setattr(torch.backends.mkldnn.conv, "fp32_precision", x),
        ),
        (lambda: torch.backends.mkldnn.enabled, lambda x: setattr(torch.backends.mkldnn, "enabled", x)),
        (lambda: torch.backends.cudnn.benchmark, lambda x: setattr(torch.backends.cudnn, "benchmark", x)),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (lambda: torch._dynamo.config.recompile_limit, lambda x: setattr(torch._dynamo.config, "recompile_limit", x)),
    ]


def _restore() -> None:
    for read, write, first in _SETTINGS:
        if read() != first:
            write(first)


@pytest.fixture(autouse=True)
def _settings_stay():
    _restore()
    yield
    _restore()


_LONG = (
    "tuning/test_tuning.py", "techniques/test_contract.py", "diagnose/test_diagnose.py", "serve/test_server.py",
    "measure/test_race.py", "slo/test_search.py", "train/test_tune_training.py", "inputs/test_faults.py",
    "serve/engine/test_scale.py", "workloads/test_workloads.py", "package/test_cache.py", "tuning/test_face.py",
    "test_docs.py", "train/test_training_techniques.py", "measure/test_ranks.py",
)  # fmt: skip


def never_wait() -> None:
    """Two tests run at a time, so the machine is never quiet: none waits for it (that is for
    tests/measure/test_rounds.py)."""
    from fettle import comparing
    from fettle.gate import racing
    from fettle.measure import _watch
    from fettle.tuning import session

    session.WAITING = session._UNLIMITED_WAIT_S = comparing._WAIT_S = racing._WAIT_S = _watch.WAIT_S = 0.0


def pytest_configure(config):
    # What a shell ignores for what runs behind it, or under nohup, the tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if not config.getoption("numprocesses", None):  # the process that only hands out tests imports no torch
        from altair.utils import schemapi

        from fettle import machine

        never_wait()
        schemapi.disable_debug_mode()  # a chart is checked as a whole, and not each of its parts as well
        machine._OTHER_SIZES = LITTLE
        _SETTINGS.extend((read, write, read()) for read, write in _all_settings())


def pytest_collection_modifyitems(items):
    """Files that take minutes begin first: one that begins last would keep one core, and leave the other idle."""
    items.sort(
        key=lambda item: next((n for n, name in enumerate(_LONG) if item.nodeid.startswith(f"tests/{name}")), 99)
    )


@pytest.fixture
def forks() -> Iterator[None]:
    """Children begin as forks of a process that has imported torch."""
    with forked():
        yield


def pytest_collection_finish():
    """What collecting has made stays to the end: looking at it again took every collection of garbage half a second."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def quick_studies(**changes: Any) -> Iterator[None]:
    """Studies of few rounds and processes, with other changes of their options; how certain a verdict is, is for the
    tests of the race."""
    import fettle
    from fettle.tuning import Effort

    effort = Effort(slice_s=0.02, rounds=4, replicates=1)
    with pytest.MonkeyPatch.context() as patch:
        real = fettle.tune.__globals__["options_of"]
        changed = lambda *given: replace(real(*given), effort=effort, **changes)  # noqa: E731
        patch.setitem(fettle.tune.__globals__, "options_of", changed)
        yield


@contextlib.contextmanager
def quick_comparisons() -> Iterator[None]:
    """Races of named recipes by one process each and few rounds, whatever the call asks for."""
    from fettle import comparing
    from fettle.tuning import Effort

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "REPLICATES", 1)
        patch.setattr(comparing, "MOST_REPLICATES", 1)
        patch.setattr(comparing, "Effort", lambda *asked, **named: Effort(slice_s=0.02, rounds=3, replicates=1))
        yield


@dataclass
class Said:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str


Run = Callable[..., Said]


@pytest.fixture
def run_fettle(monkeypatch, capsys) -> Run:
    """The command line in this process: starting Python and torch anew takes longer than most commands."""
    from fettle.cli import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fettle", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main()
        said = capsys.readouterr()
        return Said(leaving.value.code or 0, said.out, said.err)

    return run
