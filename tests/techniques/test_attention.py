"""Attention written out by hand is rewritten exactly; what only looks like it is left alone."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fettle
from fettle.errors import UsageError
from fettle.recipe import Recipe
from fettle.techniques import conflict, load, probe_facts, source
from fettle.techniques._attention_rewrite import count_manual_attention
from fettle.workload import Workload


class Attention(nn.Module):
    """As it is written in a hundred repositories; `form` picks the spelling."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.form, self.drop, self.heads = form, nn.Dropout(0.1), 2
        self.register_buffer("causal", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x, mask=None):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.form == "einsum":
            weights = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.3
            out = torch.einsum("b h i j, b h j d -> b h i d", self.drop(weights.softmax(dim=-1)), v)
        elif self.form == "gpt":
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.causal[:, :, :N, :N] == 0, float("-inf"))
            out = nn.functional.softmax(scores, dim=-1) @ v
        elif self.form == "divided":
            scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(C // self.heads)
            if mask is not None:
                scores = scores + mask
            out = torch.matmul(torch.softmax(scores, dim=-1), v)
        elif self.form == "shifted":
            scores = (q @ k.transpose(-2, -1)) * 0.3 + (0.5 if mask is None else mask)
            out = torch.softmax(scores, dim=-1) @ v
        elif self.form == "kept":  # the weights go to the caller too
            weights = torch.softmax(q @ k.transpose(-2, -1), dim=-1)
            return self.proj((weights @ v).transpose(1, 2).reshape(B, N, C)), weights
        else:  # over the wrong dimension
            out = torch.softmax(q @ k.transpose(-2, -1), dim=1) @ v
        return self.proj(out.transpose(1, 2).reshape(B, N, C))


class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return torch.softmax(x @ x.transpose(-2, -1), dim=-1) @ x


def optimised(model, batch, **levels):
    torch.manual_seed(0)
    recipe = Recipe({"mode": "eval", "attention": "sdpa", **levels})
    return load(source(recipe, probe_facts(Workload(model, [batch]))), "optimized")(model, [batch])


@pytest.mark.parametrize("form", ["einsum", "gpt", "divided", "shifted"])
@pytest.mark.parametrize("masked", [False, True])
def test_exact(form, masked):
    model = nn.ModuleList([Attention(form)])[0]
    x = torch.randn(2, 9, 16)
    mask = torch.randn(2, 1, 9, 9) if masked and form in ("divided", "shifted") else None
    batch = (x, mask) if mask is not None else (x,)
    assert probe_facts(Workload(model, [batch])).manual_attention == 1
    expected = model.eval()(*batch)
    run = optimised(model, batch)
    called = []
    attention = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = lambda *a, **k: called.append(1) or attention(*a, **k)
    try:
        torch.testing.assert_close(run(*batch), expected)
        assert called == [1]
        # another form of call takes the old path, another length the new one
        other = (x[:, :5],) if mask is None else (x,)
        torch.testing.assert_close(run(*other), Attention.forward(model, *other))
    finally:
        nn.functional.scaled_dot_product_attention = attention
    if mask is not None:
        assert called == [1]


def test_attention_that_two_parts_share_is_rewritten_once():
    shared = Attention("gpt")
    model = nn.ModuleDict({name: nn.Sequential(shared, nn.Linear(16, 4)) for name in "ab"}).eval()
    x = torch.randn(2, 9, 16)
    work = Workload(model, [x], lambda model, x: (model["a"](x), model["b"](x)), parts=["a", "b"])
    wanted = work.run(model, x)
    torch.testing.assert_close(fettle.apply(work, "attention[a]=sdpa attention[b]=sdpa")(x), wanted)
    assert shared.forward.args[1].__func__ is Attention.forward  # and not what stands in its place


@pytest.mark.parametrize("model", [Attention("kept"), Attention("wrong"), Branching()])
def test_left_alone(model):
    x = torch.randn(2, 4, 16)
    model.eval()
    assert count_manual_attention(model, lambda: model(x)) == 0
    with pytest.raises(RuntimeError, match="attention: matched 0 of"):
        optimised(model, (x,))


class Scaled(Attention):
    """A query that is scaled in place, and a mask of a few."""

    def __init__(self, fill: float) -> None:
        super().__init__("scaled")
        self.fill = fill

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q.mul_(0.1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(self.causal[0, :, : x.shape[1], : x.shape[1]] == 0, self.fill)
        return torch.softmax(scores, dim=-1) @ v


def test_what_is_changed_in_place_and_used_by_nobody_stays():
    model, x = Scaled(float("-inf")).eval(), torch.randn(2, 9, 16)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(optimised(model, (x,))(x), expected)


def test_a_fill_that_does_not_drown_the_scores_is_left_alone():
    model, x = Scaled(1e-9).eval(), torch.randn(2, 9, 16)
    model.requires_grad_(False)
    assert count_manual_attention(model, lambda: model(x)) == 0


def test_rewritten_attention_compiles_in_one_graph_and_follows_its_weights():
    model, x = nn.Sequential(Attention("gpt"), Attention("divided")).eval(), torch.randn(2, 9, 16)
    expected = model(x)
    run = optimised(model, (x,))
    graphs = torch._dynamo.explain(run)(x)
    assert graphs.graph_break_count == 0
    model.to(torch.float64)
    torch.testing.assert_close(run(x.double()), expected.double(), atol=1e-5, rtol=1e-5)


def test_transformers_implementations():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model, ids = transformers.BertModel(config).eval(), torch.arange(8).reshape(1, 8)
    facts = probe_facts(Workload(model, [ids]))
    assert facts.hf_attention == ("sdpa", "eager")
    expected = model(ids).last_hidden_state
    run = load(source(Recipe({"attention": "hf-eager"}), facts), "optimized")(model, [ids])
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(run(ids).last_hidden_state, expected)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_window_is_computed_some_tokens_at_a_time(kind: str, monkeypatch) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                "intermediate_size": 16, "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    if kind == "encoder":
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
        model = transformers.ModernBertModel(transformers.ModernBertConfig(**settings, **tokens, local_attention=40))
    else:
        more = {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 40, "pad_token_id": 0, "use_cache": False}
        model = transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**settings, **more))
    ids, mask = torch.randint(1, 32, (2, 700)), torch.ones(2, 700).long()
    mask[1, :400] = 0
    batches = [{"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}]
    facts = probe_facts(Workload(model.eval(), batches))
    recipe = Recipe({"attention": "windowed"})
    assert not conflict(recipe, facts)
    assert "cannot look up what a mask shows" in conflict(recipe.with_levels(compile="default"), facts)
    short = probe_facts(Workload(model, [ids[:, :200]]))
    assert not short.has_window
    assert "256 tokens" in conflict(recipe, short)
    expected = [model(**batch).last_hidden_state for batch in batches]
    keys = []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda *args, **more: keys.append(args[1].shape[2]) or attend(*args, **more))  # fmt: skip
    run = load(source(recipe, facts), "optimized")(model, batches)
    for batch, wanted in zip(batches, expected, strict=True):
        there = batch.get("attention_mask", torch.ones_like(ids)) > 0
        torch.testing.assert_close(run(**batch).last_hidden_state[there], wanted[there])
    assert max(keys) == 700
    assert min(keys) < 256 + 40
    exported = torch.export.export(model, (ids,)).module()  # which has the whole
    torch.testing.assert_close(exported(ids).last_hidden_state, expected[0])


def test_what_was_chosen_when_the_model_was_built_is_no_level():
    transformers = pytest.importorskip("transformers")
    config = transformers.SamVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32, mlp_dim=16, window_size=0,
        global_attn_indexes=[0], output_channels=8,
    )  # fmt: skip
    model = transformers.SamVisionModel(config).eval()
    assert model._can_set_attn_implementation()  # so it says, for the sake of the mask decoder in the same file
    facts = probe_facts(Workload(model, [torch.rand(1, 3, 32, 32)]))
    assert facts.hf_attention == ("sdpa",)
    with pytest.raises(UsageError, match="attention=hf-eager: this model cannot be switched to eager here"):
        fettle.apply(model, "attention=hf-eager", [torch.rand(1, 3, 32, 32)])


def test_a_copy_has_weights_of_its_own():
    model, x = nn.Sequential(Attention("gpt")), torch.randn(2, 9, 16)
    run = optimised(model, (x,))
    copied = copy.deepcopy(run)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(x).any()
    assert run(x).any()


class Remembering(Attention):
    """Its weights are for whoever looks at the module."""

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self.seen: list[object] = []

    def forward(self, x):
        weights = (x @ x.transpose(-2, -1)).softmax(-1)
        if self.form == "attribute":
            self.last = weights
        else:
            self.seen.append(weights)
        return weights @ x


@pytest.mark.parametrize("form", ["attribute", "list"])
def test_what_a_module_keeps_of_its_weights_goes_on_being_kept(form):
    model, x = Remembering(form).eval(), torch.randn(2, 4, 16)
    assert probe_facts(Workload(model, [x])).manual_attention == 0
    assert not model.seen
    assert not hasattr(model, "last")  # what the probe's calls left there is gone
    model(x)
    kept = [*model.seen, *([model.last] if form == "attribute" else [])]
    assert kept
    assert all(isinstance(weights, torch.Tensor) for weights in kept)


def test_a_hook_on_the_weights_goes_on_being_called():
    model, x, seen = Attention("einsum").eval(), torch.randn(2, 4, 16), []
    assert count_manual_attention(model, lambda: model(x)) == 1
    model.drop.register_forward_hook(lambda *call: seen.append(call))
    assert count_manual_attention(model, lambda: model(x)) == 0


def test_a_module_with_a_forward_of_its_own_is_left_alone():
    model, x = Attention("einsum").eval(), torch.randn(2, 4, 16)
    of_class = model.forward
    model.forward = lambda x: 2 * of_class(x)
    assert count_manual_attention(model, lambda: model(x)) == 0


class Shifting(nn.Module):
    """It writes into its input, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.place = Attention("gpt"), nn.Parameter(torch.randn(9, 16))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x += self.place
        return self.attention(x) * self.calls


def test_tracing_leaves_the_batch_and_the_buffers_as_they_were():
    model, batch = Shifting().eval().requires_grad_(False), torch.randn(2, 9, 16)
    before, wanted = batch.clone(), copy.deepcopy(model)(batch.clone())
    run = fettle.apply(model, "attention=sdpa", [batch])
    assert torch.equal(batch, before)
    assert model.calls == 0
    torch.testing.assert_close(run(batch), wanted)


class Drawing(nn.Module):
    """It remembers a count, where its generator is, and what its first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.generator = 0, torch.Generator().manual_seed(0)
        self.attention = Biased()

    def forward(self, x):
        self.steps += 1
        return self.attention(x + torch.randn(x.shape, generator=self.generator)) * self.steps


class Biased(nn.Module):
    bias = None

    def forward(self, x):
        if self.bias is None:
            self.bias = torch.arange(81.0).reshape(9, 9) / 81
        return torch.softmax(x @ x.transpose(-2, -1) + self.bias, dim=-1) @ x


def test_tracing_leaves_what_a_model_remembers_as_it_was():
    model, batch = Drawing().eval(), torch.randn(2, 9, 16)
    wanted = copy.deepcopy(model)(batch)
    assert probe_facts(Workload(model, [batch])).manual_attention == 1
    assert model.attention.bias is None
    run = fettle.apply(model, "attention=sdpa", [batch])
    assert model.steps == 0
    torch.testing.assert_close(run(batch), wanted)


def test_only_a_model_that_writes_into_its_input_is_given_copies():
    facts = probe_facts(Workload(Shifting().eval(), [torch.randn(2, 9, 16)]))
    recipe = Recipe.parse("attention=sdpa")
    assert facts.changes_inputs
    assert "map_tensors(torch.clone, batch, caches=True)" in source(recipe, facts)
    assert "map_tensors" not in source(Recipe.parse("grad=no_grad"), facts)
    assert "map_tensors" not in source(recipe, replace(facts, changes_inputs=False))


def test_attention_beside_torchscript_is_found():
    model, x = nn.Sequential(torch.jit.script(nn.Linear(16, 16)), Attention("gpt")).eval(), torch.randn(2, 9, 16)
    wanted = model(x)
    assert probe_facts(Workload(model, [x])).manual_attention == 1
    torch.testing.assert_close(fettle.apply(model, "attention=sdpa", [x])(x), wanted)
