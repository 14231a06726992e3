"""OpenAI's protocol, spoken by the official client; the texts are what the model says alone."""

import asyncio
import functools
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from fettle.package.export import write_package
from fettle.package.handlers.asking import Ask, Piece
from fettle.package.handlers.generate import CHAT, Settings
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.serve.engine.refusal import Refusal
from fettle.serve.http.generation import Writing
from fettle.serve.http.openai import Completions, StreamOptions, _Answer, _message
from fettle.workload import Workload
from tests.serve.test_server import ask
from tests.serving import running, until

openai = pytest.importorskip("openai")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    "<assistant>{{ tone }}"
)
TEXT = "Größe über alles: naïve café, 日本語のテキスト, emoji 😀😀 and plain English words, again and again. " * 3


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes and some merges: most characters beyond ASCII take several tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return made


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=1.0, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=7, pad_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def server(tmp_path_factory, model, tokenizer):
    ids = torch.randint(0, 300, (2, 8))
    package = write_package(
        Workload(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]), Recipe(),
        tmp_path_factory.mktemp("chat") / "m", name="tiny", handler="generate",
        files={"tokenizer.json": tokenizer.to_str().encode(), CHAT: TEMPLATE.encode()},
        handler_settings={"max_new_tokens": 100}, settings=ServeSettings(max_rows=6, threads=1, prefill_tokens=16),
    )  # fmt: skip
    with running([package]) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)


def alone(model, tokenizer, ids, most):
    """What the model writes by itself, token by token over the whole text: the text, and the tokens."""
    written = list(ids)
    for _ in range(most):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([written])).logits[0, -1].argmax())
        if token == 7:
            break
        written.append(token)
    return tokenizer.decode(written[len(ids) :]), written[len(ids) :]


def test_completions_are_the_models_own_texts_and_counted(client, model, tokenizer):
    prompts = ["Größe", "plain English", "日本語 " * 6, "a"]
    ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    found = client.completions.create(model="tiny", prompt=prompts, max_tokens=20, temperature=0)
    wanted = [alone(model, tokenizer, one, 20) for one in ids]
    assert [choice.text for choice in found.choices] == [text for text, _ in wanted]
    assert [choice.finish_reason for choice in found.choices] == [
        "length" if len(tokens) == 20 else "stop" for _, tokens in wanted
    ]
    assert found.usage.prompt_tokens == sum(map(len, ids))
    assert found.usage.completion_tokens == sum(len(tokens) for _, tokens in wanted)
    noted = {"metadata": {"run": "7"}}  # which nobody reads
    same = client.completions.create(model="tiny", prompt=ids, max_tokens=20, temperature=0, extra_body=noted)
    assert [choice.text for choice in same.choices] == [choice.text for choice in found.choices]
    assert [row.id for row in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "fettle"


def test_where_no_number_of_tokens_is_asked_for_there_are_as_many_as_fit(client):
    asked = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
    found = [client.completions.create(**asked, prompt=[5] * length).usage for length in (8, 120)]
    assert [usage.completion_tokens for usage in found] == [16, 8]
    with pytest.raises(openai.BadRequestError, match="too many"):
        client.completions.create(**asked, prompt=[5] * 120, max_tokens=16)


def test_a_stream_holds_back_characters_until_they_are_whole(client, model, tokenizer):
    wanted, _ = alone(model, tokenizer, tokenizer.encode("naïve").ids, 60)
    stream = client.completions.create(
        model="tiny", prompt="naïve", max_tokens=60, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *pieces, last = list(stream)
    assert "".join(piece.choices[0].text for piece in pieces) == wanted
    assert pieces[-1].choices[0].finish_reason in ("length", "stop")
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_chat_goes_through_the_template(client, model, tokenizer):
    ids = tokenizer.encode("<system>Be kind<user>Hi<assistant>").ids
    wanted, tokens = alone(model, tokenizer, ids, 12)
    messages = [
        {"role": "system", "content": "Be kind"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    ]  # fmt: skip
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 12, "temperature": 0}
    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    assert found.choices[0].message.content == wanted
    assert found.usage.prompt_tokens == len(ids)
    rows = found.choices[0].logprobs.content
    assert len(rows) >= len(tokens)
    with torch.no_grad():
        first = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    assert rows[0].logprob == pytest.approx(float(first.max()), abs=1e-3)
    assert [row.logprob for row in rows[0].top_logprobs] == pytest.approx(first.topk(3).values.tolist(), abs=1e-3)
    stream = list(client.chat.completions.create(**asked, stream=True))
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in stream) == wanted


def test_chat_takes_what_its_clients_send_besides(client):
    asked = {"model": "tiny", "max_completion_tokens": 6, "temperature": 0}
    user = {"role": "user", "content": "b"}
    messages = [{"role": "system", "content": "a"}, {"role": "assistant", "content": ""}, user]
    dumped = [{"role": "developer", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": None}, user]
    said = client.chat.completions.create(**asked, messages=messages)
    nothing = {
        "tools": [], "tool_choice": "none", "parallel_tool_calls": False, "modalities": ["text"],
        "safety_identifier": "c", "prompt_cache_key": "d", "prompt_cache_retention": "24h",
    }  # fmt: skip
    same = client.chat.completions.create(**asked, messages=dumped, **nothing)
    assert (same.choices[0].message.content, same.usage) == (said.choices[0].message.content, said.usage)
    more = {"chat_template_kwargs": {"tone": "é!"}}
    told = client.chat.completions.create(**asked, messages=messages, extra_body=more)
    assert told.usage.prompt_tokens > said.usage.prompt_tokens
    assert _message(dumped[1]) == {"role": "assistant", "content": ""}  # a template may count its tool calls


def test_a_stop_string_ends_a_text_also_across_tokens(client, model, tokenizer):
    whole, _ = alone(model, tokenizer, tokenizer.encode("again").ids, 40)
    for begin in range(2, len(whole) - 4, 3):
        stop = whole[begin : begin + 4]
        asked = {"model": "tiny", "prompt": "again", "max_tokens": 40, "temperature": 0, "stop": ["never met", stop]}
        found = client.completions.create(**asked).choices[0]
        assert (found.text, found.finish_reason) == (whole[: whole.index(stop)], "stop")
        pieces = list(client.completions.create(**asked, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == found.text


def test_samples_follow_their_seed_and_choices_differ(client):
    asked = {"model": "tiny", "prompt": "emoji", "max_tokens": 12, "temperature": 2, "seed": 5, "n": 3}
    asked["extra_body"] = {"top_k": 50, "ignore_eos": True, "repetition_penalty": 1.0}
    one, other = (client.completions.create(**asked) for _ in range(2))
    texts = [choice.text for choice in one.choices]
    assert texts == [choice.text for choice in other.choices]
    assert len(set(texts)) == 3
    streamed = {0: "", 1: "", 2: ""}
    for piece in client.completions.create(**asked, stream=True):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert list(streamed.values()) == texts
    greedy = {"model": "tiny", "prompt": "emoji", "max_tokens": 12}
    wanted = client.completions.create(**greedy, temperature=0).choices[0].text
    assert client.completions.create(**greedy, top_p=1e-9).choices[0].text == wanted
    assert client.completions.create(**greedy, extra_body={"min_p": 1.0}).choices[0].text == wanted


def test_a_bias_rules_over_what_the_model_would_say(client, tokenizer):
    [wanted] = tokenizer.encode("b").ids
    asked = {"model": "tiny", "prompt": "emoji", "max_tokens": 3}
    for temperature in (0, 1):
        said = client.completions.create(**asked, temperature=temperature, logit_bias={str(wanted): 100})
        assert said.choices[0].text == "bbb"
    with pytest.raises(openai.BadRequestError, match="from 0 to 299"):
        client.completions.create(**asked, logit_bias={"300": 1})


def test_a_stream_counts_each_prompt_once_whatever_ends_first():
    class Written:
        def __init__(self, turns, prompt):
            self.turns, self.prompt = turns, prompt

        async def pieces(self):
            for _ in range(self.turns):
                await asyncio.sleep(0)
            yield Piece("x", (), "stop", self.prompt, 1)

        def stop(self):
            pass

    async def whole(answer):
        return [event async for event in answer._events()]

    answer = _Answer.__new__(_Answer)
    answer.wanted = Completions(model="m", prompt=("a", "b"), stream_options=StreamOptions(include_usage=True))
    answer.chat, answer.count, answer.head, answer.offsets = False, 2, {}, [0] * 4
    answer.writings = [Written(1, 10), Written(9, 10), Written(5, 20), Written(13, 20)]
    usage = json.loads(asyncio.run(whole(answer))[-2].removeprefix(b"data: "))["usage"]
    assert usage == {"prompt_tokens": 30, "completion_tokens": 4, "total_tokens": 34}


def test_a_stream_begins_with_the_first_choice():
    class Waiting:
        def __init__(self, first):
            self.first = first

        async def begin(self):
            if not self.first:
                await asyncio.Event().wait()

        def stop(self):
            pass

    async def begun():
        async with asyncio.timeout(60):
            return await answer.reply()

    answer = _Answer.__new__(_Answer)
    answer.wanted, answer.count = Completions(model="m", prompt="a", n=2, stream=True), 2
    answer.writings = [Waiting(True), Waiting(False)]
    assert asyncio.run(begun()).status == 200


def test_a_stream_that_breaks_off_says_why():
    class Late:
        async def pieces(self):
            raise Refusal(504, "its time was over")
            yield

        def stop(self):
            pass

    async def first(answer):
        return await anext(answer._events())

    answer = _Answer.__new__(_Answer)
    answer.wanted, answer.chat, answer.head, answer.writings = Completions(model="m", prompt="a"), False, {}, [Late()]
    assert b'"its time was over"' in asyncio.run(first(answer))


def test_an_empty_text_has_no_log_probabilities_but_a_list_of_them():
    answer, whole = _Answer.__new__(_Answer), [Piece("", (), "stop", 3, 0)]
    answer.logprobs, answer.offsets, answer.chat = True, [0], True
    assert answer._whole(0, whole)["logprobs"] == {"content": []}
    answer.chat = False
    assert answer._whole(0, whole)["logprobs"]["token_logprobs"] == []
    answer.logprobs = False
    assert answer._whole(0, whole)["logprobs"] is None


def test_a_prompt_that_no_model_takes_is_not_multiplied():
    version = SimpleNamespace(pool=None, package=SimpleNamespace(manifest=SimpleNamespace(handler=Settings())))
    with pytest.raises(Refusal, match="longer than this model takes") as refused:
        Writing(SimpleNamespace(gone=None), version, Ask(text="x" * 10_000_000))
    assert refused.value.code == "context_length_exceeded"


def test_log_probabilities_are_of_the_tokens_of_the_text(client, model, tokenizer):
    prompts = [TEXT[begin : begin + 1 + begin % 17] for begin in range(48)]
    written = ((prompt, alone(model, tokenizer, tokenizer.encode(prompt).ids, 24)[1]) for prompt in prompts)
    prompt, tokens = next((prompt, tokens) for prompt, tokens in written if 0 < len(tokens) < 24)
    found = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0, logprobs=2)
    assert found.choices[0].finish_reason == "stop"
    assert len(found.choices[0].logprobs.tokens) == found.usage.completion_tokens == len(tokens)
    drawn = client.completions.create(model="tiny", prompt="a", max_tokens=12, temperature=2, seed=5, logprobs=1)
    told = drawn.choices[0].logprobs
    assert all(token in top for token, top in zip(told.tokens, told.top_logprobs, strict=True))


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "temperature": 3}, "temperature"),
        ({"prompt": "a", "top_q": 1}, "top_q"),
        ({"prompt": "a", "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 3, "n": 50}, "n"),
        ({}, "prompt"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
    ],
)
def test_what_cannot_be_asked_is_the_protocols_own_error(server, body, param):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, said, _ = ask(server.url + path, json.dumps({"model": "tiny", **body}).encode())
    assert status == 400
    assert said["error"]["type"] == "invalid_request_error"
    assert (said["error"]["param"] or "").split("[")[0] == param


def test_errors_reach_the_client_as_its_exceptions(server, client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="plain " * 200)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="too many") as refused:
        client.completions.create(model="tiny", prompt="a", max_tokens=101, stream=True)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="no such role"):
        client.chat.completions.create(model="tiny", messages=[{"role": "tool", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="tokens are from 0"):
        client.completions.create(model="tiny", prompt=[100_000])
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("other")
    assert refused.value.code == "model_not_found"
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(openai.BadRequestError, match="leave tools out"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], tools=[tool])
    for body in (b"{", b'{"model": "tiny", "prompt": "\xff"}', b'{"model": "tiny", "prompt": "\\ud800"}'):
        status, said, _ = ask(server.url + "/v1/completions", body)
        assert (status, said["error"]["type"]) == (400, "invalid_request_error")
    assert ask(server.url + "/v1/nothing", b"{}")[1]["error"]["message"]
    pool = server.registry.choose("tiny")
    assert (pool.inflight, pool.waiting_rows) == (0, 0)


def test_what_goes_wrong_inside_is_the_protocols_error_too(client, monkeypatch):
    monkeypatch.setattr("fettle.serve.http.openai._prompts", lambda prompt: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="internal error, request") as failed:
        client.completions.create(model="tiny", prompt="a")
    assert failed.value.type == "server_error"


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_streams_some_of_which_are_hung_up_on(server, client, model, tokenizer, count):
    """More streams than rows, of all lengths: hung up on after a while or at once, refused, ended by a stop string or
    by a limit. Every one that is whole is the model's own text, no row stays taken, and the memory does not grow."""
    random = np.random.default_rng(count)
    pool = server.registry.choose("tiny")
    prompts = [TEXT[begin : begin + 1 + begin % 17] for begin in range(48)]
    kinds = ["whole", "whole", "leave", "drop", "refused", "stop"]
    plans = [(prompts[a], 1 + b, kinds[c], d) for a, b, c, d in random.integers(0, [48, 24, 6, 8], (count, 4)).tolist()]

    @functools.cache
    def tokens_of(prompt):
        return alone(model, tokenizer, tokenizer.encode(prompt).ids, 24)[1]

    def stop_of(prompt, after):
        return tokenizer.decode(tokens_of(prompt))[after : after + 2]

    address = ("127.0.0.1", server.ports[0])

    def one(plan):
        prompt, most, how, after = plan
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": most, "temperature": 0, "stream": True}
        if how == "drop":  # the connection goes before anything is answered
            with socket.create_connection(address) as link:
                body = json.dumps({**asked, "stream": bool(after % 2)}).encode()
                link.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            return None
        if how == "refused":
            with pytest.raises(openai.BadRequestError):
                client.completions.create(**{**asked, "max_tokens": 1000})
            return None
        if how == "stop":
            asked["stop"] = stop_of(prompt, after) or None
        stream = client.completions.create(**asked)
        if how == "leave":
            for _ in zip(range(after), stream, strict=False):
                pass
            return stream.close()
        pieces = list(stream)
        return "".join(piece.choices[0].text for piece in pieces), pieces[-1].choices[0].finish_reason

    with ThreadPoolExecutor(12) as threads:
        first = list(threads.map(one, plans[: count // 4]))
        until(lambda: pool.inflight == 0)
        before = psutil.Process(pool.workers[0].pid).memory_info().rss
        found = first + list(threads.map(one, plans[count // 4 :]))
    for (prompt, most, how, after), said in zip(plans, found, strict=True):
        tokens, stop = tokens_of(prompt), stop_of(prompt, after) if how == "stop" else ""
        whole = tokenizer.decode(tokens[:most])
        if how in ("whole", "stop"):
            met = bool(stop) and stop in whole
            assert said == (
                whole.partition(stop)[0] if met else whole, "stop" if met or len(tokens) < most else "length"
            )  # fmt: skip
        else:
            assert said is None
    until(lambda: pool.inflight == 0 and pool.waiting_rows == 0)
    assert pool.workers[0].free_texts == 6
    assert pool.workers[0].restarts == 0
    assert psutil.Process(pool.workers[0].pid).memory_info().rss - before < 16 << 20
