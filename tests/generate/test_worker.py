"""A worker and a study of a workload that writes text."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

import fettle
from fettle.applying import with_inputs
from fettle.errors import UsageError
from fettle.generate.speed import Watcher, figures
from fettle.measure import Judge, _generation, _inference, _lockstep, messages
from fettle.measure._state import State, take_slice
from fettle.recipe import Recipe
from fettle.report import Result, load_result, save
from fettle.report.terminal import print_result
from fettle.techniques import source
from fettle.workload import Target, fingerprint
from tests.conftest import quick_studies

pytest.importorskip("transformers")

WORK = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def workload():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
                         initializer_range=0.3)
    prompts = [torch.randint(96, (2, tokens)) for tokens in (5, 12)]
    return {"model": LlamaForCausalLM(config), "inputs": prompts, "new_tokens": 6, "texts": [torch.randint(96, (40,))],
            "batches": (1, 2)}
"""
FEW = {
    "grad": ["grad"], "precision": ["fp32", "bf16"], "matmul": ["highest"], "threads": ["as-given"],
    "allocator": ["default"], "attention": ["as-is"], "sdpa_backend": ["auto"], "compile": ["off"],
    "quantize": ["none"], "kv_cache": ["as-given", "static"], "guessing": ["off"],
}  # fmt: skip


@pytest.fixture
def target(tmp_path: Path) -> Target:
    (tmp_path / "writer.py").write_text(WORK)
    return Target(f"{tmp_path}/writer.py:workload", "writer", (str(tmp_path),))


def silent(event: fettle.Event) -> None: ...


def test_a_worker_takes_text_apart_and_judges_it_by_teacher_forcing(target: Target, tmp_path: Path) -> None:
    path = str(tmp_path / "reference.pt")
    first = State()
    assert _inference.build(first, messages.Build(target)).writes
    facts = _inference.probe(first, messages.Probe()).facts
    assert (facts.new_tokens, facts.prompt_tokens, facts.keeps) == (6, 12, "static")
    told = _inference.reference(first, messages.WriteReference(path))
    assert told.dtype == "float32"
    assert told.perplexity is not None
    assert told.perplexity > 1
    assert told.decode_flops > 0
    for part, levels in (("", {"precision": "bf16", "mode": "eval"}), ("ttft", {})):
        state, recipe = State(), Recipe(levels)
        _inference.build(state, messages.Build(target))
        request = messages.Prepare(source(recipe, facts), str(recipe), path, part=part)
        answer = _inference.prepare(state, request)
        answer = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=messages.Prepared)  # as it travels
        accuracy = answer.accuracy
        assert (accuracy.error > 1e-6) == ("precision" in levels)
        assert accuracy.judged_batches == 3
        assert not Judge(path, max_error=0.05).reason(accuracy)
        assert ("KL" in Judge(path, max_error=1e-9).reason(accuracy)) == ("precision" in levels)
        assert bool(Judge(path, exact=True).reason(accuracy)) == (accuracy.unequal > 0)
        assert answer.samples == {"": 12, "ttft": 2}[part]
        assert answer.generation is not None
        sliced = take_slice(state, messages.TakeSlice(0.0))
        found = figures([*answer.texts, *sliced.texts], answer.generation)
        wider = _generation.measure_rows(state, messages.MeasureRows((2, 4))).tokens_per_s
        assert wider.keys() == {"2", "4"}
        assert min(found.ttft_ms, found.tpot_ms, found.itl_p50_ms) > 0
        assert found.tokens_per_s.keys() == {"2"}
        assert found.cache_bytes > 0
        assert sliced.samples_ns[0] > 0


def test_a_rank_that_alone_lacks_memory_for_more_rows_keeps_the_others_waiting_no_longer(target, monkeypatch) -> None:
    store = torch.distributed.HashStore()
    held = SimpleNamespace(_get_default_store=lambda: store)
    group = SimpleNamespace(get_world_size=lambda: 2, distributed_c10d=held)
    monkeypatch.setattr(_lockstep, "_group", lambda: group)
    monkeypatch.setattr(_lockstep, "PATIENCE_S", 0.0)

    def full(**prompt: object) -> None:
        raise MemoryError

    state = SimpleNamespace(run=full, workload=target.load())
    with pytest.raises(MemoryError, match="no other rank lacked it with 4 rows"):
        _generation.measure_rows(state, messages.MeasureRows((4,)))
    store.add("no memory for 8 rows", 1)  # the other rank
    assert _generation.measure_rows(state, messages.MeasureRows((8,))).tokens_per_s == {}


def test_a_race_of_first_tokens_tells_the_rest_by_texts_that_were_not_the_first_calls(
    target: Target, tmp_path: Path, monkeypatch
) -> None:
    path, state, written = str(tmp_path / "reference.pt"), State(), []
    _inference.build(state, messages.Build(target))
    facts = _inference.probe(state, messages.Probe()).facts
    _inference.reference(state, messages.WriteReference(path))
    timed = Watcher.sample_ns

    def sample_ns(self: Watcher, *given) -> int:
        took = timed(self, *given)
        written.append(self.texts[-1])
        return took

    monkeypatch.setattr(Watcher, "sample_ns", sample_ns)
    for as_given in (True, False):
        written.clear()
        _inference.build(state, messages.Build(target))
        state.workload.model.eval()
        request = messages.Prepare(source(Recipe(), facts), "", path, part="ttft", as_given=as_given)
        answer = _inference.prepare(state, request)
        whole = [text.times() for text in written if len(text.came) > 1]
        assert len(whole) == (4 if as_given else 2)  # as given nothing was fed, so that the first were the first calls
        assert answer.texts == whole[-2:]
        assert not Judge(path, max_error=0.01).reason(answer.accuracy)


def test_texts_that_are_drawn_are_timed_and_the_likeliest_judge(target: Target, tmp_path: Path) -> None:
    path = str(tmp_path / "reference.pt")
    state = State()
    _inference.build(state, messages.Build(target))
    facts = _inference.probe(state, messages.Probe()).facts
    _inference.reference(state, messages.WriteReference(path))
    _inference.build(state, messages.Build(target))
    state.workload = replace(state.workload, temperature=0.7)
    drawn: list[float] = []
    lines = source(Recipe({"guessing": "prompt"}), facts)
    answer = _inference.prepare(state, messages.Prepare(lines, "r", path))
    run = state.run
    state.run = lambda **prompt: [drawn.append(prompt.get("temperature")), run(**prompt)][1]
    take_slice(state, messages.TakeSlice(0.0))
    assert set(drawn) == {0.7}
    assert not Judge(path, exact=True).reason(answer.accuracy)


def test_another_model_takes_the_prompts_of_a_target(target: Target) -> None:
    model = target.load().model
    made = with_inputs(model, target)
    assert isinstance(made, fettle.GenerationWorkload)
    assert made.model is model
    assert made.new_tokens == 6


def test_another_length_or_another_text_is_another_workload(target: Target) -> None:
    made = target.load()
    assert isinstance(made, fettle.GenerationWorkload)
    others = [replace(made, new_tokens=7), replace(made, texts=[(made.texts[0] + 1) % 96])]
    drafts = [target.load().model for _ in range(2)]
    drafts[1].lm_head.weight.data += 1
    others += [replace(made, draft=draft) for draft in drafts]
    assert len({fingerprint(work) for work in (made, replace(made), *others)}) == 5


@pytest.mark.usefixtures("forks")
def test_goals_of_text_are_for_text(tmp_path: Path) -> None:
    import torch

    with pytest.raises(UsageError, match="GenerationWorkload"), quick_studies():
        fettle.tune(
            torch.nn.Linear(2, 2), [torch.rand(2, 2)], goal="ttft", output=tmp_path, on_progress=lambda event: None
        )
    with pytest.raises(UsageError, match="max ttft"):
        fettle.tune(torch.nn.Linear(2, 2), [torch.rand(2, 2)], max_ttft_ms=0, output=tmp_path)


@pytest.mark.slow
def test_a_study_of_text_from_end_to_end(target: Target, tmp_path: Path, capsys) -> None:
    from rich.console import Console

    with quick_studies():
        result = fettle.tune(
            target, techniques=FEW, budget_s=600, output=tmp_path / "out", on_progress=lambda event: None
        )
    assert isinstance(result, Result)
    assert result.limits.max_error == 0.01
    assert all(trial.generation and trial.generation.tpot_ms > 0 for trial in result.trials if trial.ok)
    half = next(trial for trial in result.trials if trial.recipe.levels.get("precision") == "bf16")
    assert half.accuracy.is_text
    save(result, tmp_path / "out")
    again = load_result(tmp_path / "out" / "result.json")
    assert again.baseline is not None
    assert again.baseline.generation == result.baseline.generation
    page = (tmp_path / "out" / "report.html").read_text()
    assert "The text, taken apart" in page
    assert "roofline" in page
    print_result(result, Console(width=140))
    assert "First token after" in capsys.readouterr().out
    fast = result.apply(target.load().model)
    assert fast(target.load().inputs[0]["input_ids"], new_tokens=4).shape == (2, 4)
