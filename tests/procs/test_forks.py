"""What a fork server imports, when there are forks, and what is left of them."""

import os
import sys
import textwrap
import time

import msgspec
import psutil
import pytest

from fettle.procs.child import Child, ChildError, Request, environment_of
from fettle.procs.forks import ForkServer, Imports, Spared, imports
from fettle.procs.process import Fork
from tests.procs.test_child import by_then, ended

ASKED = """
    import os, random, sys
    from fettle.procs.child import Request

    class Do(Request):
        what: str

    def main(parent):
        def answer(request):
            return eval(request.what, {**globals(), "parent": parent})
        parent.serve(Do, answer)

    if __name__ == "__main__":
        from fettle.procs.parent import Parent, be_a_worker
        be_a_worker()
        main(Parent())
"""
SLOW = """
    import time
    time.sleep(0.3)
"""
SETS = """
    import os
    os.environ["SET_BY_A_MODULE"] = "1"
"""
ONCE = """
    import time
    time.sleep(0.4)
    ONCE_S = 0.4
"""
STARTS = """
    import subprocess, sys
    ended = subprocess.run([sys.executable, "-c", "raise SystemExit(7)"]).returncode
"""
THREADS = """
    import threading, time
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


class Do(Request):
    what: str


@pytest.fixture
def variables(tmp_path):
    modules = {"asked": ASKED, "slow_to_import": SLOW, "starts_a_thread": THREADS, "sets": SETS, "once": ONCE,
               "starts_a_process": STARTS}  # fmt: skip
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}


@pytest.fixture
def forks(variables):
    server = ForkServer(["asked"], variables, Imports(("json",)))
    yield server
    server.close()


def asked(child: Child, what: str):
    return msgspec.msgpack.decode(child.call(Do(what), msgspec.Raw, 30))


def test_a_fork_has_imported_what_it_was_told_to_and_says_how_long_that_took(forks, variables):
    forks.imports = Imports(
        (
            "asked",
            "no_such_module",
            "slow_to_import",
        )
    )
    with Child("asked", variables=variables, forks=forks) as child:
        assert isinstance(child._process, Fork)
        assert asked(child, "'slow_to_import' in sys.modules")
        assert asked(child, "parent.imported_s") >= 0.3
        assert asked(child, "os.getpgid(0)") == child.pid == asked(child, "os.getpid()")


def test_each_draws_numbers_of_its_own(forks, variables):
    forks.imports = Imports(
        (
            "random",
            "numpy",
        )
    )
    drawn = set()
    for _ in range(3):
        with Child("asked", variables=variables, forks=forks) as child:
            drawn.add(asked(child, "[random.random(), __import__('numpy').random.rand()]")[0])
    assert len(drawn) == 3


def test_what_prints_goes_to_the_log_of_the_fork(forks, variables, tmp_path):
    with Child("asked", variables=variables, forks=forks, log=tmp_path / "one.log") as child:
        with Child("asked", variables=variables, forks=forks) as other:
            assert not asked(other, "print('of the other')")
        with pytest.raises(ChildError, match="ended with exit code 7: a last line"):
            asked(child, "[print('a last line'), os._exit(7)]")
    assert (tmp_path / "one.log").read_text() == "a last line\n"


def test_what_has_threads_is_not_forked(forks, variables):
    forks.imports = Imports(
        (
            "json",
            "starts_a_thread",
        )
    )
    with Child("asked", variables=variables, forks=forks) as child:
        assert not isinstance(child._process, Fork)
        assert asked(child, "6 * 7") == 42
    assert not forks.serves(environment_of(variables))


def test_another_environment_is_not_forked(forks, variables):
    with Child("asked", variables={**variables, "OMP_NUM_THREADS": "3"}, forks=forks) as child:
        assert not isinstance(child._process, Fork)
        assert asked(child, "os.environ['OMP_NUM_THREADS']") == "3"


@pytest.mark.parametrize("also", [{}, {"SET_BY_THE_USER": "1"}, {"DELETED": None}])
def test_what_was_imported_with_other_variables_is_not_forked(forks, variables, also):
    forks.imports = Imports(("sets",), {"SET_BY_A_MODULE": "1", **also})
    with Child("asked", variables=variables, forks=forks) as child:
        assert isinstance(child._process, Fork) == (not also)
        assert asked(child, "6 * 7") == 42


def test_before_a_fork_is_asked_for_there_is_no_server(forks, variables):
    assert forks._child is None
    assert forks.serves(environment_of(variables))
    assert forks._child is not None


def test_what_a_later_import_spares_is_known_and_made_once(forks, variables):
    with Child("asked", variables=variables, forks=forks) as before:
        spared = forks.spare(["slow_to_import"])
        assert spared.seconds >= 0.3
        assert forks.spare(["slow_to_import"]) == spared
        assert forks.spare([]) == Spared()
        with Child("asked", variables=variables, forks=forks) as child:
            assert asked(child, "'slow_to_import' in sys.modules")
            assert asked(child, "parent.imported_s") < 0.3  # it is not the workload's
        assert not asked(before, "'slow_to_import' in sys.modules")


def test_what_an_import_did_for_all_later_processes_is_not_counted(forks):
    assert 0 <= forks.spare(["once"]).seconds < 0.3


def test_what_an_import_starts_ends_as_it_does_elsewhere(forks, variables):
    forks.spare(["starts_a_process"])
    with Child("asked", variables=variables, forks=forks) as child:
        assert asked(child, "sys.modules['starts_a_process'].ended") == 7


def test_children_of_another_environment_have_a_server_beside(forks, variables):
    assert forks.beside({}) is forks
    others = forks.beside({"OMP_NUM_THREADS": "1"})
    assert others is forks.beside({"OMP_NUM_THREADS": "1"}) is not forks
    alone = {**variables, "OMP_NUM_THREADS": "1"}
    with Child("asked", variables=alone, forks=others) as child:
        assert isinstance(child._process, Fork)
        assert asked(child, "os.environ['OMP_NUM_THREADS']") == "1"
        assert asked(child, "'json' in sys.modules")
        server = others._child.pid
        forks.close()
        by_then(lambda: ended(server) and ended(child.pid))


def test_of_too_many_environments_the_last_have_none(forks, variables):
    servers = [forks.beside({"OMP_NUM_THREADS": str(count)}) for count in range(1, 6)]
    assert servers[-1] is forks
    assert forks not in servers[:-1]
    assert not forks.serves(environment_of({**variables, "OMP_NUM_THREADS": "5"}))


def test_after_an_import_that_starts_threads_there_are_no_more_forks(forks, variables):
    with Child("asked", variables=variables, forks=forks) as before:
        forks.spare(["starts_a_thread"])
        with Child("asked", variables=variables, forks=forks) as child:
            assert not isinstance(child._process, Fork)
        assert asked(before, "6 * 7") == 42


def test_a_server_imports_while_others_work(forks, variables):
    forks.begin()
    assert forks._child is not None
    with Child("asked", variables=variables, forks=forks) as child:
        assert isinstance(child._process, Fork)


def test_a_server_that_was_killed_is_no_loss(forks, variables):
    with Child("asked", variables=variables, forks=forks) as child:
        server = psutil.Process(forks._child.pid)
        server.kill()
        with pytest.raises(ChildError, match="killed by SIGKILL"):
            asked(child, "__import__('time').sleep(60)")
    with Child("asked", variables=variables, forks=forks) as child:
        assert not isinstance(child._process, Fork)
        assert asked(child, "6 * 7") == 42


def test_forks_end_with_their_server_and_both_with_us(forks, variables):
    with Child("asked", variables=variables, forks=forks) as child:
        pids = [child.pid, forks._child.pid]
        forks.close()
        assert by_then(lambda: all(map(ended, pids)))


def test_a_closed_server_is_started_again_when_it_is_needed(forks, variables):
    for _ in range(2):
        with Child("asked", variables=variables, forks=forks) as child:
            assert isinstance(child._process, Fork)
        forks.close()


def test_a_paused_fork_rests(forks, variables):
    with Child("asked", variables=variables, forks=forks) as child:
        child.pause()
        assert by_then(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
        child.resume()
        assert asked(child, "6 * 7") == 42
        began = time.monotonic()
        assert child.wait(0.05) is None
        assert time.monotonic() - began >= 0.05


def test_what_the_user_works_on_is_not_imported_in_advance(tmp_path, monkeypatch):
    (tmp_path / "a_model_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("a_model_of_mine")
    names = imports({}).modules
    assert {"torch", "msgspec", "json", "fettle.procs.forks"} <= set(names)
    assert not {"a_model_of_mine", "__main__", __name__} & set(names)
    assert names.index("fettle") < names.index("fettle.procs.forks")
