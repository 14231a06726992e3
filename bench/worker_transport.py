"""Would shared memory between server and worker pay? The round trip of a tensor by either, by size.

By socket: what the server does today, a frame through a socket pair, received and copied once more. By shared memory:
the bytes are copied into a segment that both have mapped, and only a few bytes go through the socket. The answer is
small in both. It pays where the difference is a noticeable share of a request: the rest is the model's time and HTTP.

    python bench/worker_transport.py [--seconds 0.5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import socket
import statistics
import time
from multiprocessing import shared_memory

import numpy as np

from fettle.serve.engine import wire
from fettle.serve.engine.worker_main import receive, send

SIZES = [1 << 16, 1 << 18, 600_000, 1 << 20, 1 << 22, 1 << 24]


def worker(link: socket.socket, segment: str) -> None:
    """Answer until the other side goes; touch every byte, as a model would."""
    shared = shared_memory.SharedMemory(segment)
    while True:
        try:
            header, body = receive(link)
        except EOFError:
            shared.close()
            return
        data = np.frombuffer(shared.buf, np.uint8, header.lengths[0]) if header.kinds else np.frombuffer(body, np.uint8)
        made = np.array(data)
        send(link, wire.Done(header.id, [[1]], 0.0, 0.0, int(made[-1])), [b"x"])
        del data


def main() -> None:
    """Measure in turn, so that a slow moment meets both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each size and way")
    parser.add_argument("--json", help="write the samples' medians here")
    options = parser.parse_args()
    ours, theirs = socket.socketpair()
    segment = shared_memory.SharedMemory(create=True, size=max(SIZES))
    process = mp.get_context("fork").Process(target=worker, args=(theirs, segment.name), daemon=True)
    process.start()
    theirs.close()
    rows = []
    try:
        for size in SIZES:
            data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
            took: dict[str, list[float]] = {"socket": [], "shared": []}
            end = time.perf_counter() + 2 * options.seconds
            while time.perf_counter() < end or len(took["shared"]) < 5:
                for way, samples in took.items():
                    began = time.perf_counter()
                    if way == "shared":
                        np.frombuffer(segment.buf, np.uint8, size)[:] = data
                        _say(ours, wire.Call(1, [size], ["shared"]), [])
                    else:
                        _say(ours, wire.Call(1, [size], []), [wire.flat(data)])
                    _hear(ours)
                    samples.append(time.perf_counter() - began)
            socket_ms, shared_ms = (statistics.median(samples) * 1e3 for samples in took.values())
            rows.append({"bytes": size, "socket_ms": socket_ms, "shared_ms": shared_ms, "rounds": len(took["socket"])})
            print(f"{size / 2**20:8.2f} MiB   socket {socket_ms:8.3f} ms   shared {shared_ms:8.3f} ms   "
                  f"saves {socket_ms - shared_ms:7.3f} ms", flush=True)  # fmt: skip
    finally:
        ours.close()
        process.join(5)
        segment.close()
        segment.unlink()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


def _say(link: socket.socket, header: wire.ToWorker, body: list[memoryview]) -> None:
    link.sendall(b"".join(wire.frame(header, body)))  # one join, as asyncio's transports make


def _hear(link: socket.socket) -> None:
    head, body = wire.PREFIX.unpack(link.recv(wire.PREFIX.size, socket.MSG_WAITALL))
    link.recv(head + body, socket.MSG_WAITALL)


if __name__ == "__main__":
    main()
