"""The search for texts: that the simulation does what the engine does, what it asks of a package, and a real one."""

import asyncio
import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fettle.cli.serve._slo_answer import print_texts
from fettle.cli.serve._slo_packages import variants_of
from fettle.cli.serve.slo import _finish, _Work
from fettle.errors import UsageError
from fettle.load.run import TextLimits
from fettle.load.texts import TextLine
from fettle.package.handlers.asking import Ask
from fettle.package.handlers.generate import Handler, Settings
from fettle.package.handlers.running import Running
from fettle.package.handlers.sampling import Sampling
from fettle.package.manifest import open_package
from fettle.report import texts_page, texts_table, texts_words
from fettle.slo import text_costs, text_simulation
from fettle.slo import text_search as room
from fettle.slo.kept import Tested as OneTest
from fettle.slo.points import Variant
from fettle.slo.server_process import ServerFailure, ServerStats
from fettle.slo.text_costs import CHUNKS, Cell, TextCosts, cells
from fettle.slo.text_simulation import REQUEST_S, Tables, simulate_texts, text_capacity


def costs(rows=8, longest=400, each=0.001):
    """A step takes 10 ms, `each` for each text, and a little for what is kept; prompts 0.1 ms a token."""
    writing, prompts = cells(rows, 64, longest, keeps=True)
    return TextCosts(
        rows, 1 << 20, True,
        [(cell, 0.01 + each * cell.rows + 1e-6 * cell.kept) for cell in writing],
        [(cell, 0.002 + 1e-4 * cell.rows * cell.new + 1e-7 * cell.new * cell.kept) for cell in prompts], [1.0],
    )  # fmt: skip


@dataclass
class Cache:
    """What the engine asks of its cache, with a clock instead of a model."""

    tables: Tables
    clock: list = field(default_factory=lambda: [0.0])

    def logits(self, first, new, kept, read):
        if first == 0 and all(len(tokens) == 1 for tokens in new):
            self.clock[0] += self.tables.writing[len(new)][(max(kept) + 8) // 16]
        else:
            tokens = len(new) * max(map(len, new))
            self.clock[0] += self.tables.prompts[tokens] + self.tables.looking_s * tokens * max(kept)
        return torch.zeros(len(new), 300)

    def reuse(self, row, ids, free):
        return 0

    def holds(self, *given): ...
    def move(self, *given): ...
    def swap(self, *given): ...


def served_by_the_engine(due, prompts, outputs, rows, chunk, tables):
    """The real engine on that clock: seconds to the first token of each, and each time between two tokens."""
    handler = SimpleNamespace(
        begins=(),
        keeps=False, prompt=lambda ask: list(ask.tokens), room=lambda prompt, ask: ask.sampling.max_tokens, stop=set(),
        tokenizer=SimpleNamespace(decode=lambda ids, **how: "a" * len(ids)),
    )  # fmt: skip
    engine = Running(handler, rows, 0, chunk)
    engine.cache = cache = Cache(tables)
    told = {}
    free, come = [-np.inf] * rows, 0
    while engine.texts or come < len(due):
        clock = cache.clock
        if not engine.texts:
            clock[0] = max(clock[0], due[come])
            clock[0] = max(clock[0], free[0])
        while come < len(due) and due[come] <= clock[0] and free and free[0] <= clock[0]:
            free.pop(0)
            tokens = (1,) * prompts[come]
            engine.add(come, Ask(tokens=tokens, sampling=Sampling(temperature=0.0, max_tokens=outputs[come])))
            come += 1
        now, before = [], {text.number for text in engine.texts}
        engine.step(lambda number, piece, now=now: now.append((number, piece)))
        for number, piece in now:
            assert not isinstance(piece, Exception)
            told.setdefault(number, []).append(clock[0])
        free += [clock[0] + REQUEST_S / 2] * len(before - {text.number for text in engine.texts})
    first = [told[number][0] - due[number] for number in range(len(due))]
    return first, [gap for moments in told.values() for gap in np.diff(moments)]


@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_the_simulation_does_what_the_engine_does(chunk):
    random = np.random.default_rng(chunk)
    prompts, outputs = random.integers(1, 64, 60).tolist(), random.integers(1, 30, 60).tolist()
    due = np.cumsum(random.exponential(0.05, 60))
    tables = Tables.of(costs(), 100, chunk)
    found = simulate_texts(due, prompts, outputs, 5, chunk, tables)
    first, gaps = served_by_the_engine(due + REQUEST_S / 2, prompts, outputs, 5, chunk, tables)
    assert found.ttft_s - REQUEST_S == pytest.approx(first)
    assert np.sort(np.repeat(found.steps_s, found.writing)) == pytest.approx(np.sort(gaps))
    assert found.writing.sum() == sum(outputs) - len(outputs)


def test_costs_are_told_between_what_was_measured():
    tables = Tables.of(costs(), 400, 512, scale=2.0)
    assert len(tables.writing) == 9
    assert tables.writing[6][160 // 16] == pytest.approx(2 * (0.01 + 0.006 + 160e-6))
    assert tables.prompts[48] == pytest.approx(2 * (0.002 + 48e-4))
    assert tables.prompts[500] == pytest.approx(2 * (0.002 + 500e-4))  # more than was measured
    assert tables.looking_s == pytest.approx(2e-7)


def test_what_bounds_the_rate():
    def rate(rows, chunk, ttft, itl):
        limits = TextLimits(ttft, itl)
        return text_capacity([64], [20], rows, chunk, Tables.of(costs(), 100, chunk), limits)

    assert rate(8, 64, 1.0, 0) > 1.5 * rate(1, 64, 1.0, 0)  # together
    assert rate(8, 64, 1.0, 0.005) == 0  # no step is so short
    assert rate(8, 64, 0.001, 0) == 0
    assert rate(8, 16, 2.0, 0.021) > 2 * rate(8, 256, 2.0, 0.021)  # long parts of prompts hold others up
    served = simulate_texts(np.arange(50) / 10, [64], [20], 8, 64, Tables.of(costs(), 100, 64))
    assert served.kept(TextLimits(9, 9))
    assert served.itl_s(100) > 0.012


def test_texts_whose_prompts_take_most_of_the_time_have_a_capacity():
    """A prompt takes 0.18 s, in sixteen parts, and its one token a hundredth of a second."""
    tables = Tables.of(costs(longest=1100), 1100, 64)
    assert 0.3 < text_capacity([1024], [1], 1, 64, tables, TextLimits(0.4, 0)) < 5


class Server:
    """Answers a load test as the simulation does, only slower."""

    def __init__(self, slower):
        self.slower, self.rates = slower, []

    async def test(self, search, served, setting, rate):
        search.result.scale, kept = dict.fromkeys(search.result.scale, self.slower), search.result.scale
        tables = search._tables(setting)
        search.result.scale = kept
        due = np.arange(250) / rate
        seen = simulate_texts(due, search.result.prompts, search.result.outputs, setting.rows, setting.chunk, tables)
        limits = search.result.limits
        expected = simulate_texts(
            due, search.result.prompts, search.result.outputs, setting.rows, setting.chunk, search._tables(setting)
        )  # fmt: skip
        self.rates.append((setting, rate))
        times = {"ttft_ms": {"p99": 1.0}, "itl_ms": {"p99": 1.0}, "tokens_per_s": 1.0}
        latency = {"p50": 1.0, "p90": 1.0, "p99": 1.0}
        run = {"void": "", "goodput": rate, "texts": times, "statuses": {"200": 9}, "answered": 9, "throughput": rate,
               "latency_ms": latency, "mean_ms": 1.0, "concurrency": 0}  # fmt: skip
        return OneTest(rate, seen.kept(limits), run, ServerStats(), 1.0, seen.busy_s / expected.busy_s, 1.0)


@pytest.fixture
def package(monkeypatch):
    """A package that writes texts, whose engine costs what is said above."""
    monkeypatch.setattr(room, "calibrate_texts", lambda package, **how: costs(how["most"]))
    monkeypatch.setattr(text_simulation, "TEXTS", 150)
    monkeypatch.setattr(room, "package_key", lambda package: "key")

    async def start(*given):
        async def close(): ...

        return SimpleNamespace(close=close)

    monkeypatch.setattr(room.ServerProcess, "start", start)
    manifest = SimpleNamespace(name="tiny", handler=Settings(max_tokens=200, max_new_tokens=50), max_rows=8)
    return SimpleNamespace(manifest=manifest, settings=room.ServeSettings(), folder=None)


def searched(package, monkeypatch, slower=1.0, **how):
    server = Server(slower)
    monkeypatch.setattr(room._Search, "_test", lambda search, *given: server.test(search, *given))
    given = [TextLine(64, 20)] * 4
    return asyncio.run(room.search_texts(package, given, TextLimits(1.0, 0.05), cores=1, **how)), server


def test_a_search_proves_the_best_and_tells_the_rest(package, monkeypatch, tmp_path):
    found, server = searched(package, monkeypatch, rate=1.0, keep=tmp_path / "measured.jsonl")
    best = found.best
    assert found.met
    assert best is found.points[0]
    assert best.setting.rows == 8
    assert best.measured == pytest.approx(best.predicted, rel=0.25)
    assert server.rates[0] == (best.setting, best.predicted)
    data = room.texts_data(found, name="tiny", target="tiny-1", machine="this one")
    said = texts_page(json.loads(json.dumps(data)))
    assert "texts a second within 1000 ms to the first token and 50 ms between two" in said
    assert "64 tokens of prompt" in texts_words(data)
    assert texts_table(data).rows[0][0] == "8"
    again, second = searched(package, monkeypatch, rate=1.0, keep=tmp_path / "measured.jsonl")
    assert not second.rates
    assert again.tests_kept == again.tests == found.tests
    settings = room.settings_with(package.settings, best.setting, found.costs["", 1])
    assert (settings.max_rows, settings.prefill_tokens) == (8, best.setting.chunk)
    assert settings.cache_bytes == 8 << 20


def test_of_several_packages_that_which_serves_most_is_the_best(package, monkeypatch):
    few_bits = SimpleNamespace(**vars(package))
    each = {id(package): 0.004, id(few_bits): 0.001}
    monkeypatch.setattr(room, "calibrate_texts", lambda one, **how: costs(how["most"], each=each[id(one)]))
    monkeypatch.setattr(room, "package_key", lambda one: str(id(one)))
    found, _ = searched([Variant("chat-1", package), Variant("chat-int8-1", few_bits)], monkeypatch)
    assert found.best.setting.variant == "chat-int8-1"
    assert any(why.startswith("chat-1, at best: predicted ") for why in found.why)
    data = room.texts_data(found, name="chat", target="chat-1 chat-int8-1", machine="this one")
    table = texts_table(data)
    assert (table.columns[-1], table.rows[0][-1]) == ("package", "chat-int8-1")
    assert "chat-1, at best" in texts_page(data)


def test_packages_of_two_models_are_not_compared(store):
    first, second = variants_of([str(store / "net-1"), str(store / "net-2")])
    assert first.package.manifest.inputs == second.package.manifest.inputs
    assert (first.name, second.name) == (str(store / "net-1"), str(store / "net-2"))
    assert variants_of([str(store / "net-1")])[0].name == ""
    trust = [open_package(store / "echo").handler_digest]
    with pytest.raises(UsageError, match="made alike"):
        variants_of([str(store / "net-1"), str(store / "echo")], trust)


def test_packages_of_texts_that_lack_their_tokenizer_are_compared(monkeypatch):
    manifest = SimpleNamespace(name="chat", handler=Settings(), files={}, requires={})
    monkeypatch.setattr("fettle.package.manifest.open_package", lambda path: SimpleNamespace(manifest=manifest))
    assert [one.name for one in variants_of(["chat-1", "chat-2"], writes=True)] == ["chat-1", "chat-2"]


def test_a_table_that_cannot_be_written_loses_nothing_that_was_found(package, monkeypatch, tmp_path):
    found, _ = searched(package, monkeypatch)
    rows = room.texts_rows(found, "tiny")
    assert len(rows) == found.tests
    assert (rows[0]["Model"], rows[0]["Batch size"]) == (f"tiny, {found.best.setting}", "8")
    data = {**room.texts_data(found, name="tiny", target="tiny-1", machine="this one"), "busy": ""}
    (tmp_path / "file").touch()
    out, table = tmp_path / "out", tmp_path / "file" / "a.csv"
    with pytest.raises(UsageError, match="cannot write"):
        _finish(found, data, out, texts_page, True, print_texts, lambda: tmp_path, table, rows)
    assert json.loads((out / "result.json").read_text())["written"] == str(tmp_path)


def test_costs_are_corrected_where_steps_take_longer_than_simulated(package, monkeypatch):
    found, _ = searched(package, monkeypatch, slower=2.0)
    assert found.scale["", 1] == pytest.approx(2.0, rel=0.15)
    assert found.best.measured == pytest.approx(found.best.predicted, rel=0.35)
    missed, _ = searched(package, monkeypatch, slower=9.0, confirm=1)
    assert missed.best is None
    assert not missed.met
    assert "no load test kept the limits" in missed.why


def test_a_setting_whose_server_fails_is_not_tried_again(package, monkeypatch):
    async def start(package, settings, *rest):
        async def close(): ...

        if settings.max_rows == 8:
            raise ServerFailure("no memory")
        return SimpleNamespace(close=close)

    monkeypatch.setattr(room.ServerProcess, "start", start)
    found, _ = searched(package, monkeypatch, slower=2.0, confirm=8)  # and so all are ranked once more
    failed = [failure.what for failure in found.failures]
    assert failed
    assert len(set(failed)) == len(failed)
    assert found.best.setting.rows < 8


def test_texts_are_cut_to_what_the_package_has_room_for(package):
    lines, prompts, note = room.fitting(package, [TextLine(500, 10), TextLine(20, 80), TextLine(20, 30)])
    assert [(line.prompt, line.max_tokens) for line in lines] == [(199, 1), (20, 50), (20, 30)]
    assert prompts == [199, 20, 20]
    assert note.startswith("2 of 3 texts were cut")
    package.manifest.handler = None
    with pytest.raises(UsageError, match="writes no texts"):
        room.fitting(package, [TextLine(1, 1)])


def test_texts_have_limits_of_their_own(package, monkeypatch, tmp_path):
    monkeypatch.setattr("fettle.package.manifest.open_package", lambda path: package)
    with pytest.raises(UsageError, match="--ttft 500ms --itl 50ms"):
        _Work.of([str(tmp_path)], [], None, "", 3, [])


def test_a_package_that_is_refused_ends_no_search(monkeypatch):
    def refused(*asked):
        raise UsageError("no text fits")

    monkeypatch.setattr(text_costs.Stoppable, "call", refused)
    found = text_costs.calibrate_texts(SimpleNamespace(folder="there"), most=1, prompt=1, whole=2)
    assert found.failures == {"loading": "no text fits"}


def test_steps_are_timed_of_a_package_whose_answers_have_one_token(monkeypatch):
    handler = SimpleNamespace(
        begins=(), keeps=False, stop=set(), settings=Settings(max_tokens=64, max_new_tokens=1),
        prompt=lambda ask: list(ask.tokens), room=lambda *asked: Handler.room(handler, *asked),
        tokenizer=SimpleNamespace(decode=lambda ids, **how: "a" * len(ids), get_vocab_size=lambda: 300),
    )  # fmt: skip
    engine = Running(handler, 2, 0, 1 << 30)
    engine.cache = Cache(Tables.of(costs(), 100, 64))
    engine.cache.nbytes = 64
    handler.running = lambda *given: engine
    monkeypatch.setattr("fettle.package.manifest.open_package", lambda path: None)
    monkeypatch.setattr("fettle.package.model_runner.ModelRunner", lambda *given: None)
    monkeypatch.setattr("fettle.package.handler.find_handler", lambda *given: handler)
    worker = text_costs._Worker()
    worker.answer(text_costs._Load("there", torch.get_num_threads(), "cpu", 2))
    assert worker.answer(text_costs._Time(Cell(2, 1, 16), 0.0))


def test_what_is_timed():
    writing, prompts = cells(6, 100, 300, keeps=True)
    assert {cell.rows for cell in writing} == {1, 2, 4, 6}
    assert {cell.kept for cell in writing} == {16, 150, 299}
    assert Cell(6, 100, 0) in prompts  # as many as 1024 tokens need, and there is room for
    assert all(cell.new + cell.kept <= 100 for cell in prompts)
    assert max(CHUNKS) == 2048
    at_once = TextCosts(in_parts=False)  # by an encoder
    assert (room.chunks_for(at_once, 100), room.chunks_for(at_once, 5000)) == ([128, 256], [5000])
    assert all(not cell.kept for cell in cells(6, 100, 300, keeps=True, in_parts=False)[1])


def test_the_command_says_what_is_wrong(run_fettle, store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, said in (
        ((store / "net-1",), "say what limit"), ((store / "net-1", "--ttft", "1s"), "writes no texts"),
        (("a.py:b", "--ttft", "1s"), "need a package"), ((store / "net-1", "--itl", "0ms"), "more than 0"),
        ((store / "net-1", "--itl", "1s", "--p99", "1s"), "--p99 is for models that write no texts"),
        ((store / "net-1", "--itl", "1s", "--prompt-tokens", "x"), "not a length"),
        ((store / "net-1", "--itl", "1s", "-o", "load.html"), "ends in .csv or a folder"),
        (("a.py:b", "--p99", "1s", "--study", "night"), "--storage"),
        (("a.py:b", "--p99", "1s", "--recipes", "5"), "--storage"),
        ((store / "net-1", "--p99", "1s", "--max-error", "0.02"), "--max-error is for a target"),
        ((store / "net-1", "--p99", "1s", "--output-tokens", "128"), "--output-tokens is for --ttft and --itl"),
        ((store / "net-1", "--itl", "1s", "--max-error", "0.02"), "--max-error is for a target: package the model"),
        ((store / "net-1", "--itl", "1s", "--texts", "t.jsonl", "--prompt-tokens", "64"), "--texts FILE has its own"),
        ((store / "net-1", "--itl", "1s", "--trust", "0"), "--trust is for models that write no texts"),
        ((store / "net-1", "a.py:b", "--p99", "1s"), "a.py:b is no package"),
        ((store / "net-1", store / "m.zip", "--p99", "1s"), "is not a package"),
    ):  # fmt: skip
        found = run_fettle("serve", "slo", *given)
        assert (found.code, said in found.err) == (2, True), found.err


def test_a_folder_that_is_no_package_is_not_replaced(run_fettle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("def workload():\n    raise AssertionError\n")
    mine = tmp_path / "package" / "mine.py"
    mine.parent.mkdir()
    mine.write_text("mine")
    found = run_fettle("serve", "slo", "m.py", "--p99", "1s", "--output", ".")
    assert (found.code, "exists already and is not a package: give another --output" in found.err) == (2, True)
    mine.with_name("manifest.json").write_text("{}")  # or of another command
    found = run_fettle("serve", "slo", "m.py", "--p99", "1s", "--output", ".")
    assert (found.code, "made it: give another --output" in found.err) == (2, True)
    assert mine.read_text() == "mine"


TARGET = """
import torch, transformers

def workload():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=1.0, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=7, pad_token_id=None)
    ids = torch.randint(0, 300, (2, 8))
    inputs = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    return {"model": transformers.LlamaForCausalLM(config).eval(), "inputs": inputs, "name": "tiny"}
"""


@pytest.mark.slow
def test_from_a_model_to_a_proven_setting_by_the_command_line(run_fettle, tmp_path, monkeypatch):
    """What a user types: package, find the setting, serve it, put load on it."""
    import signal
    import subprocess
    import sys
    import urllib.request

    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(TARGET)
    words = {f"w{number}": number for number in range(300)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("tokenizer.json")
    how = ("--handler", "generate", "--tokenizer", "tokenizer.json", "--max-rows", "4")
    assert run_fettle("serve", "package", "tiny.py", *how).code == 0
    limits = ("--ttft", "5s", "--itl", "2s")
    quick = ("--prompt-tokens", "uniform:8:40", "--output-tokens", "8", "--duration", "1s", "--confirm", "1", "--json")
    found = run_fettle("serve", "slo", "tiny-1", *limits, *quick, "--output", "tests.csv")
    assert found.code == 0, found.err
    data = json.loads(found.out)
    best = data["points"][data["best"]]
    assert best["measured"] > 0
    assert (tmp_path / "slo-tiny" / "report.html").is_file()
    assert best["setting"] in (tmp_path / "tests.csv").read_text().splitlines()[1]
    settings = open_package(tmp_path / "tiny-1").settings
    assert (settings.max_rows, settings.prefill_tokens) == (best["max_rows"], best["prefill_tokens"])
    assert (settings.cache_bytes, settings.threads) == (best["cache_bytes"], best["threads"])
    command = [sys.executable, "-m", "fettle", "serve", "run", "tiny-1", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = json.loads(server.stdout.readline())["url"] + "/v1"
            assert json.load(urllib.request.urlopen(f"{url}/models", timeout=60))["data"][0]["id"] == "tiny"
            asked = ("--prompt-tokens", "12", "--output-tokens", "6", "-d", "2s", "-o", "load.html", "--json")
            for load in (("-c", "2"), ("--rate", "5")):
                said = run_fettle("serve", "load", url, *load, *limits, *asked)
                (run,) = json.loads(said.out)
                assert (run["failed"], run["shed"]) == (0, 0)
                assert run["texts"]["tokens"] == 6 * run["answered"] > 0
                assert run["texts"]["prompt_tokens"] == 12 * run["answered"]
            chat = run_fettle("serve", "load", url + "/chat/completions", "--rate", "5")
            assert (chat.code, "a chat takes texts" in chat.err) == (2, True)
            long = run_fettle("serve", "load", url, "--rate", "5", "-d", "1s", "--output-tokens", "5000")
            assert (long.code, "at most" in long.out.replace("\n", " ")) == (1, True)
            refused = run_fettle("serve", "load", url[:-3], "--rate", "5", "-d", "1s", "--ttft", "1s")
            assert (refused.code, "give its URL with /v1" in refused.err) == (2, True)
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
