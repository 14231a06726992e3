"""A worker's place in the pool: what it works on, what follows, and what becomes of both when it ends."""

import asyncio
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from fettle.package.settings import ServeSettings
from fettle.serve.engine import pool, wire
from fettle.serve.engine.batching import Batch, BatchQueue
from fettle.serve.engine.refusal import Refusal
from fettle.serve.engine.request import Request
from fettle.serve.engine.worker import AHEAD_S, Worker

SETTINGS = ServeSettings(max_rows=2, threads=1)


class Pool(SimpleNamespace):
    """What a worker sees of its pool; notes what it is told."""

    def __init__(self, **changed):
        super().__init__(
            settings=SETTINGS, name="net", devices=("cpu",), closing=False, told=[], number=0, problem="",
            metrics=SimpleNamespace(restart=lambda why: None, shed=lambda why: None),
            queue=BatchQueue(ServeSettings(max_rows=2)), **changed,
        )  # fmt: skip

    without_gone, _give_up = pool.Pool.without_gone, pool.Pool._give_up

    @property
    def loop(self):
        return asyncio.get_running_loop()

    def next_id(self):
        self.number += 1
        return self.number

    def finished(self, batch, began, header, body):
        self.told.append(("finished", batch))

    def failed(self, batch, why):
        self.told.append(("failed", batch))

    def returned(self, batch):
        self.told.append(("returned", batch))

    def without(self, worker):
        self.told.append(("without", worker))


class Process:
    """A process that only notes what it is sent."""

    how_it_ended = "ended with exit code 1"

    def __init__(self):
        self.sent = []

    def write(self, header, bodies=()):
        self.sent.append((header, bodies))

    def end(self):
        pass


def request(count=4, piece=None):
    array = np.zeros((1, count), np.float32)
    body = None if piece is None else b"{}"
    made = Request(1, (), [array], body, piece=piece)
    made.answer = asyncio.get_running_loop().create_future()
    return made


def batch(**kinds):
    items = [request(**kinds), request(**kinds)]
    return Batch(items, 2, 2)


def quick(**changed):
    """A worker that has answered a short call."""
    worker = Worker(Pool(**changed), 0, 1)
    worker._process, worker.ready = Process(), True
    worker.run(batch(), 0.0)
    assert not worker.may_follow  # nobody knows yet how long its calls take
    answer(worker)
    worker._took_s = AHEAD_S / 2
    return worker


def answer(worker, rss=0):
    worker._on_message(wire.Done(worker._call, [(2, 3)], 0.0, 0.001, rss), memoryview(b""))


def in_loop(test):
    """Run a test inside an event loop."""

    def run():
        async def whole():
            test()

        asyncio.run(whole())

    return run


@in_loop
def test_the_next_batch_is_there_before_the_worker_asks():
    worker = quick()
    first, second = batch(), batch()
    worker.run(first, 1.0)
    assert worker.may_follow
    worker.follow(second)
    assert not worker.may_follow
    assert [header.id for header, _ in worker._process.sent] == [1, 2, 3]
    answer(worker)
    assert (worker.batch, worker.following) == (second, None)
    answer(worker)
    assert worker.batch is None
    assert [told for told in worker.pool.told if told[0] == "finished"][1:] == [
        ("finished", first),
        ("finished", second),
    ]
    assert len(worker._process.sent) == 3


def test_what_is_too_large_to_wait_in_the_worker_is_sent_when_its_turn_comes():
    @in_loop
    def test():
        worker = quick()
        worker.run(batch(), 1.0)
        worker.follow(batch(count=wire.SHARED_FROM))
        assert len(worker._process.sent) == 2
        answer(worker)
        assert len(worker._process.sent) == 3
        assert worker._process.sent[-1][0].id == worker._call
        answer(worker)
        assert worker.batch is None

    test()


@in_loop
def test_a_request_given_up_behind_another_batch_is_not_computed():
    worker = quick()
    worker.run(batch(), 1.0)
    second = batch(count=wire.SHARED_FROM)
    worker.follow(second)
    second.items[0].answer.cancel()
    answer(worker)
    assert worker.batch.items == [second.items[1]]
    assert len(worker._process.sent[-1][0].shapes) == 1
    answer(worker)
    third = batch(count=wire.SHARED_FROM)
    worker.run(batch(), 1.0)
    worker.follow(third)
    for item in third.items:
        item.answer.cancel()
    sent = len(worker._process.sent)
    answer(worker)
    assert worker.batch is worker.following is None
    assert len(worker._process.sent) == sent


@in_loop
def test_long_calls_are_not_given_anything_before():
    worker = quick()
    worker.run(batch(), 1.0)
    worker._took_s = 2 * AHEAD_S
    assert not worker.may_follow


@in_loop
def test_of_a_lost_worker_only_the_call_it_was_in_is_blamed():
    worker = quick()
    worker.pool.closing = True  # and so it is not started again
    first, second = batch(), batch()
    worker.run(first, 1.0)
    worker.follow(second)
    worker._on_lost("ended")
    assert worker.pool.told[-2:] == [("returned", second), ("failed", first)]
    assert worker.batch is worker.following is None


@in_loop
def test_a_worker_that_has_grown_does_what_it_has_and_is_replaced():
    worker = quick()
    worker.pool.settings = ServeSettings(max_rows=2, threads=1, max_worker_bytes=1 << 20)
    lost = []
    worker._on_lost = lost.append
    worker.run(batch(), 1.0)
    worker.follow(batch())
    answer(worker, rss=2 << 20)
    assert worker.batch is not None
    assert not worker.ready  # the pool gives it nothing more
    assert lost == []
    answer(worker, rss=2 << 20)
    assert lost == ["grown"]


@in_loop
def test_an_answer_to_a_ping_does_not_end_the_waiting_for_a_call():
    worker = quick()
    worker._silent()
    assert isinstance(worker._process.sent[-1][0], wire.Ping)
    worker.run(batch(), 1.0)
    worker._on_message(wire.Pong(0, 5), memoryview(b""))
    assert (worker._awaited, worker.rss) == (True, 5)


def test_a_server_that_stood_still_itself_does_not_take_its_worker_for_hung(monkeypatch):
    now = [time.perf_counter()]

    @in_loop
    def test():
        worker, lost = quick(), []
        worker._on_lost = lost.append
        monkeypatch.setattr("fettle.serve.engine.worker.time.perf_counter", lambda: now[0])
        worker._silent()  # idle: it is asked whether it is there
        now[0] += 100
        worker._silent()
        assert not lost
        now[0] += 5
        worker._silent()  # in good time, and still nothing came
        assert lost == ["hung"]

    test()


@in_loop
def test_a_worker_that_leaves_does_what_it_has():
    worker = quick()
    worker.run(batch(), 1.0)
    worker.follow(batch())
    worker.leave()
    answer(worker)
    assert ("without", worker) not in worker.pool.told
    answer(worker)
    assert worker.pool.told[-1] == ("without", worker)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9])
def test_what_goes_ahead_is_what_would_have_gone(rows):
    @in_loop
    def test():
        ahead, asked = (BatchQueue(ServeSettings(max_rows=4)) for _ in range(2))
        for queue in (ahead, asked):
            for _ in range(rows):
                queue.push(request())
        early, late = ahead.take_full(), asked.take(0.0, 1)
        assert (early is not None) == (rows >= 4)
        if early is not None:
            assert (early.rows, early.size, ahead.rows) == (late.rows, late.size, asked.rows)

    test()


@in_loop
def test_a_batch_that_others_could_still_join_is_not_sent_ahead():
    queue = BatchQueue(ServeSettings(max_rows=4))
    for _ in range(3):
        queue.push(request())
    assert queue.take_full() is None
    queue.push(request())
    assert queue.take_full().rows == 4
    older, newer = request(), [request() for _ in range(4)]
    older.key, older.arrival_s = "other", -1.0
    for item in (older, *newer):
        queue.push(item)
    assert queue.take_full() is None  # the oldest request's turn is first, and others may still join it


class Texts(Pool):
    """Notes the pieces of texts, too."""

    def on_piece(self, request, piece, rows, *, last):
        self.told.append(("piece", bytes(piece), rows, last))

    def plan_pump(self):
        self.told.append("pump")


def writer():
    worker = Worker(Texts(), 0, 1)
    worker._process = Process()
    worker._on_message(wire.Ready(0.1, 3), memoryview(b""))
    return worker


@in_loop
def test_texts_are_written_beside_each_other_and_leave_one_by_one():
    worker = writer()
    one, other = request(piece=print), request(piece=print)
    worker.begin_text(one, 1.0)
    worker.begin_text(other, 1.0)
    assert (worker.free_texts, worker.idle, worker.requests()) == (1, False, [one, other])
    first, second = [header.id for header, _ in worker._process.sent]
    worker.run(batch(), 1.0)  # tensors are answered between two tokens
    worker._on_message(wire.Piece(first), memoryview(b"a"))
    worker._on_message(wire.Piece(second, last=True), memoryview(b"b"))
    assert worker.pool.told[-3:] == [("piece", b"a", 2, False), ("piece", b"b", 2, True), "pump"]
    assert worker.free_texts == 2
    answer(worker)
    assert not worker.cancel(other)
    assert worker.cancel(one)
    assert worker._process.sent[-1][0] == wire.Cancel(first)
    assert (worker.free_texts, worker.idle) == (3, True)
    told = len(worker.pool.told)
    worker._on_message(wire.Piece(first), memoryview(b"late"))
    assert len(worker.pool.told) == told
    worker.close()


@in_loop
def test_one_text_that_fails_disturbs_no_other_and_a_lost_worker_fails_each():
    worker = writer()
    texts = [request(piece=print) for _ in range(3)]
    for text in texts:
        worker.begin_text(text, 1.0)
    numbers = [header.id for header, _ in worker._process.sent]
    worker._on_message(wire.Failed(numbers[1], "too long", usage=True, too_long=True), memoryview(b""))
    failed = [said[1].items for said in worker.pool.told if said[0] == "failed"]
    assert failed == [[texts[1]]]
    assert worker.requests() == [texts[0], texts[2]]
    worker.pool.closing = True  # it is not started again
    worker._on_lost("ended")
    failed = [said[1].items for said in worker.pool.told if said[0] == "failed"]
    assert failed == [[texts[1]], [texts[0]], [texts[2]]]
    assert worker.free_texts == 0
    worker.close()


def test_a_worker_knows_how_many_share_its_device(monkeypatch):
    class Link(Process):
        def __init__(self, *heard):
            super().__init__()

        async def start(self, spawned):
            pass

    monkeypatch.setattr("fettle.serve.engine.worker.WorkerLink", Link)
    monkeypatch.setattr("fettle.serve.engine.worker.spawn", lambda threads: SimpleNamespace())

    async def told():
        made = Pool(spare=None, package=SimpleNamespace(folder="f"), trust="", explains=False, joining=[])
        made.settings = msgspec.structs.replace(SETTINGS, workers=3, devices=("cpu", "cuda:0"))
        made.workers = [Worker(made, index, 1) for index in range(3)]
        starting = [asyncio.ensure_future(worker.start()) for worker in made.workers]
        await asyncio.sleep(0)
        for worker in made.workers:
            worker.close()
        await asyncio.gather(*starting)
        return [worker._process.sent[0][0].sharing for worker in made.workers]

    assert asyncio.run(told()) == [2, 1, 2]


class Waiting(Texts):
    """A pool with its queues, and no worker that is free."""

    stop, failed, _wait_again, _queue_of = pool.Pool.stop, pool.Pool.failed, pool.Pool._wait_again, pool.Pool._queue_of


@in_loop
def test_a_text_that_nobody_wants_any_more_leaves_the_queue_at_once():
    waiting = Waiting(texts=BatchQueue(ServeSettings(max_rows=1)), workers=[])
    text = request(piece=print)
    waiting.texts.push(text)
    waiting.stop(text)
    assert (waiting.texts.rows, text.answer.cancelled(), waiting.told) == (0, True, ["pump"])


@in_loop
def test_what_failed_is_tried_alone_also_where_calls_have_fewer_rows_by_now():
    waiting = Waiting(workers=[])
    items = [Request(4, (), [np.zeros((4, 4), np.float32)]) for _ in range(2)]
    for item in items:
        item.answer = asyncio.get_running_loop().create_future()
    waiting.failed(Batch(items, 8, 8), Refusal(500, "the model failed"))
    assert waiting.queue.requests == 2
    assert waiting.queue.take(0.0, 1).items == items[:1]
