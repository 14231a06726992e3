"""What a request costs the server in CPU: microseconds of each of its processes, for a fixed number of requests.

    python bench/serving_cpu.py --servers fettle,mosec --requests 20000 --json serving_cpu.json

The tiny model of `bench/serving.py`, one worker with one thread, batches of at most 8, closed loop at 8, 32 and 128
clients. CPU time is hardly moved by what else runs on the machine, where requests a second are; and on a machine whose
cores are all busy it is what bounds them. Shown are the process that listens, and all others together; and how many
rows a call had on average, where the server says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from fettle.loop import run

sys.path.insert(0, str(Path(__file__).parent))
from serving import NEEDS, package_for, request_to, start, wait_until_it_answers

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Client(asyncio.Protocol):
    """Asks again as soon as it was answered, as long as any of `left` requests are to be made."""

    def __init__(self, request: bytes, left: list[int], over: asyncio.Future[None]) -> None:
        self.request, self.left, self.over, self.had = request, left, over, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        if self.left[0] > 0:
            self.left[0] -= 1
            self.transport.write(self.request)
        elif not self.over.done():
            self.over.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.had += data
        head, found, body = self.had.partition(b"\r\n\r\n")
        if not found:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self.over.set_exception(RuntimeError(f"answered {head[:60]!r}"))
        length = LENGTH.search(head)
        if length is not None and len(body) >= int(length[1]):
            self.had = b""
            self.ask()


async def ask(port: int, request: bytes, clients: int, requests: int) -> None:
    loop = asyncio.get_running_loop()
    left, over = [requests], loop.create_future()
    made = [await loop.create_connection(lambda: Client(request, left, over), "127.0.0.1", port)
            for _ in range(clients)]  # fmt: skip
    await over
    await asyncio.sleep(0.2)
    for transport, _ in made:
        transport.close()


def spent(family: list[psutil.Process]) -> list[float]:
    return [sum(one.cpu_times()[:2]) for one in family]


def rows_a_call(port: int) -> tuple[int, int] | None:
    """Rows and calls so far, as the statistics extension of the protocol tells them."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/net/stats", timeout=5) as answer:
            said = json.load(answer)["model_stats"][0]
        return said["inference_count"], said["execution_count"]
    return None


def measure(server: str, port: int, folder: Path, requests: int, clients: list[int]) -> dict[str, Any]:
    process = start(server, "tiny", port, folder)
    try:
        wait_until_it_answers(server, port, process)
        first = psutil.Process(process.pid)
        family = [first, *first.children(recursive=True)]
        request = request_to(server, port).data
        run(ask(port, request, 32, 2000))
        found: dict[str, Any] = {}
        for count in clients:
            before, called = spent(family), rows_a_call(port)
            run(ask(port, request, count, requests))
            after, calls = spent(family), rows_a_call(port)
            us = [1e6 * (b - a) / requests for a, b in zip(before, after, strict=True)]
            found[str(count)] = {"listening_us": us[0], "others_us": sum(us[1:]), "total_us": sum(us)}
            if called and calls:
                found[str(count)]["rows_a_call"] = (calls[0] - called[0]) / (calls[1] - called[1])
        return found
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="fettle,mosec")
    parser.add_argument("--clients", default="8,32,128")
    parser.add_argument("--requests", type=int, default=20000, help="of each run")
    parser.add_argument("--port", type=int, default=18300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = options.servers.split(",")
    servers = [name for name in wanted if importlib.util.find_spec(NEEDS[name.partition("@")[0]])]
    for name in sorted(set(wanted) - set(servers)):
        print(f"{name} is not installed: left out")
    clients = [int(count) for count in options.clients.split(",")]
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        package_for(servers, "tiny", Path(scratch))
        for number, name in enumerate(servers):
            results[name] = measure(name, options.port + number, Path(scratch), options.requests, clients)
            for count, row in results[name].items():
                rows = f", {row['rows_a_call']:.1f} rows a call" if "rows_a_call" in row else ""
                print(f"{name:8} {count:>4} clients: {row['total_us']:6.1f} us a request = listening "
                      f"{row['listening_us']:.1f} + others {row['others_us']:.1f}{rows}")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
