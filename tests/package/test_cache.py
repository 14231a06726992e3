"""Keys and values kept between tokens: the same texts as the model's own, for a token's work each."""

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from rich.console import Console

from fettle.cli.serve import package as command
from fettle.errors import UsageError
from fettle.generate.decoding import decoder_of, write
from fettle.package.export import write_package
from fettle.package.function import Blocks, in_blocks
from fettle.package.generating import generating, of_model
from fettle.package.handler import find_handler
from fettle.package.handlers import cache
from fettle.package.handlers.asking import Ask
from fettle.package.handlers.recorded import Recorded
from fettle.package.handlers.sampling import Sampling
from fettle.package.model_runner import ModelRunner
from fettle.package.program import load_program
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.techniques import cpu_flags
from fettle.workload import Workload
from tests.package.test_generate import post, written
from tests.serving import running

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
WORDS = 64
SIZES = {"vocab_size": WORDS, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@pytest.mark.parametrize("alike", [0, 1, 255, 256, 257, 512, 600])
def test_what_two_prompts_begin_with_is_found(alike):
    one, other = list(range(600)), [*range(alike), *[-1] * (600 - alike)]
    for most in (600, 512, 300, 0):
        assert cache._common(one, other, most) == min(alike, most)


def llama(layers=2, **more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=1.0, **SIZES, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gpt2(layers=2):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=layers, n_head=4, n_positions=128, initializer_range=1.0, **SIZES
    )
    return transformers.GPT2LMHeadModel(config).eval()


def workload(model):
    ids = torch.randint(0, WORDS, (2, 8)).to(next(model.parameters()).device)
    return Workload(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])


def packaged(path, model, recipe="", evidence=None):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(WORDS)}, "0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return write_package(
        workload(model), Recipe.parse(recipe), path, name="adder", handler="generate",
        files={"tokenizer.json": made.to_str().encode()}, settings=ServeSettings(max_rows=8, threads=1),
        handler_settings={"max_new_tokens": 50, "max_tokens": 100}, evidence=evidence,
    )  # fmt: skip


def expected(model, tokens, most):
    """What the model says itself, whole text by whole text."""
    ids = list(tokens)
    for _ in range(most):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return "".join(f" {token}" for token in ids[len(tokens) :])


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return packaged(tmp_path_factory.mktemp("gpt2") / "m", gpt2())


class Counting(ModelRunner):
    calls = ()

    def call(self, tensors):
        self.calls += (tuple(tensors[0].shape),)
        return super().call(tensors)


@pytest.fixture(scope="module")
def runner(package):
    """The package, loaded once: what is kept of texts is a handler's own."""
    return Counting(package)


PROMPTS = [[(7 * n + i) % WORDS for i in range(1 + n % 6)] for n in range(12)]


def test_prompts_of_many_lengths_get_the_models_own_texts(package):
    model = gpt2()
    assert [spec.name for spec in package.manifest.inputs] == ["input_ids", "attention_mask", "last", "seen", "past"]

    def one(tokens):
        said = {"text_input": " ".join(map(str, tokens)), "parameters": {"max_tokens": 4 + 2 * len(tokens)}}
        return post(server, "generate", said)[1]["text_output"]

    with running([package]) as server, ThreadPoolExecutor(12) as threads:
        found = list(threads.map(one, PROMPTS))
    assert found == [expected(model, tokens, 4 + 2 * len(tokens)) for tokens in PROMPTS]


def asks(prompts, most):
    return [Ask(tokens=tuple(p), sampling=Sampling(max_tokens=n)) for p, n in zip(prompts, most, strict=True)]


def test_a_token_costs_a_tokens_work_and_a_text_that_joins_or_leaves_disturbs_nobody(package, runner):
    model = gpt2()
    runner.calls = ()
    handler = find_handler(package, runner, "")
    running = handler.running(3, 0, 8)
    long = [(5 * n) % WORDS for n in range(20)]
    prompts, most = [*PROMPTS[2:5], long, *PROMPTS[:6]], [3, 40, 9, 7, 1, 2, 30, 4, 5, 12]
    found = written(running, asks(prompts, most), lambda step: {2} if step == 5 else ())
    assert max(tokens for _, tokens in runner.calls) == 8  # no more of a prompt at once, however long it is
    assert {rows for rows, tokens in runner.calls if tokens == 1} == {1, 2, 3}
    for number, (text, tokens, reason) in enumerate(found):
        assert (tokens, reason) == ((0, "gone") if number == 2 else (most[number], "length"))
        assert expected(model, prompts[number], most[number]).startswith(text)
        assert number == 2 or text == expected(model, prompts[number], most[number])
    assert sum(tokens == 1 for _, tokens in runner.calls) < 0.6 * sum(most)
    assert not running.texts


def test_a_long_prompt_is_not_held_up_by_those_that_came_later(package, runner, monkeypatch):
    """They join as soon as there is room, and each leaves with its first token; one is given up in its prompt."""
    running = find_handler(package, runner, "").running(4, 0, 4)
    long = [(5 * n) % WORDS for n in range(30)]
    prompts = [[1], [2], [3], long, *([n, 9, 7] for n in range(4)), long[3:], [4, 4, 4]]
    most, order, step = [2, 4, 6, *[1] * 7], [], running.step
    monkeypatch.setattr(running, "step", lambda tell: step(lambda n, piece: (order.append(n), tell(n, piece))))
    found = written(running, asks(prompts, most), lambda _: {8 for t in running.texts if t.number == 8 and t.kept})
    assert list(dict.fromkeys(order)) == [*range(8), 9]
    assert found.pop(8) == ("", 0, "gone")
    del prompts[8], most[8]
    model = gpt2()
    assert [text for text, *_ in found] == [expected(model, p, n) for p, n in zip(prompts, most, strict=True)]


def test_what_prompts_begin_with_is_computed_once(package, runner):
    """Of texts that are there, that came together, and that are gone; each is the model's own."""
    model = gpt2()
    running = find_handler(package, runner, "").running(4, 0, 32)
    system = [(11 * n) % WORDS for n in range(24)]
    prompts = [[*system, 3, 5], [*system, 9], system[:20], system, [1, *system]]
    found = written(running, asks(prompts, [6, 2, 9, 3, 4]), lambda step: ())
    assert [text for text, *_ in found] == [
        expected(model, p, n) for p, n in zip(prompts, [6, 2, 9, 3, 4], strict=True)
    ]
    assert running.steps.reused == 24 + 19 + 23  # never all of a prompt, and nothing where the first token is another
    again = written(running, asks([[*system, 3, 5, 7]], [5]), lambda step: ())
    assert again[0][0] == expected(model, [*system, 3, 5, 7], 5)
    assert running.steps.reused == 24 + 19 + 23 + 26  # of the text that began with the same, though it is gone
    running.cache.wipe(0)
    assert running.cache.reuse(0, [9] * 40, 0) == 0


def test_a_chat_goes_on_from_its_last_turn_though_others_came_between(package, runner):
    """Each turn of two chats reads what is new in it, and strangers take the row of the text that ended longest ago."""
    model = gpt2()
    running = find_handler(package, runner, "").running(4, 0, 32)
    chats = [[(n * step + 1) % WORDS for n in range(20)] for step in (5, 7)]
    for turn in range(3):
        for chat in chats:
            (answer, *_), *_ = written(running, asks([chat], [4]), lambda step: ())
            assert answer == expected(model, chat, 4)
            chat += [*map(int, answer.split()), turn]
        for stranger in range(2):
            written(running, asks([[(17 * n + 3 * turn + stranger) % WORDS for n in range(16)]], [2]), lambda step: ())
    assert running.steps.reused == 2 * (0 + 23 + 28)  # all but the last word of each answer, which was never read


def test_what_was_warmed_up_with_is_in_no_text(package, runner):
    running = find_handler(package, runner, "").running(3, 0, 32)
    assert running.warm()
    found = written(running, asks(PROMPTS[2:5], [6, 2, 9]), lambda step: ())
    model = gpt2()
    assert [text for text, *_ in found] == [expected(model, p, n) for p, n in zip(PROMPTS[2:5], [6, 2, 9], strict=True)]
    running.cache = None  # of a model that keeps nothing, the calls themselves are to be warmed up
    assert not running.warm()


def test_a_cache_takes_memory_when_it_is_written_to():
    before = psutil.Process().memory_info().rss
    zeros = cache._untouched_zeros((4, 1 << 26), torch.float32)
    zeros[2, 5:7] = torch.tensor([3.0, 4.0])
    assert zeros[:, :9].sum() == 7
    assert psutil.Process().memory_info().rss - before < 64 << 20  # of 1 GiB


def test_the_cache_has_a_bound(package, runner, monkeypatch):
    handler = find_handler(package, runner, "")
    row = 2 * 2 * 32 * 4 * 100  # layers, keys and values, width, bytes, tokens
    running = handler.running(8, 3 * row + 17, 256)
    assert (running.rows, running.cache.nbytes) == (3, 3 * row)
    with pytest.raises(UsageError, match="no text fits"):
        handler.running(8, row - 1, 256)
    monkeypatch.setattr(cache, "granted_memory_bytes", lambda: 2 * row)
    assert handler.running(8, 0, 256).rows == 1
    assert [cache.usual_bytes("cpu", workers) for workers in (1, 4)] == [row, row // 4]
    monkeypatch.setattr(cache, "granted_memory_bytes", lambda: 16)
    with pytest.raises(UsageError, match="no text fits into 8 B"):
        handler.running(8, 0, 256)


@pytest.mark.parametrize(
    "how", ["weights", *(pytest.param(how, marks=pytest.mark.slow) for how in ("autocast", "given"))]
)
def test_it_may_compute_in_another_type(tmp_path, how):
    """By the recipe, or because the model came so: what is kept has the type that the model computes in, whatever
    attention it was tuned with."""
    bf16 = "precision=bf16 grad=inference_mode attention=hf-eager"
    recipe = {"weights": bf16, "autocast": "precision=autocast-bf16", "given": ""}[how]
    model = llama(layers=1)  # it has conversions to float32 of its own
    package = packaged(tmp_path / "m", model.bfloat16() if how == "given" else model, recipe)
    assert "past" in {spec.name for spec in package.manifest.inputs}
    assert "attention" not in package.manifest.recipe
    assert (0 < package.manifest.accuracy["relative_error"] < 0.1) or how == "given"
    handler = find_handler(package, ModelRunner(package), "")
    assert [row[1] for row in written(handler.running(8, 0, 256), asks(PROMPTS[:3], [5, 6, 7]))] == [5, 6, 7]


@pytest.mark.parametrize(
    ("make", "level"),
    [(llama, "int4-blocks"),
     *(pytest.param(*one, marks=pytest.mark.slow)
       for one in ((gpt2, "int8-blocks"), (llama, "int8-blocks"), (gpt2, "int4-blocks")))],
)  # fmt: skip
def test_weights_may_be_held_in_few_bits(tmp_path, make, level):
    """As a study of texts finds it: what keeps keys and values, and guesses, is the server's own business."""
    if not {"avx2", "avx512_vnni"} & set(cpu_flags()):
        pytest.skip("needs AVX2 or AVX-512 VNNI")
    recipe = f"grad=inference_mode kv_cache=static precision=bf16 guessing=prompt weights={level}"
    layers = 1 if level == "int8-blocks" else 2  # it is packaged twice
    package = packaged(tmp_path / "m", make(layers), recipe, {"accuracy": {"error": 0.01, "perplexity": 3.0}})
    assert package.manifest.recipe == {"grad": "inference_mode", "weights": level}
    assert package.manifest.accuracy["tuned"] == {"divergence": 0.01, "allowed": None}
    assert 0 < package.manifest.accuracy["relative_error"] < (0.1 if level == "int8-blocks" else 0.7)
    handler = find_handler(package, ModelRunner(package), "")
    assert [row[1] for row in written(handler.running(8, 0, 256), asks(PROMPTS[:3], [5, 6, 7]))] == [5, 6, 7]
    if level == "int8-blocks":
        limits = {"limits": {"max_error": 1e-6}, "accuracy": {"error": 1e-7, "perplexity": 3.0}}
        with pytest.raises(UsageError, match="answers have a divergence of"):
            packaged(tmp_path / "n", make(layers), recipe, limits)


def test_the_layers_that_have_four_bits_are_those_that_were_chosen(tmp_path):
    if not {"avx2", "avx512_vnni"} & set(cpu_flags()):
        pytest.skip("needs AVX2 or AVX-512 VNNI")

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.gate, self.down = (torch.nn.Linear(32, size) for size in (32, 32, 64))

        def forward(self, x):
            return self.down(self.up(x) * self.gate(x).sigmoid())

    chosen, rows = ["inner.gate", "inner.down"], [torch.randn(4, 32), torch.randn(4, 32)]
    model = torch.nn.Sequential()
    model.inner = Gated()
    package = write_package(
        Workload(model, rows), Recipe({"weights": "int4-part"}), tmp_path / "m", name="gated",
        evidence={"int4_layers": chosen},
    )  # fmt: skip
    assert (package.manifest.recipe, package.manifest.four_bits) == ({"weights": "int4-part"}, tuple(chosen))
    assert 0.02 < package.manifest.accuracy["relative_error"] < 0.3
    made = in_blocks(load_program(package.folder), Blocks(4, package.manifest.four_bits))
    packed = [tensor for name, tensor in made.named_buffers() if name.startswith("packed")]
    assert sorted((tensor.shape[2], 16 * len(tensor)) for tensor in packed) == [(4, 32), (4, 64), (8, 32)]


def test_a_layer_with_four_bits_is_told_from_one_whose_name_ends_alike():
    layers = {"inner.model.out": 32, "inner.model.decoder.out": 32, "inner.model.decoder.head": 64}
    assert Blocks(4, ("out",)).among(layers) == {"inner.model.out"}
    assert Blocks(4, ("decoder.out",)).among(layers) == {"inner.model.decoder.out"}
    assert Blocks(4).among(layers) == {"inner.model.out", "inner.model.decoder.out"}


@pytest.mark.slow  # it compiles for a minute
def test_a_compiled_step_stays_compiled(tmp_path, monkeypatch):
    """One library for all sizes, with the weights in blocks in it, which the next start finds."""
    if not {"avx2", "avx512_vnni"} & set(cpu_flags()):
        pytest.skip("needs AVX2 or AVX-512 VNNI")
    monkeypatch.setenv("FETTLE_CACHE", str(tmp_path / "cache"))
    package = packaged(tmp_path / "m", llama(), "kv_cache=static-compiled weights=int8-blocks grad=inference_mode")
    assert package.manifest.recipe == {
        "grad": "inference_mode",
        "weights": "int8-blocks",
        "kv_cache": "static-compiled",
    }
    plain = packaged(tmp_path / "n", llama(), "kv_cache=static weights=int8-blocks grad=inference_mode")
    texts, libraries = [], []
    for one in (package, plain, package):
        texts.append(written(find_handler(one, ModelRunner(one), "").running(8, 0, 8), asks(PROMPTS[:4], [9, 6, 7, 5])))
        libraries.append([path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.pt2")])
    assert texts[0] == texts[1] == texts[2]
    assert len(libraries[0]) == 1
    assert libraries[0] == libraries[2]


def test_keys_and_values_are_kept_where_the_model_was_given_with_eager_attention(tmp_path):
    model = llama(layers=1, attn_implementation="eager")
    manifest = packaged(tmp_path / "m", model, "attention=hf-sdpa grad=inference_mode").manifest
    assert "past" in [spec.name for spec in manifest.inputs]
    assert manifest.recipe == {"grad": "inference_mode"}


def test_other_weights_in_few_bits_are_refused(tmp_path):
    for levels, said in (
        ("weights=int8-dynamic", "weights=int8-dynamic cannot be packaged: tune with"),
        ("weights=int8-blocks freeze=on", "weights=int8-blocks cannot be packaged: not beside freeze=on"),
        ("weights=int4-part", "names no layers: package the recipe.toml of the study that chose them"),
    ):
        with pytest.raises(UsageError, match=said):
            packaged(tmp_path / "m", gpt2(), levels)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_compiled_ahead_of_time_it_reads_the_cache_where_it_lies(tmp_path, monkeypatch, kind):
    """A cache's rows are a part of a larger tensor, in an order of their own and in the type that is computed in."""
    monkeypatch.setenv("FETTLE_CACHE", str(tmp_path / "cache"))
    package = packaged(tmp_path / "m", gpt2(layers=1).to(kind), "compile=default freeze=on grad=inference_mode")
    assert list((tmp_path / "cache").rglob("*.pt2"))
    running = find_handler(package, ModelRunner(package), "").running(8, 0, 8)
    assert running.cache._past.dtype == kind
    model = gpt2(layers=1).to(kind)
    found = written(running, asks(PROMPTS[2:6], [5, 6, 7, 8]), lambda step: ())
    wanted = [expected(model, prompt, most) for prompt, most in zip(PROMPTS[2:6], [5, 6, 7, 8], strict=True)]
    assert kind == torch.bfloat16 or [text for text, *_ in found] == wanted  # 16 bits are rounded otherwise


def sliding(window):
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=1.0, sliding_window=window, **SIZES,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).eval()


TWO_LAYERS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 1.0, **SIZES,
}  # fmt: skip


def by_turns(window):
    """The second layer has a window."""
    torch.manual_seed(0)
    window = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TWO_LAYERS, **window)).eval()


def capped(window):
    """The first layer has a window; attention is eager, since its scores are capped."""
    torch.manual_seed(0)
    size = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": window}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**TWO_LAYERS, **size)).eval()


@pytest.mark.parametrize(
    ("make", "window"),
    [(sliding, 6), *(pytest.param(make, 6, marks=pytest.mark.slow) for make in (by_turns, capped))],
)
def test_what_a_window_leaves_out_is_not_looked_at(tmp_path, make, window):
    model, most = make(window), [20, 6, 7, 12]
    running = find_handler(package := packaged(tmp_path / "m", model), ModelRunner(package), "").running(3, 0, 8)
    found = written(running, asks(PROMPTS[2:6], most))
    assert [text for text, *_ in found] == [
        expected(model, prompt, tokens) for prompt, tokens in zip(PROMPTS[2:6], most, strict=True)
    ]
    assert (running.cache is None) == (make is capped)


def test_a_mixture_of_experts_is_served_without_the_operator_of_transformers(tmp_path):
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    config = transformers.Qwen3MoeConfig(**{**TWO_LAYERS, "num_hidden_layers": 1}, **experts)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    package = packaged(tmp_path / "m", model)
    operators = (package.folder / "graph.json").read_text()
    assert "torch.ops.fettle.grouped_mm" in operators
    assert "torch.ops.transformers" not in operators
    running = find_handler(package, ModelRunner(package), "").running(3, 0, 8)
    assert running.cache is not None
    [(text, *_)] = written(running, asks(PROMPTS[2:3], [12]))
    assert text == expected(model, PROMPTS[2], 12)


@pytest.mark.parametrize("odd", ["chunks", "capped", "positions"])
def test_a_model_that_keeps_something_else_runs_the_whole_text(odd):
    if odd == "chunks":  # kept like windows, and seen otherwise
        config = transformers.Llama4TextConfig(
            hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, attention_chunk_size=6, num_local_experts=2, interleave_moe_layer_step=2,
            no_rope_layers=[1, 0], initializer_range=1.0, **SIZES,
        )  # fmt: skip
        model = transformers.Llama4ForCausalLM(config).eval()
    elif odd == "capped":
        model = capped(64)
    else:  # ALiBi: how far two tokens are apart is read off their places
        config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **SIZES)
        model = transformers.BloomForCausalLM(config).eval()
    [plain] = generating(workload(model))
    assert set(plain.inputs[0]) == {"input_ids", "attention_mask", "last"}


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_a_sample_of_tokens_without_their_name_keeps_keys_and_values_too(tokens):
    kept, plain = generating(Workload(llama(), [torch.randint(0, WORDS, (2, tokens))]))
    assert set(kept.inputs[0]) == {"input_ids", "attention_mask", "last", "seen", "past"}
    assert set(plain.inputs[0]) == {"input_ids", "last"}


def test_the_command_says_where_every_token_runs_the_whole_text(package):
    def said(inputs):
        out = Console(file=io.StringIO(), width=200)
        command._print(msgspec.structs.replace(package.manifest, inputs=inputs), Path("m"), out)
        return out.file.getvalue()

    assert "the whole text again" not in said(package.manifest.inputs)
    assert "the whole text again" in said(package.manifest.inputs[:3])


def test_samples_are_made_where_the_model_lies():
    """And not on the default device, which here has no values."""
    work = workload(llama())
    with torch.device("meta"):
        kept, plain = generating(work)
    made = [tensor for batch in (*kept.inputs, *plain.inputs) for tensor in batch.values()]
    assert {tensor.device.type for tensor in made} == {"cpu"}


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
                                   decoder_start_token_id=0, eos_token_id=None, initializer_factor=2.0)  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


TWO_PARTS = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128,
    "init_std": 0.3, "decoder_start_token_id": 0, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1,
}  # fmt: skip


def bart():
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**TWO_PARTS)).eval()


def own_answers(model, prompts, most):
    texts = [
        write(decoder_of(model), torch.tensor([prompt]), new_tokens=tokens)[0].tolist()
        for prompt, tokens in zip(prompts, most, strict=True)
    ]
    return ["".join(f" {token}" for token in text) for text in texts]


def m2m100():
    torch.manual_seed(0)
    return transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**TWO_PARTS)).eval()


@pytest.mark.parametrize("make", [t5, *(pytest.param(make, marks=pytest.mark.slow) for make in (bart, m2m100))])
def test_an_encoder_reads_the_prompts_and_its_decoder_writes(tmp_path, make):
    """Texts join and leave; each is the model's own, whatever the lengths of the others, and no token costs more than
    its own work: prompts are read by another call than tokens are written by."""
    model = make()
    running = find_handler(package := packaged(tmp_path / "m", model), ModelRunner(package), "").running(3, 0, 8)
    assert [spec.name for spec in package.manifest.inputs] == [
        "source", "source_mask", "input_ids", "attention_mask", "last", "seen", "past", "read"
    ]  # fmt: skip
    prompts, most = [*PROMPTS[:5], [5] * 100], [5, 6, 7, 3, 2, 4]
    found = written(running, asks(prompts, most), lambda step: ())
    layers = {
        outputs: sum("linear" in str(node.target) for node in part.__self__.graph.nodes)
        for outputs, part in running.cache.runner._model._parts.items()
    }
    assert [layers[outputs] for outputs in running.cache.halves] == [9, 8]
    assert found == [
        (text, tokens, "length") for text, tokens in zip(own_answers(model, prompts, most), most, strict=True)
    ]
    with pytest.raises(UsageError, match="at most 100 tokens, this one 101"):
        running.handler.room([5] * 101, Ask())


def test_a_decoder_that_attends_in_its_own_way_reads_the_whole_text(tmp_path):
    torch.manual_seed(0)
    model = transformers.MvpForConditionalGeneration(transformers.MvpConfig(**TWO_PARTS)).eval()
    running = find_handler(package := packaged(tmp_path / "m", model), ModelRunner(package), "").running(3, 0, 8)
    assert [spec.name for spec in package.manifest.inputs] == ["source", "source_mask", "input_ids", "last"]
    prompts, most = PROMPTS[2:7], [5, 6, 7, 3, 2]
    found = written(running, asks(prompts, most))
    assert [text for text, *_ in found] == own_answers(model, prompts, most)


@pytest.mark.slow
def test_an_answer_is_written_in_another_type(tmp_path):
    """Which is left to be applied when the package is loaded: each call computes both halves, and no decoder twice."""
    package = packaged(tmp_path / "m", t5(), "precision=autocast-bf16 grad=inference_mode")
    assert package.manifest.inputs[-1].name == "read"
    assert package.manifest.applied == ()
    assert sum("linear" in str(node.target) for node in load_program(package.folder).graph.nodes) == 9 + 8
    running = find_handler(package, ModelRunner(package), "").running(3, 0, 8)
    assert 0 < package.manifest.accuracy["relative_error"] < 0.1
    found = written(running, asks(PROMPTS[1:3], [6, 7]))
    assert [tokens for _, tokens, _ in found] == [6, 7]
    begun = [f" {text.split()[0]}" for text, *_ in found]  # later tokens may be rounded to others
    assert begun == own_answers(t5(), PROMPTS[1:3], [1, 1])


def test_an_encoder_of_sound_is_refused_in_a_line():
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.WhisperConfig(vocab_size=WORDS, d_model=32, encoder_layers=1, decoder_layers=1, **heads,
                                        pad_token_id=0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    with pytest.raises(UsageError, match="fills input_ids and attention_mask; the model takes input_features"):
        generating(Workload(model, [{"input_features": torch.zeros(1, 80, 3000)}]))


def test_a_text_is_no_longer_than_the_model_has_positions():
    assert of_model(llama(max_position_embeddings=64)) == {"max_tokens": 64, "max_new_tokens": 64}
    assert of_model(llama(max_position_embeddings=512)) == {"max_tokens": 512, "max_new_tokens": 256}
    assert of_model(llama(max_position_embeddings=4096)) == of_model(torch.nn.Linear(2, 2)) == {}
    assert of_model(llama(max_position_embeddings=4096), {"max_tokens": 4096}) == {"max_tokens": 4096}
    with pytest.raises(UsageError, match="has 128 positions"):
        of_model(gpt2(), {"max_tokens": 129})


def called_again(call):
    """Stands in for a CUDA graph, which no CPU has: what repeats a call writes into the outputs of the first."""
    outputs = call()

    def replay():
        for output, made in zip(outputs, call(), strict=True):
            output.copy_(made)

    return replay, outputs


def test_calls_filled_up_to_the_sizes_of_graphs_write_the_same_texts(package, runner):
    running = find_handler(package, runner, "").running(6, 0, 32)
    running.cache.recorded = recorded = Recorded(running.cache._filled, running.cache._past, called_again)
    running.warm()
    ready, texts = set(recorded.graphs), {}

    def tell(number, said):
        texts[number] = texts.get(number, "") + said.text

    prompts = [list(range(1, 2 + n)) for n in (0, 3, 20, 40, 9, 17)]
    for number, tokens in enumerate(prompts):  # one joins between two steps
        running.add(number, Ask(tokens=tuple(tokens), sampling=Sampling(max_tokens=8 + number, ignore_eos=True)))
        running.step(tell)
    while running.texts:
        running.step(tell)
    model = gpt2()
    for number, tokens in enumerate(prompts):
        assert texts[number] == expected(model, tokens, 8 + number)
    assert set(recorded.graphs) == ready  # no text waited for a recording


@pytest.mark.parametrize(
    ("first", "new", "kept", "size"),
    [
        (0, [1, 1, 1], [5, 130, 9], (4, 1, 256)),
        (0, [1] * 7, [5] * 7, (7, 1, 128)),  # no more rows than there are
        (0, [1], [900], (1, 1, 1000)),
        (3, [9, 20], [0, 0], (2, 32, 1)),
        (0, [1], [0], (1, 1, 128)),
        (3, [1], [0], (1, 16, 1)),
        (3, [1], [5], None),  # the last token of a prompt, in a row that is not the first
        (3, [9], [5], None),
    ],
)
def test_a_call_has_the_graph_of_the_next_larger_size(first, new, kept, size):
    recorded = Recorded(lambda given, past: [], torch.zeros(7, 2, 1000, 4), called_again)
    assert recorded.size(first, [[0] * n for n in new], kept) == size
    assert recorded(3, [[1, 2]], [5]) is None


@pytest.mark.parametrize("length", [96, 1000])
def test_every_prompt_that_a_call_may_have_is_recorded_beforehand(length):
    recorded = Recorded(lambda given, past: [], torch.zeros(4, 2, length, 4), called_again)
    recorded.add_all(100)
    assert {recorded.size(0, [[0] * n], [0]) for n in range(1, min(100, length) + 1)} <= recorded.graphs.keys()


def test_recording_ends_where_the_memory_does():
    def record(call):
        if room[0] < 3 or len(recorded.graphs) == 5:  # the largest do not fit
            room[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return called_again(call)

    room = [0]
    recorded = Recorded(lambda given, past: [], torch.zeros(4, 2, 1000, 4), record)
    recorded.add_all(100)
    kept = set(recorded.graphs)
    assert len(kept) == 5  # the smaller ones do
    assert recorded(0, [[1]], [5]) is None  # such a call runs by itself
    assert set(recorded.graphs) == kept
