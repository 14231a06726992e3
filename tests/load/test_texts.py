"""Load on a server that writes texts: lengths, and what is heard of answers whose moments are known."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

from fettle.errors import UsageError
from fettle.load import client, texts
from fettle.load.arrivals import constant
from fettle.load.loops import closed_loop, open_loop
from fettle.load.run import UNANSWERED, Run, Text, TextLimits, as_data
from fettle.load.texts import BROKEN, TextConnection, text_lines, text_requests
from fettle.page import Table
from fettle.report import loads_page

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(said):
    data = b"data: " + (said if isinstance(said, bytes) else json.dumps(said).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


async def served(broken=False, counts=True):
    """A server that writes three pieces and counts 4 tokens, or none; or breaks off after the first."""

    async def answer(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            length = next(int(line.split()[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
            body = json.loads(await reader.readexactly(length))
            assert body["stream"]
            writer.write(HEAD)
            for text in ("a", "", "b", "c"):  # the second token's character is not whole
                writer.write(chunk({"choices": [{"text": text}]}))
                await writer.drain()
                await asyncio.sleep(0.001)
                if broken:
                    writer.write(chunk({"error": {"message": "no memory", "type": "server_error"}}))
                    break
            if not broken:
                usage = {"prompt_tokens": 5, "completion_tokens": 4}
                writer.write(chunk({"choices": [], "usage": usage if counts else None}))
                writer.write(chunk(b"[DONE]"))
            writer.write(b"0\r\n\r\n")

    return await asyncio.start_server(answer, "127.0.0.1", 0)


def load(loop, *given, broken=False, counts=True, **how):
    async def whole():
        server = await served(broken, counts)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        return await loop(text_requests(url, text_lines("8", "4"), model="m"), *given, **how)

    return asyncio.run(whole())


def test_each_token_is_heard_and_counted():
    run = load(closed_loop, 2, 0.3, limits=TextLimits(60, 60))
    assert run.texts
    assert len(run.texts) == len(run.latency_s) == run.answered
    assert {(text.tokens, text.prompt_tokens, len(text.gaps_s)) for text in run.texts} == {(4, 5, 2)}
    assert 0 < run.ttft_s(50) < run.percentile(50)
    assert run.within == 1
    assert not run.missed
    said = as_data(run)["texts"]
    assert said["tokens"] == 4 * run.answered
    assert said["tokens_per_s"] == pytest.approx(4 * run.throughput, rel=0.01)
    opened = load(open_loop, constant(50, 1), limits=TextLimits(1e-9, 0))
    assert opened.texts
    assert opened.goodput == 0
    assert opened.missed


def test_the_pieces_of_a_server_that_counts_no_tokens_are_counted():
    run = load(closed_loop, 2, 0.3, counts=False)
    said = as_data(run)["texts"]
    assert (said["tokens"], said["prompt_tokens"]) == (3 * run.answered, None)
    assert said["tokens_per_s"] == pytest.approx(3 * run.throughput, rel=0.01)


def test_the_report_names_the_run_with_the_most_answers_in_time():
    def run(clients, ttft):
        texts = [Text(0.0, ttft + 0.2, ttft + np.arange(10) * 0.02, 5, 10) for _ in range(20)]
        latency = np.full(20, ttft + 0.2)
        return Run("closed", clients, 20 / clients, latency, clients, {200: 20}, texts=texts, limits=TextLimits(0.3, 0))

    runs = [run(1, 0.1), run(4, 0.2), run(2, 0.4)]
    loads = ["1 client", "4 clients", "2 clients"]
    table = Table(("load", *loads), [["TTFT p99 ms", "100.0", "200.0", "400.0"]], loads)
    said = loads_page([as_data(one) for one in runs], table, "http://a/v1", "this machine")
    assert "4 answers a second within the limits, 40 tokens a second, at 4 clients" in said
    assert "4 clients p99 200 ms" in said
    assert "limit 300 ms" in said
    assert "1 client p95 20 ms" in said  # between two tokens


def test_a_text_that_breaks_off_is_not_answered():
    run = load(closed_loop, 1, 0.1, broken=True)
    assert set(run.statuses) == {BROKEN}
    assert "the text broke off" in run.errors
    assert run.refusal == "no memory"


def test_clients_wait_for_the_texts_that_are_being_written_when_their_time_is_over():
    assert load(closed_loop, 1, 0.0, patience_s=0.0).statuses == {UNANSWERED: 1}
    assert load(closed_loop, 1, 0.0, patience_s=60.0).statuses == {200: 1}


def test_events_may_end_their_lines_as_http_does_and_hold_more_than_data():
    ended = []
    connection = TextConnection(lambda _, status: ended.append(status))
    connection.connection_made(SimpleNamespace(write=lambda data: None, is_closing=lambda: False))
    (request,) = text_requests("http://127.0.0.1:1/v1", text_lines("8", "4", count=1), model="m")
    connection.send(request, None)
    text = b'{"choices": [{"text": "a"}]}'
    said = b": ping\r\n\r\nevent: text\r\ndata:%b\r\n\r\nid: 1\r\ndata: %b\r\n\r\ndata: [DONE]\r\n\r\n" % (text, text)
    connection.data_received(HEAD)
    for byte in said:
        connection.data_received(b"1\r\n%c\r\n" % byte)
    connection.data_received(b"0\r\n\r\n")
    assert ended == [200]
    assert len(connection.heard(0.0)[0]) == 2


@pytest.mark.parametrize(
    ("choice", "is_heard"),
    [
        ({"text": "a"}, True), ({"text": ""}, False), ({"delta": {"content": "a"}}, True),
        ({"delta": {"role": "assistant", "content": ""}}, False), ({"delta": {"reasoning_content": "hm"}}, True),
        ({"delta": None, "finish_reason": "stop"}, False), ("no choice", False), ({"delta": "no text"}, False),
    ],
)  # fmt: skip
def test_what_a_model_writes_is_heard_under_each_of_its_names(choice, is_heard):
    connection = TextConnection(lambda *_: None)
    connection.connection_made(SimpleNamespace(write=lambda data: None, is_closing=lambda: False))
    (request,) = text_requests("http://127.0.0.1:1/v1", text_lines("8", "4", count=1), model="m")
    connection.send(request, None)
    connection.data_received(HEAD + chunk({"choices": [choice]}))
    assert len(connection.heard(0.0)[0]) == is_heard


def test_a_prompt_of_so_many_tokens_is_another_one_each_time_it_is_sent(tmp_path):
    def prompts(lines):
        sent = []
        connection = TextConnection(lambda *_: None)
        connection.connection_made(SimpleNamespace(write=sent.append, is_closing=lambda: False))
        (request,) = text_requests("http://127.0.0.1:1/v1", lines, model="m")
        for _ in range(2):
            connection.send(request, None)
        return [json.loads(data.partition(b"\r\n\r\n")[2])["prompt"] for data in sent]

    one, other = prompts(text_lines("64", "4", count=1))
    assert (len(one), len(other)) == (64, 64)
    assert one != other
    file = tmp_path / "texts"
    file.write_text('{"prompt": "a b"}')
    assert prompts(text_lines(file=file)) == ["a b", "a b"]


def test_a_model_that_writes_texts_is_sent_no_tensors(monkeypatch):
    tokens, last = client._Input("input_ids", "INT64", [-1, -1]), client._Input("last", "INT64", [-1])
    monkeypatch.setattr(client, "get_json", lambda *given: client._Model([tokens, last]))
    with pytest.raises(UsageError, match="writes texts: give http://a:1/v1"):
        client.model_request("http://a:1/v2/models/gpt")


def test_a_server_that_writes_no_texts_is_told_by_that(monkeypatch):
    monkeypatch.setattr(texts, "get_json", lambda *given: texts._Listing([]))
    with pytest.raises(UsageError, match="no model that writes texts"):
        text_requests("http://a:1/v1", [])


def test_limits_count_the_first_token_and_the_gaps():
    def text(ttft, *gaps):
        moments = np.cumsum([ttft, *gaps])
        return Text(0.0, float(moments[-1]), moments, 1, len(moments))

    texts = [text(0.1, 0.01, 0.01), text(0.6, 0.01), text(0.1, 0.2), text(0.5)]
    limits = TextLimits(0.5, 0.05)
    assert [one.within(limits) for one in texts] == [True, False, False, True]
    run = Run("open", 4, 1.0, np.array([one.done_s for one in texts]), statuses={200: 4}, texts=texts, limits=limits)
    assert (run.goodput, run.within, run.missed) == (2, 0.5, True)
    assert run.itl_s(100) == pytest.approx(0.2)


def test_lengths_follow_their_distribution(tmp_path):
    def lengths(prompt, output="7"):
        made = text_requests("http://127.0.0.1:1", text_lines(prompt, output, count=2000, seed=3), model="m")
        bodies = [json.loads(request.data.partition(b"\r\n\r\n")[2]) for request in made]
        assert {body["max_tokens"] for body in bodies} == {7}
        return np.array([len(body["prompt"]) for body in bodies])

    assert set(lengths("9")) == {9}
    assert (lengths("uniform:3:5").min(), lengths("uniform:3:5").max()) == (3, 5)
    assert np.median(lengths("lognormal:50:0.5")) == pytest.approx(50, rel=0.1)
    assert lengths("exponential:40").mean() == pytest.approx(40, rel=0.1)
    for wrong in ("", "0", "\u00b2", "99999999999", "uniform:3", "normal:3:4", "uniform:a:b", "lognormal:-1:2",
                  "uniform:1:inf"):  # fmt: skip
        with pytest.raises(UsageError, match="is not a length"):
            lengths(wrong)
    file = tmp_path / "texts"
    file.write_text('{"prompt": "a b", "max_tokens": 3}\n\n{"prompt": 4}\n')
    first, second = text_requests("http://127.0.0.1:1/v1", text_lines(file=file), model="m")
    assert (b'"prompt":"a b"' in first.data, b"ignore_eos" in first.data) == (True, False)
    assert b"ignore_eos" in second.data
    with pytest.raises(UsageError, match="texts, not numbers"):
        text_requests("http://127.0.0.1:1/v1/chat/completions", text_lines(file=file), model="m")
    for wrong in (b"{}", b'{"prompt": 99999999999}', b'{"prompt": "\xff"}', b'{"prompt": 4, "x": ' + b"[" * 99_999):
        file.write_bytes(wrong)
        with pytest.raises(UsageError, match="line of JSON"):
            text_lines(file=file)


def test_a_terminal_obeys_nothing_that_a_server_says():
    connection = TextConnection(lambda *_: None)
    connection._refusal = json.dumps({"error": {"message": "\x1b[2Jno " + "x" * 1000}}).encode()
    assert connection.refusal.startswith("\ufffd[2Jno xxx")
    assert len(connection.refusal) == 200
