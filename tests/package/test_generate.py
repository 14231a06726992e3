"""Text generation: token by token, many prompts in step, stopped when the client goes."""

import http.client
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fettle.errors import UsageError
from fettle.package.export import write_package
from fettle.package.handler import Context, find_handler
from fettle.package.handlers.asking import Ask, Piece
from fettle.package.handlers.generate import Handler, Settings
from fettle.package.handlers.sampling import Sampling
from fettle.package.manifest import open_package
from fettle.package.model_runner import ModelRunner
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.serve.engine.refusal import Malformed
from fettle.serve.http.generation import read_prompt
from fettle.workload import Workload
from tests.serve.test_server import ask
from tests.serving import running, until

WORDS = 10
END = 9


class Adding(torch.nn.Module):
    """The next token is the sum of all before it, modulo the vocabulary: every token matters, none that comes later."""

    def forward(self, input_ids, attention_mask):
        total = (input_ids * attention_mask).cumsum(1) % WORDS
        return {"logits": torch.nn.functional.one_hot(total, WORDS).float() * 20}


class Peeking(Adding):
    def forward(self, input_ids, attention_mask):
        total = (input_ids * attention_mask).sum(1, keepdim=True).expand_as(input_ids) % WORDS
        return {"logits": torch.nn.functional.one_hot(total, WORDS).float() * 20}


def expected(tokens, most):
    found = list(tokens)
    while len(found) < len(tokens) + most:
        following = sum(found) % WORDS
        if following == END:
            break
        found.append(following)
    return "".join(f" {token}" for token in found[len(tokens) :])


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(WORDS)}, "0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return {"tokenizer.json": made.to_str().encode()}


def batch(rows=2, length=8):
    torch.manual_seed(0)  # by chance the later tokens of every row may add up to nothing
    ids = torch.randint(0, WORDS, (rows, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def packaged(path, model=None, **settings):
    return write_package(
        Workload((model or Adding()).eval(), [batch()]), Recipe(), path, name="adder", files=tokenizer(),
        settings=ServeSettings(max_rows=4, threads=1, timeout_ms=30_000), handler="generate",
        handler_settings={"max_new_tokens": 50, "max_tokens": 60, "stop_tokens": [END], **settings},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return packaged(tmp_path_factory.mktemp("adder") / "m").folder


@pytest.fixture(scope="module")
def server(folder):
    with running([open_package(folder)]) as made:
        yield made


def post(server, path, said):
    return ask(f"{server.url}/v2/models/adder/{path}", json.dumps(said).encode())


def events(body):
    lines = [line for line in body.decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines]


def test_pieces_come_as_events_and_add_up_to_the_whole(server):
    asked = {"text_input": "1 2 4", "id": "7", "parameters": {"max_tokens": 6}}
    status, body, headers = post(server, "generate_stream", asked)
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    found = events(body)
    assert len(found) == 6
    assert {(e["model_name"], e["model_version"], e["id"]) for e in found} == {("adder", "1", "7")}
    text = "".join(event["text_output"] for event in found)
    status, whole, _ = post(server, "generate", asked)
    assert (status, whole["text_output"], whole["id"]) == (200, text, "7")
    assert text == expected([1, 2, 4], 6)
    assert ask(server.url + "/predictions/adder", b"1 2 4")[1].decode() == expected([1, 2, 4], 50)


def test_prompts_of_many_lengths_go_in_step_and_do_not_see_each_other(server):
    prompts = [[n % 7 + 1] * (1 + n % 5) for n in range(24)]

    def one(tokens):
        said = {"text_input": " ".join(map(str, tokens)), "parameters": {"max_tokens": 5 + len(tokens)}}
        return post(server, "generate", said)[1]["text_output"]

    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(one, prompts))
    assert found == [expected(tokens, 5 + len(tokens)) for tokens in prompts]
    statistics = ask(server.url + "/v2/models/adder/stats")[1]["model_stats"][0]["batch_stats"]
    assert max(row["batch_size"] for row in statistics) > 1


def test_an_answer_ends_before_a_stop_token_and_may_be_empty(server):
    assert expected([4, 5], 10) == ""
    assert post(server, "generate", {"text_input": "4 5"})[1]["text_output"] == ""
    status, body, _ = post(server, "generate_stream", {"text_input": "4 5"})
    assert (status, body) == (200, b"")


@pytest.mark.parametrize(
    "said",
    [
        {}, {"text_input": 1}, {"text_input": ""}, {"text_input": "1 " * 60}, {"text_input": "1 " * 200_000},
        {"text_input": "1", "parameters": {"max_tokens": 0}}, {"text_input": "1", "parameters": {"temperature": -1}},
        {"text_input": "1", "parameters": {"top_q": 0.5}}, {"text_input": "1", "parameters": {"seed": "a"}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_what_cannot_be_asked_is_refused_by_its_status(server, said, path):
    status, answer, headers = post(server, path, said)
    assert (status, headers["content-type"]) == (400, "application/json")
    assert answer["error"]


def handler_of(package, runner=ModelRunner):
    return find_handler(package, runner(package), "")


def written(running, asks, gone=lambda step: ()):
    """Each text, its tokens and why it ended; `asks` join as soon as there is room, and `gone(step)` are given up."""
    texts, ends, waiting, step = {}, {}, list(enumerate(asks)), 0

    def tell(number, said):
        assert isinstance(said, Piece), said
        texts[number] = texts.get(number, "") + said.text
        if said.reason:
            ends[number] = (said.tokens, said.reason)

    while waiting or running.texts:
        while waiting and len(running.texts) < running.rows:
            running.add(*waiting.pop(0))
        running.step(tell)
        step += 1
        for number in gone(step):
            running.cancel(number)
    return [(texts.get(number, ""), *ends.get(number, (0, "gone"))) for number in range(len(asks))]


def test_sampling_follows_its_seed_and_temperature(folder):
    running = handler_of(open_package(folder)).running(1, 0, 256)

    def answer(**sampling):
        return written(running, [Ask(text="1 2", sampling=Sampling(max_tokens=20, **sampling))])[0][0]

    hot = {"temperature": 100.0, "seed": 1}
    assert answer(**hot) == answer(**hot)
    assert answer(**hot) != answer(temperature=100.0, seed=2)
    assert answer(temperature=100.0, top_k=1) == answer() == expected([1, 2], 20)
    assert answer(temperature=1e-300, seed=1) == answer(temperature=100.0, top_p=1e-9, seed=1) == answer()
    assert answer(temperature=1.0, min_p=0.9, seed=3) == answer()


def test_log_probabilities_name_tokens_as_they_stand_in_the_text(folder):
    running, said = handler_of(open_package(folder)).running(1, 0, 256), []
    running.add(0, Ask(text="1 2", sampling=Sampling(max_tokens=5, logprobs=1)))
    while running.texts:
        running.step(lambda _, piece: said.append(piece))
    assert "".join(piece.text for piece in said) == expected([1, 2], 5)
    assert "".join(one.token for piece in said for one in piece.logprobs) == expected([1, 2], 5)


def test_a_token_that_was_added_for_the_tokenizer_alone_is_no_part_of_a_prompt(folder, tmp_path):
    made = pytest.importorskip("tokenizers").Tokenizer.from_str(tokenizer()["tokenizer.json"].decode())
    made.add_tokens(["<image>"])
    made.save(str(tmp_path / "tokenizer.json"))
    handler = Handler(Settings())
    handler.initialize(Context(tmp_path, open_package(folder).manifest, None))
    assert handler.prompt(Ask(text="1 2")) == [1, 2]
    with pytest.raises(UsageError, match="that the model does not: <image>"):
        handler.prompt(Ask(text="1 <image>"))
    with pytest.raises(UsageError, match="from 0 to 9"):
        handler.prompt(Ask(tokens=(10,)))


@pytest.mark.parametrize(
    ("settings", "stop"),
    [({"stop_tokens": (8,)}, {8}), ({"stop_tokens": (8,), "eos_token": "9"}, {8, 9}), ({"eos_token": "9"}, {9})],
)
def test_a_text_ends_with_the_tokenizers_own_end_too(folder, settings, stop):
    handler = Handler(Settings(**settings))
    handler.initialize(Context(folder, open_package(folder).manifest, None))
    assert handler.stop == stop


def test_texts_join_and_leave_between_two_tokens(folder):
    class Counting(ModelRunner):
        rows = ()

        def run(self, parts, size):
            self.rows += (len(parts),)
            return super().run(parts, size)

    runner = Counting(open_package(folder))
    running = find_handler(open_package(folder), runner, "").running(2, 0, 256)
    asks = [Ask(text=text, sampling=Sampling(max_tokens=n)) for text, n in (("1", 9), ("2", 2), ("5", 4), ("1", 1))]
    found = written(running, asks)
    assert found == [(expected([w], n), n, "length") for w, n in ((1, 9), (2, 2), (5, 4), (1, 1))]
    assert runner.rows == (2, 2, 2, 2, 2, 2, 2, 1, 1)  # 16 tokens in 9 calls
    found = written(running, asks, lambda step: {0} if step == 3 else ())
    assert found[0] == (expected([1], 3), 0, "gone")
    assert found[1:] == [(expected([w], n), n, "length") for w, n in ((2, 2), (5, 4), (1, 1))]


def test_a_stream_that_is_hung_up_on_frees_its_worker(tmp_path):
    class Slow(Adding):
        def forward(self, input_ids, attention_mask):
            weight = torch.ones(400, 400)
            for _ in range(30):
                weight = weight @ weight * 0
            answer = super().forward(input_ids, attention_mask)
            return {"logits": answer["logits"] + weight.sum()}

    package = packaged(tmp_path / "m", Slow(), max_new_tokens=10_000, max_tokens=20_000, stop_tokens=[END])
    with running([package]) as server:
        link = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=120)
        link.request("POST", "/v2/models/adder/generate_stream", json.dumps({"text_input": "5 5"}))
        answer = link.getresponse()
        assert answer.readline().startswith(b"data: ")
        pool = server.registry.choose("adder")
        assert pool.inflight == 1
        link.close()
        answer.close()
        until(lambda: pool.inflight == 0)
        assert pool.workers[0].restarts == 0
        said = {"text_input": "5 5", "parameters": {"max_tokens": 1}}
        assert post(server, "generate", said)[1]["text_output"] == expected([5, 5], 1)
        # A worker that ends in the middle of a stream: the client is told, not left waiting, and nothing is said twice.
        link = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=120)
        link.request("POST", "/v2/models/adder/generate_stream", json.dumps({"text_input": "5 5"}))
        answer = link.getresponse()
        first = answer.readline() + answer.readline()
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        found = events(first + answer.read())
        assert found[-1] == {"error": "the model failed"}
        assert "".join(event["text_output"] for event in found[:-1]) == expected([5, 5], len(found) - 1)


def test_a_model_that_looks_ahead_or_gives_no_scores_is_refused(tmp_path):
    with pytest.raises(UsageError, match="later tokens"):
        packaged(tmp_path / "m", Peeking())

    class Pooled(Adding):
        def forward(self, input_ids, attention_mask):
            return super().forward(input_ids, attention_mask)["logits"].mean(1)

    with pytest.raises(UsageError, match="no scores"):
        packaged(tmp_path / "m", Pooled())
    with pytest.raises(UsageError, match="tokens: integers"):
        write_package(Workload(torch.nn.Linear(4, 4), [torch.rand(2, 4)]), Recipe(), tmp_path / "m", name="m",
                      handler="generate", files=tokenizer())  # fmt: skip


def test_prompts_are_parsed_strictly():
    assert read_prompt(b'{"text_input": "a", "parameters": {"stream": true}, "more": 1}').text_input == "a"
    for body in (b"", b"[]", b"[" * 100_000, b'{"text_input": "a", "parameters": 3}'):
        with pytest.raises(Malformed):
            read_prompt(body)
