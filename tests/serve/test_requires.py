"""What a package needs is said before anything starts, in one line."""

import json
import shutil
from importlib import metadata

import msgspec
import pytest

from fettle.errors import UsageError
from fettle.package.manifest import open_package, seal
from fettle.package.requires import check_here, needed
from fettle.serve.engine.registry import Options
from tests.serve.test_server import TOKEN, manage
from tests.serving import running


def asking_for(store, folder, **requires):
    """A package that needs these."""
    shutil.copytree(store / "net-1", folder)
    manifest = open_package(folder).manifest
    seal(folder, msgspec.structs.replace(manifest, requires=requires))
    return folder


def test_what_a_package_needs_is_what_wrote_its_files_and_what_its_handler_imports(store):
    major, minor = metadata.version("torch").split(".")[:2]
    assert open_package(store / "net-1").manifest.requires == {"torch": f">={major}.{minor}"}
    assert needed("torch", "image", ["numpy>=1", "scipy"]).keys() == {"torch", "pillow", "numpy", "scipy"}
    assert needed("onnxruntime", "text").keys() == {"torch", "onnxruntime", "onnx", "onnxscript", "tokenizers"}
    assert needed("openvino-int8", "").keys() == {"torch", "openvino"}
    check_here("net", needed("torch", "image", ["numpy>=1", "scipy"]))
    odd = ("a b", "--index-url=x", "numpy @ https://a.b/c.whl", "", "numpy>=one", "../numpy", "numpy-", "numpy.")
    for wrong in odd:
        with pytest.raises(UsageError, match="not a requirement"):
            needed("torch", "", [wrong])


def test_versions_are_compared_as_versions():
    here = metadata.version("numpy")
    for fine in ("", ">=1", ">=1.9,<1000", f"=={here}", "1.0.0"):
        check_here("net", {"numpy": fine})
    for wrong in (">=1000", "<1", "1000.0"):
        with pytest.raises(UsageError, match="package the model again"):
            check_here("net", {"numpy": wrong})
    with pytest.raises(UsageError, match="pip install 'no-such-library>=2'"):
        check_here("net", {"no-such-library": ">=2"})


def test_a_server_starts_nothing_that_cannot_run(store, tmp_path, monkeypatch):
    monkeypatch.setattr("fettle.serve.engine.worker.spawn", lambda *given: pytest.fail("a process was started"))
    newer = asking_for(store, tmp_path / "newer", torch=">=1000")
    with pytest.raises(UsageError, match=r"net needs torch>=1000, and .* is installed"), running([open_package(newer)]):
        pass
    asking_for(store, tmp_path / "store" / "net", **{"no-such-library": ""})
    options = Options(store=tmp_path / "store")
    with running([], options, management_port=0, management_token=TOKEN) as server:
        server.admin = f"http://127.0.0.1:{server.ports[1]}"
        status, answer, _ = manage(server, "/v2/repository/models/net/load", b"", "POST")
    assert (status, "no-such-library" in json.dumps(answer)) == (400, True)
    with pytest.raises(UsageError, match="not a requirement"):
        open_package(asking_for(store, tmp_path / "odd", **{"a\nb": ">=2"}))


@pytest.mark.parametrize("command", [("serve", "run"), ("serve", "slo", "--p99", "50ms")])
def test_the_commands_say_it_in_one_line(store, tmp_path, monkeypatch, run_fettle, command):
    monkeypatch.chdir(tmp_path)
    group, name, *options = command
    done = run_fettle(group, name, asking_for(store, tmp_path / "net", torch=">=1000"), *options)
    assert (done.code, len(done.err.splitlines()), "torch>=1000" in done.err) == (2, 1, True)
