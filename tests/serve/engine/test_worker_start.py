"""A worker that is started ahead of everything: taken once, by whoever it fits, or ended."""

import ast
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil

import fettle
from fettle.package import host
from fettle.package.manifest import open_package
from fettle.package.settings import ServeSettings
from fettle.serve.engine.registry import Options
from fettle.serve.engine.worker_start import _environment, likely_threads, spawn, threads_each
from tests.serve.test_server import infer
from tests.serving import running


def test_the_first_worker_takes_the_spare_process(store):
    spare = spawn(1)
    pid = spare.process.pid
    with running([open_package(store / "net-1")], Options(spare=spare)) as server:
        assert [worker.pid for worker in server.registry.choose("net").workers] == [pid]
        assert infer(server, [[1, 2, 3, 4]])[0] == 200
    spare.end()


def test_one_that_does_not_fit_is_left_and_ended(store):
    spare = spawn(3)
    process = spare.process
    with running([open_package(store / "net-1")], Options(spare=spare)) as server:
        assert server.registry.choose("net").workers[0].pid != process.pid
    spare.end()
    spare.end()
    assert process.returncode is not None


def test_the_guess_is_what_the_package_will_ask_for(tmp_path, store):
    for threads, workers in ((0, 1), (2, 1), (0, 2)):
        settings = ServeSettings(max_rows=8, threads=threads, workers=workers)
        (tmp_path / "serve.toml").write_text(f"threads = {threads}\nworkers = {workers}\n")
        assert likely_threads(tmp_path, None, None) == threads_each(settings.threads, settings.workers)
    assert likely_threads(tmp_path, 5, None) == 5
    for wrong in ("threads = 'many'\nworkers = -1\n", "threads = inf\n", "threads = 1000000000\n", "["):
        (tmp_path / "serve.toml").write_text(wrong)
        assert 1 <= likely_threads(tmp_path, None, None) <= 1024


def test_a_worker_inherits_how_memory_and_kernels_are_set(monkeypatch):
    names = ("MALLOC_CONF", "PYTORCH_ALLOC_CONF", "ONEDNN_MAX_CPU_ISA", "LD_PRELOAD", "HIP_VISIBLE_DEVICES")
    for name in names:
        monkeypatch.setenv(name, "a")
    assert dict.fromkeys(names, "a").items() <= _environment(1).items()


def test_a_worker_does_not_inherit_what_is_secret(store, monkeypatch):
    for name in ("DATABASE_PASSWORD", "FETTLE_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret" * 8)
    with running([open_package(store / "net-1")], workers_begin=nullcontext) as server:  # not as forks
        seen = psutil.Process(server.registry.choose("net").workers[0].pid).environ()
    assert "PATH" in seen
    assert not [name for name, value in seen.items() if "secret" in value]


def test_a_worker_imports_nothing_from_the_folder_that_it_is_started_in(tmp_path):
    """A package that was unpacked there may have the name of a module, and files that its manifest does not name."""
    (tmp_path / "planted.py").touch()
    assert subprocess.run([sys.executable, "-m", "planted"], cwd=tmp_path, env=_environment(1)).returncode == 1


def test_nothing_that_serves_unpickles():
    """Neither between the processes nor out of a package: no pickle module, and torch.load of tensors alone."""
    rooms = [Path(fettle.__file__).parent / room for room in ("serve", "package", "load", "slo", "compat")]
    files = [file for room in rooms for file in room.rglob("*.py")]
    assert len(files) > 70
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            names.append(getattr(node, "module", None) or "")
            roots = {name.split(".")[0] for name in names}
            assert not roots & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}, path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords), path


def test_a_containers_quota_bounds_the_threads(monkeypatch):
    monkeypatch.setattr(host, "granted_cores", lambda: (2, "the control group"))
    assert [threads_each(0, workers) for workers in (1, 2, 3)] == [2, 1, 1]
