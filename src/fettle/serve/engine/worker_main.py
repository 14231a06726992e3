"""What a worker process does: one model, asked over a socket: ``-m fettle.serve.engine.worker_main FD [MEMORY_FD]``."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import mmap
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError, first_line
from fettle.package.handlers.asking import Piece, asks
from fettle.package.handlers.generate import TooLong
from fettle.procs.limits import resident_bytes
from fettle.procs.parent import die_with_parent
from fettle.serve.engine import wire
from fettle.serve.engine.worker_start import SHARED_BYTES

log = logging.getLogger("fettle.serve.worker")
shared: list[memoryview] = []
"""The memory in which the server puts large bodies, if there is any."""
held: list[memoryview] = []
"""What came together with the last message and belongs to the next, if there is any."""
_ROOM = 1 << 13
"""Bytes that are asked for at once: most messages are whole then."""


def main() -> None:
    """Answer until the other side goes away."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    link = socket.socket(fileno=int(sys.argv[1]))
    if len(sys.argv) > 2:
        descriptor = int(sys.argv[2])
        shared.append(memoryview(mmap.mmap(descriptor, SHARED_BYTES, access=mmap.ACCESS_READ)))
        os.close(descriptor)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("fettle.package.compiled").setLevel(logging.INFO)  # how long a start took, and why
    logging.getLogger("fettle.serve.settings").setLevel(logging.ERROR)  # the server has logged them
    with contextlib.suppress(ImportError):  # reported when a package is loaded
        for name in ("torch._export.serde.serialize", "safetensors.torch", "fettle.applying", "fettle.package.handler"):
            importlib.import_module(name)  # what any package needs, while the server is still busy with its own start
    with contextlib.suppress(ConnectionError, EOFError):
        load, _ = receive(link)
        assert isinstance(load, wire.Load)
        if load.cores and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # cores that are not ours: run where we may
                os.sched_setaffinity(0, load.cores)
        try:
            began = time.perf_counter()
            worker = _Worker(load)
            if worker.running is None or not worker.running.warm():
                worker.runner.warm(load.sizes)
        except Exception as error:
            if not isinstance(error, UsageError):  # the server says that one in a line
                log.exception("loading failed")
            send(link, _failed(-1, error))
            return
        gc.collect()  # loading and compiling leave reference cycles
        gc.freeze()  # what loading made stays: no collection needs to look at it again
        send(link, wire.Ready(time.perf_counter() - began, worker.texts))
        while True:
            if not held:
                worker.write(link)
            worker.answer(link, *receive(link))


class _Worker:
    def __init__(self, load: wire.Load) -> None:
        import torch

        from fettle.package.handler import find_handler
        from fettle.package.handlers.cache import usual_bytes
        from fettle.package.manifest import open_package
        from fettle.package.model_runner import ModelRunner

        if load.threads:
            torch.set_num_threads(load.threads)
        package = open_package(Path(load.folder))
        inputs = package.manifest.inputs
        self.kinds = [spec.kind for spec in inputs]
        self.one = len(inputs) == 1 and inputs[0].batched
        self.runner = ModelRunner(package, load.device)
        self.handler = find_handler(package, self.runner, load.trust)
        settings = load.settings
        cache_bytes = settings.cache_bytes or usual_bytes(load.device, load.sharing)
        self.running = self.handler.running(settings.max_rows, cache_bytes, settings.prefill_tokens)
        self.texts = self.running.rows if self.running is not None else 0
        self._said_at = 0.0
        if load.explain:  # the server lets no explanation through without it
            from fettle.serve.engine.explain import Explainer

            self._explainer = Explainer(package, load.device)
        self._rss, self._rss_at = 0, -1.0

    def rss(self) -> int:
        """Resident bytes, read at most twice a second: reading them costs as much as a small model's call."""
        now = time.monotonic()
        if now - self._rss_at > 0.5:
            self._rss, self._rss_at = resident_bytes(), now
        return self._rss

    def answer(self, link: socket.socket, header: Any, body: memoryview) -> None:
        if isinstance(header, wire.Ping):
            send(link, wire.Pong(header.id, self.rss()))
            return
        try:
            if isinstance(header, wire.Run):
                done, parts = self.run(header, body)
            elif isinstance(header, wire.Generate):
                assert self.running is not None  # the server knows how many texts it writes at once
                self.running.add(header.id, asks.decode(body))
                return
            elif isinstance(header, wire.Cancel):
                assert self.running is not None
                self.running.cancel(header.id)
                return
            else:
                done, parts = self.call(header, body)
        except Exception as error:
            if not isinstance(error, UsageError):  # which goes to whoever asked, word for word
                log.exception("a call failed")
            send(link, _failed(header.id, error))
            return
        send(link, done, parts)

    def write(self, link: socket.socket) -> None:
        """Write texts, token by token, until the server says something or all are whole."""
        running = self.running
        if running is None:
            return
        asked = select.poll()  # unlike select(), takes descriptors above 1023
        asked.register(link, select.POLLIN)
        while running.texts and not asked.poll(0):
            frames: list[Any] = []

            def on_piece(number: int, piece: Piece | Exception, frames: list[Any] = frames) -> None:
                if isinstance(piece, Piece):
                    frames += wire.frame(wire.Piece(number, bool(piece.reason)), [msgspec.json.encode(piece)])
                else:
                    frames += wire.frame(_failed(number, piece))

            running.step(on_piece)
            now = time.monotonic()
            if running.steps.by_rows and (now - self._said_at > 0.5 or not running.texts):
                self._said_at = now
                steps = running.take_steps()
                calls = [(rows, *counted) for rows, counted in steps.by_rows.items()]
                self.handler.metrics.add_counter("generated_tokens", steps.tokens)
                if steps.reused:
                    self.handler.metrics.add_counter("reused_prompt_tokens", steps.reused)
                frames += wire.frame(wire.Wrote(calls, self.rss(), self.handler.metrics.take()))
            link.sendall(b"".join(frames))

    def run(self, header: wire.Run, body: memoryview) -> tuple[wire.Done, list[Any]]:
        """Tensors in, tensors out."""
        began = time.perf_counter()
        if self.one:  # its rows lie behind each other already
            rows = sum([shapes[0][0] for shapes in header.shapes])
            parts = [wire.arrays(self.kinds, [(rows, *header.shapes[0][0][1:])], body)[0]]
        else:
            parts, place = [], 0
            for shapes in header.shapes:
                arrays, place = wire.arrays(self.kinds, shapes, body, place)
                parts.append(arrays)
        ready = time.perf_counter()
        if header.explain is None:
            answers = self.runner.run(parts, header.size)
        else:
            answers = self._explainer.attribute(parts[0], header.explain)
        done = time.perf_counter()
        shapes = [answer.shape for answer in answers]
        return (
            wire.Done(header.id, shapes, ready - began, done - ready, self.rss()),
            [wire.flat(answer) for answer in answers],
        )

    def call(self, header: wire.Call, body: memoryview) -> tuple[wire.Done, list[Any]]:
        """Bodies in, bodies out, through the handler's steps."""
        bodies = wire.pieces(body, header.lengths)
        answers = self.handler.handle(bodies, header.kinds, self._explainer if header.explain else None)
        lengths: list[wire.Shape] = [(len(data),) for data, _ in answers]
        pre_s, model_s, post_s = self.handler.took
        done = wire.Done(
            header.id, lengths, 0.0, model_s, self.rss(), [kind for _, kind in answers], self.handler.metrics.take(),
            pre_s, post_s,
        )  # fmt: skip
        return done, [data for data, _ in answers]


def _failed(number: int, error: Exception) -> wire.Failed:
    """What to say of an error. The text of a `UsageError` is for whoever asked, word for word."""
    usage = isinstance(error, UsageError)
    reason = str(error) if usage else first_line(error)
    return wire.Failed(number, reason, usage, too_long=isinstance(error, TooLong))


def receive(link: socket.socket) -> tuple[Any, memoryview]:
    """The next frame. EOFError when the other side has gone."""
    head, body = wire.PREFIX.unpack(_exactly(link, wire.PREFIX.size))
    header = wire.to_worker.decode(_exactly(link, head))
    # What stands in the shared memory is the next call's as soon as this one is answered: runner and handler copy.
    return header, shared[0][: body - wire.SHARED] if body & wire.SHARED else _exactly(link, body)


def send(link: socket.socket, header: Any, body: Any = ()) -> None:
    buffers = wire.frame(header, body)
    total = sum(map(len, buffers))
    sent = link.sendmsg(buffers) if len(buffers) < 512 else 0
    if sent < total:
        link.sendall(memoryview(b"".join(buffers))[sent:])


def _exactly(link: socket.socket, size: int) -> memoryview:
    came = held.pop() if held else memoryview(b"")
    if len(came) < size:
        room, have = memoryview(bytearray(max(size, _ROOM))), len(came)
        room[:have] = came
        while have < size:
            got = link.recv_into(room[have:])
            if not got:
                raise EOFError
            have += got
        came = room[:have]
    if len(came) > size:
        held.append(came[size:])
    return came[:size]


if __name__ == "__main__":
    main()
