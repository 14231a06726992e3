"""Which matrices tensor parallelism splits, and why it does not."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fettle.recipe import Recipe
from fettle.techniques import Facts, conflict, source, split_bytes, tensor_plan

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "vocab_size": 64}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, heads: int, attribute: str) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(32, 32) for _ in range(4))
        setattr(self, attribute, heads)


class Block(nn.Module):
    """Attention and an MLP under the usual names."""

    def __init__(self, attribute: str = "num_heads", between: bool = False) -> None:
        super().__init__()
        self.attn = Attention(4, attribute)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(32, 48), "fc2": nn.Linear(48, 32)})
        if between:
            self.mlp["norm"] = nn.LayerNorm(48)


def blocks(*arguments: object) -> nn.Module:
    return nn.Sequential(*(Block(*arguments) for _ in range(3)))


def test_a_transformers_model_says_itself_what_is_split() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16))
    plan = tensor_plan(nn.ModuleDict({"inner": model}))
    assert plan.columns[:3] == tuple(f"inner.model.layers.*.self_attn.{name}_proj" for name in "qkv")
    assert plan.rows == ("inner.model.layers.*.self_attn.o_proj", "inner.model.layers.*.mlp.down_proj")
    assert plan.per_head == ("inner.model.layers.*.self_attn.q_norm", "inner.model.layers.*.self_attn.k_norm")
    assert plan.attentions == ()  # its views have -1 for the number of heads
    assert plan.why_not_over(2) == ""
    assert plan.why_not_over(3) == "3 ranks do not divide its 4 attention heads"
    assert plan.why_not_over(4) == "4 ranks do not divide its 2 heads of keys and values"
    sizes = [p.numel() * 4 for name, p in model.named_parameters() if "_proj" in name]
    assert split_bytes(model, tensor_plan(model)) == (sum(sizes), sum(sizes))


def test_elsewhere_names_say_it() -> None:
    plan = tensor_plan(blocks())
    assert plan.columns == ("*.attn.q_proj", "*.attn.k_proj", "*.attn.v_proj", "*.mlp.fc1")
    assert plan.rows == ("*.attn.out_proj", "*.mlp.fc2")
    assert plan.attentions == ("*.attn",)
    assert plan.counts == {"its 4 attention heads": 4, "the 48 features inside an MLP": 48}


def test_names_of_bert() -> None:
    transformers = pytest.importorskip("transformers")
    plan = tensor_plan(transformers.BertModel(transformers.BertConfig(**SIZES)))
    assert plan.rows == ("encoder.layer.*.attention.output.dense", "encoder.layer.*.output.dense")
    assert plan.attentions == ("encoder.layer.*.attention.self",)


@pytest.mark.parametrize(("kind", "ups"), [("relu", ["wi"]), ("gated-gelu", ["wi_0", "wi_1"])])
def test_the_mlps_of_t5(kind: str, ups: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "vocab_size": 64}
    plan = tensor_plan(transformers.T5Model(transformers.T5Config(**sizes, feed_forward_proj=kind)))
    inside = [f"{half}.block.*.layer.{place}.DenseReluDense" for half, place in (("encoder", 1), ("decoder", 2))]
    assert plan.columns == tuple(f"{name}.{up}" for name in inside for up in ups)
    assert plan.rows == tuple(f"{name}.wo" for name in inside)
    assert plan.counts == {"the 48 features inside an MLP": 48}


def test_only_complete_pairs_are_split() -> None:
    model = blocks()
    del model[1].attn.v_proj
    plan = tensor_plan(model)
    assert plan.columns[:2] == ("0.attn.q_proj", "2.attn.q_proj")  # a star would mean the middle one's too
    assert "*.mlp.fc1" in plan.columns
    shared = blocks()
    for block in shared:
        block.mlp["fc2"].weight = block.mlp["fc1"].weight = nn.Parameter(torch.zeros(48, 48))
    assert tensor_plan(shared).rows == ("*.attn.out_proj",)


def test_what_cannot_be_split_says_why() -> None:
    assert tensor_plan(nn.Linear(2, 2)).why_not_over(2).startswith("the model has no pairs of Linear layers")
    assert tensor_plan(blocks("num_heads", True)).rows == ("*.attn.out_proj",)
    assert tensor_plan(blocks("experts")).rows == ("*.mlp.fc2",)  # nobody knows how many heads
    assert "parameters between their matrices" in tensor_plan(blocks("experts", True)).why_not
    assert Facts().tensor.why_not_over(2) == "the model was not looked at"


def test_levels_are_offered_where_ranks_divide_the_model() -> None:
    facts = Facts(mode="training", samples=6, tensor=tensor_plan(blocks()), ranks=4)
    why_not = {kind: conflict(Recipe({"parallel": kind}), facts) for kind in ("ddp", "tensor", "zero3-tensor")}
    assert "6 rows cannot be cut into 4" in why_not["ddp"]
    assert why_not["tensor"] == why_not["zero3-tensor"] == ""  # all ranks see all rows; two groups see three each
    assert "8 ranks do not divide its 4" in conflict(Recipe.parse("parallel=tensor"), replace(facts, ranks=8))
    assert "2 ranks cannot form" in conflict(Recipe.parse("parallel=zero3-tensor"), replace(facts, ranks=2))
    apart = replace(facts, ranks=2, nodes=2)
    assert "a node has one rank" in conflict(Recipe.parse("parallel=zero3-tensor"), apart)
    assert "keeps copies of its own" in conflict(Recipe.parse("parallel=tensor precision=bf16-master"), facts)
    assert "needs parallel=zero2" in conflict(Recipe.parse("parallel=zero3-tensor offload=cpu"), facts)


def test_the_lines_name_what_is_split() -> None:
    facts = Facts(mode="training", samples=8, tensor=tensor_plan(blocks()), ranks=8, nodes=2)
    text = source(Recipe.parse("parallel=zero3-tensor"), facts)
    assert 'init_device_mesh("cpu", (world // 4, 4), mesh_dim_names=("shard", "tensor"))' in text
    assert 'rows = (\n        "*.attn.out_proj",\n        "*.mlp.fc2",\n    )' in text
    assert 'split_over(model, mesh["tensor"], columns, rows, ("*.attn",), ())' in text
    assert 'own_rows(data, mesh["shard"].get_local_rank(), mesh["shard"].size())' in text
    assert "own_rows" not in source(Recipe.parse("parallel=tensor"), replace(facts, ranks=4, nodes=1))
