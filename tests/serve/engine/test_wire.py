"""What server and worker say to each other: the memory of arrays goes as it is."""

import numpy as np
import pytest

from fettle.serve.engine import wire
from fettle.serve.engine.wire import flat

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


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_come_whole_however_they_were_cut(size):
    """In pieces of any size, several in one; a large body stands in the shared memory."""
    memory = bytearray(8)
    first = b"".join(wire.frame(wire.Call(1, [3], [""]), [b"abc"]))
    second = wire.shared_frame(wire.Call(2, [4], [""]), [b"de", b"fg"], memory)
    stream = first + second + b"".join(wire.frame(wire.Ping(0)))
    frames, came = wire.Frames(wire.to_worker, memoryview(memory)), []
    for begin in range(0, len(stream), size):
        came += [(header.id, bytes(body)) for header, body in frames.feed(stream[begin : begin + size])]
    assert came == [(1, b"abc"), (2, b"defg"), (0, b"")]
