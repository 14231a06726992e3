"""A child answers, fails in one line, has deadlines, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from fettle.errors import UsageError
from fettle.procs.child import Child, ChildError, Request
from fettle.procs.forks import ForkServer, Imports
from fettle.procs.parent import failure_of
from fettle.procs.process import Fork, Process
from fettle.procs.ranks import Ranks

MODULE = """
    import os, subprocess, sys, threading, time
    from fettle.errors import UsageError
    from fettle.procs.child import Request
    from fettle.procs.parent import Parent, be_a_worker

    class Do(Request):
        what: str

    def main(parent):
        def answer(request):
            if request.what == "raise":
                raise ValueError("too few channels\\nand more")
            if request.what == "usage":
                raise UsageError("give another")
            if request.what == "memory":
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            if request.what == "exit":
                print("its last words", flush=True)
                os._exit(3)
            if request.what == "child":
                sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
                return subprocess.Popen(sleep, start_new_session=True).pid
            if request.what == "forks":
                pids, (begun, begins) = [], os.pipe()
                def fork():
                    pids.append(os.fork())
                    if not pids[-1]:
                        os.write(begins, b".")
                        time.sleep(300)
                        os._exit(0)
                    os.read(begun, 1)
                fork()
                thread = threading.Thread(target=fork)
                thread.start()
                thread.join()
                return pids
            if request.what == "leave":
                print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], close_fds=False).pid)
                os._exit(4)
            if request.what == "hang":
                parent.stage("a long sleep")
                time.sleep(300)
            return [request.what, int(os.environ.get("RANK", "0"))]
        parent.serve(Do, answer)

    if __name__ == "__main__":
        be_a_worker()
        main(Parent())
"""


class Do(Request):
    what: str


@pytest.fixture
def variables(tmp_path):
    (tmp_path / "answering.py").write_text(textwrap.dedent(MODULE))
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}


@pytest.fixture(params=["by itself", "forked"])
def child(variables, request):
    forks = ForkServer([], variables, Imports(("json",))) if request.param == "forked" else None
    try:
        with Child("answering", variables=variables, forks=forks) as child:
            assert isinstance(child._process, Fork) == (request.param == "forked")
            yield child
    finally:
        if forks is not None:
            forks.close()


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def by_then(condition, seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_it_answers_in_types_and_goes_on_after_an_error(child):
    assert child.call(Do("this"), tuple[str, int], 60) == ("this", 0)
    for what, kind, reason in [
        ("raise", "error", "ValueError: too few channels"),
        ("memory", "memory", "out of memory: RuntimeError: DefaultCPUAllocator: can't allocate memory"),
    ]:
        with pytest.raises(ChildError) as caught:
            child.call(Do(what), object, 60)
        assert (caught.value.kind, str(caught.value)) == (kind, reason)
    with pytest.raises(UsageError, match="give another"):
        child.call(Do("usage"), object, 60)
    assert child.call(Do("that"), tuple[str, int], 60) == ("that", 0)


def test_a_program_whose_standard_streams_are_closed_has_children(variables):
    code = """
import os
os.closerange(0, 3)
from fettle.procs.child import Child, Request
class Do(Request):
    what: str
with Child("answering") as child:
    os._exit(child.call(Do("this"), tuple[str, int], 60) != ("this", 0))
"""
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, **variables}).returncode == 0


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried to allocate", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"])
def test_a_device_that_is_full_is_a_failure_of_memory(text):
    assert failure_of(RuntimeError(text)).kind == "memory"


def test_what_came_while_this_process_was_stopped_is_heard_after_the_deadline(child):
    assert child.call(Do("this"), tuple[str, int], 60) == ("this", 0)
    child.send(Do("that"))
    assert by_then(lambda: child.link.poll(0))
    assert child.receive(tuple[str, int], -1.0) == ("that", 0)


def test_its_last_words_are_in_the_error(child):
    with pytest.raises(ChildError, match=r"^ended with exit code 3: its last words$") as caught:
        child.call(Do("exit"), object, 60)
    assert caught.value.kind == "crash"
    assert child.returncode == 3


def test_where_both_are_asked_to_end_the_child_has_not_failed(child):
    def leave(number, frame):
        raise KeyboardInterrupt

    child.call(Do("this"), list, 60)  # it has started
    before = signal.signal(signal.SIGTERM, leave)
    both = f"sleep 0.3; kill -TERM {child.pid}; sleep 0.2; kill -TERM {os.getpid()}"
    others = subprocess.Popen(["sh", "-c", both])
    try:
        with pytest.raises(KeyboardInterrupt):
            child.call(Do("hang"), list, 60)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        others.wait()
        signal.signal(signal.SIGTERM, before)


def test_its_end_is_heard_while_what_it_has_started_lives_on(child):
    with pytest.raises(ChildError, match=r"^ended with exit code 4: \d+$") as caught:
        child.call(Do("leave"), object, 60)
    grandchild = int(str(caught.value).split()[-1])
    assert by_then(lambda: ended(grandchild))


def test_a_deadline_ends_it_and_says_where_it_was(child):
    child.call(Do("this"), list, 60)  # it has started
    child.send(Do("hang"))
    assert by_then(lambda: child.link.poll())
    with pytest.raises(ChildError, match=r"^timed out after 1 s in do: a long sleep$") as caught:
        child.receive(object, 1.0)
    assert caught.value.kind == "timeout"
    assert ended(child.pid)


def test_one_that_fills_what_is_granted_here_ends_as_out_of_memory(child, monkeypatch):
    child.call(Do("this"), list, 60)  # it has started
    monkeypatch.setattr("fettle.procs.child.granted_memory_bytes", lambda: 0)
    monkeypatch.setattr("fettle.procs.child.total_memory_bytes", lambda: 1 << 20)  # on a machine with room
    with pytest.raises(ChildError, match="out of memory: it held") as caught:
        child.call(Do("hang"), object, 60)
    assert caught.value.kind == "memory"


def test_the_whole_tree_is_killed(child):
    grandchild = child.call(Do("child"), int, 60)  # in a session of its own
    assert not ended(grandchild)
    child.close()
    child.close()
    assert by_then(lambda: ended(grandchild))
    assert child.returncode == -signal.SIGKILL


def test_a_paused_child_rests_and_goes_on_when_it_is_asked(child):
    child.call(Do("this"), list, 60)
    child.pause()
    assert by_then(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    assert child.call(Do("that"), list, 60) == ["that", 0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_what_was_forked_and_stopped_with_a_child_ends_with_it(child):
    fork, of_a_thread = child.call(Do("forks"), list[int], 60)
    child.pause()
    assert by_then(lambda: psutil.Process(fork).status() == psutil.STATUS_STOPPED)
    os.kill(child.pid, signal.SIGKILL)
    assert by_then(lambda: ended(fork))
    assert not ended(of_a_thread)  # nor did it end with its thread


def test_it_ends_with_the_link(child):
    child.call(Do("this"), list, 60)
    child.link.close()
    assert child.wait(60) == 0


def test_ranks_are_asked_as_one(variables):
    with Ranks("answering", 2, variables=variables) as ranks:
        ranks.send(Do("this"))
        assert ranks.gather(tuple[str, int], 120) == [("this", 0), ("this", 1)]
        tree = [process.pid for process in ranks.tree()]
        with pytest.raises(ChildError, match=r"rank \d: ValueError: too few channels"):
            ranks.call(Do("raise"), object, 120)  # after which they may end
    assert len(tree) == 3
    assert all(by_then(lambda pid=pid: ended(pid)) for pid in tree)


def test_what_a_process_printed_is_kept(tmp_path):
    log = tmp_path / "log"
    for number in range(2):
        with Process(["-c", f"print('run {number}')"], log=log) as process:
            assert process.wait(60) == 0
            assert process.last_words() == f"run {number}"
    with Process(["-c", ""], log=log) as process:
        assert process.wait(60) == 0
        assert process.last_words() == ""  # the others' are not its own
    assert log.read_text() == "run 0\nrun 1\n"
    with Process(["-c", "import time; time.sleep(300)"]) as process:
        assert process.wait(0.01) is None
        assert process.last_words() == ""
    assert process.returncode == -signal.SIGKILL
