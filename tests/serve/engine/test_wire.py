"""What server and worker say to each other: the memory of arrays goes as it is."""

import asyncio
import socket

import numpy as np
import pytest

from fettle import loop
from fettle.serve.engine import wire, worker_main
from fettle.serve.engine.wire import flat
from fettle.serve.engine.worker_link import WorkerLink
from fettle.serve.engine.worker_start import Spawned

ARRAYS = {
    "contiguous": np.arange(6, dtype=np.float32).reshape(2, 3),
    "columns": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "every second": np.arange(8, dtype=np.int64)[::2],
    "one value": np.array(1.5),
    "nothing": np.zeros((0, 3), np.float32),
    "bools": np.array([True, False]),
    "halves": np.arange(3, dtype=np.float16),
    "little-endian": np.arange(3, dtype="<u2"),
    "read-only": np.frombuffer(b"\0\1\2\3", np.uint8),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_the_memory_of_an_array_goes_as_it_is(name):
    array = ARRAYS[name]
    view = flat(array)
    assert view.format == "B"
    assert bytes(view) == array.tobytes()
    assert len(view) == array.nbytes


def test_messages_that_come_together_are_read_together_and_taken_one_by_one():
    ours, theirs = socket.socketpair()
    bodies = [b"abc", b"", b"x" * 20_000, b"de"]
    with ours, theirs:
        ours.sendall(b"".join(b"".join(wire.frame(wire.Call(len(body), [], []), [body])) for body in bodies))
        for body in bodies:
            header, came = worker_main.receive(theirs)
            assert (header.id, bytes(came)) == (len(body), body)
            assert bool(worker_main.held) == (body in bodies[:2])  # one that is large is read to its end, not beyond


def test_what_is_no_message_ends_the_link():
    async def why():
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        lost = asyncio.get_running_loop().create_future()
        link = WorkerLink(lambda header, body: None, lost.set_result)
        with theirs:
            await link.start(Spawned(None, ours, None, 1))
            theirs.sendall(wire.PREFIX.pack(1, 0) + b"\xc1")
            return await asyncio.wait_for(lost, 60)

    assert loop.run(why()) == asyncio.run(why()) == "ended"
