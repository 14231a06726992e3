"""Rows of unequal length: each gets the answer that it gets alone, whatever lies beside it."""

import copy
import dataclasses
import functools
import types

import pytest
import torch
from torch import nn

import fettle
from fettle.recipe import Recipe
from fettle.techniques import bundles, conflict, load, probe_facts, source
from fettle.techniques._packed import PackedRows
from fettle.techniques.ragged import ByLength
from fettle.train import TrainingWorkload, training_facts


class Reader(nn.Module):
    """Attention, so that a row's answer would show places that do not belong to it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(50, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.name = "reader"

    def forward(self, ids, mask=None):
        x = self.words(ids)
        padding = None if mask is None else mask == 0
        x = x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return {"each": x, "first": x[:, 0], "ids": ids}


def _batch(lengths: list[int], places: int) -> dict[str, torch.Tensor]:
    mask = (torch.arange(places) < torch.tensor(lengths)[:, None]).long()
    return {"ids": torch.randint(1, 50, mask.shape) * mask, "mask": mask}


@pytest.fixture
def model() -> Reader:
    torch.manual_seed(0)
    return Reader().eval()


@pytest.mark.parametrize("level", ["trimmed", "grouped"])
@pytest.mark.parametrize("lengths", [[40, 3, 17, 40, 1, 22], [5, 5, 5], [64, 2], [7] * 40 + [60] * 9])
def test_each_row_is_answered_as_alone(model: Reader, level: str, lengths: list[int]) -> None:
    batch = _batch(lengths, 64)
    workload = fettle.Workload(model, batch, padding="mask")
    facts = probe_facts(workload)
    assert facts.padding is not None
    assert facts.padding.axes == (("ids", 1), ("mask", 1))
    assert facts.padding.share == pytest.approx(1 - sum(lengths) / (64 * len(lengths)))
    run = load(source(Recipe({"ragged": level}), facts), level)(model, [batch])
    assert run.name == "reader"
    run.name = "other"
    assert model.name == "other"
    with torch.no_grad():
        found = run(**batch)
        assert found["each"].shape == (len(lengths), 64, 16)
        for row, length in enumerate(lengths):
            alone = model(batch["ids"][row : row + 1, :length])
            torch.testing.assert_close(found["each"][row, :length], alone["each"][0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found["first"][row], alone["first"][0], atol=1e-5, rtol=1e-4)


def test_what_is_filled_from_the_left_or_has_no_mask_is_run_as_given(model: Reader) -> None:
    asked = []
    model.register_forward_pre_hook(lambda _, args, kwargs: asked.append(kwargs), with_kwargs=True)
    run = ByLength(model, "mask", {"ids": 1, "mask": 1})
    batch = _batch([9, 4], 12)
    left = {name: value.flip(1) for name, value in batch.items()}
    empty = {**batch, "mask": batch["mask"] * torch.tensor([[1], [0]])}
    for one in ({"ids": batch["ids"]}, left, empty):
        run(**one)
        assert asked.pop() == one
        assert not asked


def test_another_form_of_call_than_the_sample_is_run_as_given(model: Reader) -> None:
    batch = _batch([9, 4, 2], 12)
    run = ByLength(model, "mask", {"ids": 1, "mask": 1})
    with torch.no_grad():
        found, wanted = run(batch["ids"], mask=batch["mask"]), model(**batch)
    torch.testing.assert_close(found["each"], wanted["each"])


class Weighted(Reader):
    """Beside the rows it takes a table, which is the same for all of them."""

    def forward(self, ids, mask, table):
        return super().forward(ids, mask)["first"] @ table.T


def test_a_table_of_as_many_entries_as_there_are_rows_is_no_rows() -> None:
    torch.manual_seed(0)
    model, table = Weighted().eval(), torch.rand(3, 16)
    facts = probe_facts(fettle.Workload(model, {**_batch([9, 4, 2, 8], 12), "table": table}))
    assert facts.padding is not None
    assert facts.padding.whole == ("table",)
    batch = {**_batch([2, 9, 40], 40), "table": table}
    run = load(source(Recipe({"ragged": "grouped"}), facts), "table")(model, [batch])
    with torch.no_grad():
        torch.testing.assert_close(run(**batch), model(**batch), atol=1e-5, rtol=1e-4)


def test_a_mask_by_its_place(model: Reader) -> None:
    ids, mask = _batch([9, 4, 2], 12).values()
    workload = fettle.Workload(model, [(ids, mask)], call=lambda model, *batch: model(*batch)["first"])
    facts = probe_facts(workload)
    assert facts.padding is not None
    assert facts.padding.mask == 1
    assert "ByLength(model, 1, {0: 1, 1: 1})" in source(Recipe({"ragged": "grouped"}), facts)


class Asked(nn.Module):
    """Questions beside documents, which have a length of their own."""

    def forward(self, question, mask, document):
        return {"asked": (question * mask).cumsum(1), "told": document.cumsum(1)}


def test_a_batch_of_no_rows_is_run_as_given() -> None:
    none = torch.zeros(0, 12)
    run = ByLength(Asked(), "mask", {"question": 1, "mask": 1})
    assert run(question=none, mask=none, document=none)["asked"].shape == (0, 12)


def test_another_sequence_of_the_same_length_by_chance_is_left_whole() -> None:
    def batch(places: int, others: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(places) < torch.tensor([5, 3, 2])[:, None]).float()
        return {"question": torch.rand(3, places), "mask": mask, "document": torch.rand(3, others)}

    first = batch(8, 20)
    facts = probe_facts(fettle.Workload(Asked().eval(), first))
    assert facts.padding is not None
    assert facts.padding.axes == (("question", 1), ("mask", 1))
    run = load(source(Recipe({"ragged": "trimmed"}), facts), "trimmed")(Asked().eval(), [first])
    for one in (first, batch(8, 8), batch(8, 30), batch(8, 12)):
        told = run(**one)["told"]
        torch.testing.assert_close(told, one["document"].cumsum(1))


class Listener(nn.Module):
    """Channels first, and an answer for every second place, as in front of a recogniser of text or speech."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)

    def forward(self, pictures, mask):
        x = self.first(pictures) * mask[:, None, None]
        return self.second(x).mean(2).transpose(1, 2)


@pytest.mark.parametrize("level", ["trimmed", "grouped"])
@pytest.mark.parametrize("places", [64, 96])
def test_places_in_the_last_axis_and_an_answer_for_every_second(level: str, places: int) -> None:
    lengths = [64, 8, 34, 62, 20, 22]
    mask = (torch.arange(places) < torch.tensor(lengths)[:, None]).float()
    model = Listener().eval()
    batch = {"pictures": torch.randn(6, 1, 16, places) * mask[:, None, None], "mask": mask}
    workload = fettle.Workload(nn.ModuleDict({"listener": model}), batch, parts=["listener"],
                               call=lambda whole, **batch: whole["listener"](**batch))  # fmt: skip
    facts = probe_facts(workload)
    padding = facts.parts["listener"].padding
    assert padding is not None
    assert padding.axes == (("pictures", 3), ("mask", 1))
    assert "set for each part" in conflict(Recipe({"ragged": level}), facts)
    recipe = Recipe({"ragged[listener]": "grouped" if places == 64 else level})
    run = load(source(recipe, facts), level)(workload.model, [batch], workload.call)
    with torch.no_grad():
        found = run(**batch)
        assert found.shape == (6, places // 2, 6)
        for row, length in enumerate(lengths):
            alone = model(batch["pictures"][row : row + 1, ..., :length], mask[row : row + 1, :length])[0]
            torch.testing.assert_close(found[row, : length // 2], alone, atol=1e-5, rtol=1e-4)


class Judged(Reader):
    """Answers with its loss, as transformers' models do that are given labels."""

    def forward(self, ids, mask):
        each = super().forward(ids, mask)["each"]
        return {"loss": ((each - 1) ** 2 * mask[..., None]).sum() / mask.sum(), "each": each}


def mean_loss(model, batch):
    found = model(**batch)
    if "loss" in found:
        return found["loss"]
    return ((found["each"] - 1) ** 2 * batch["mask"][..., None]).sum() / batch["mask"].sum()


@pytest.mark.parametrize(("kind", "level"), [(Reader, "grouped"), (Reader, "trimmed"), (Judged, "trimmed")])
def test_training_leaves_padding_out_and_learns_the_same(kind: type[Reader], level: str) -> None:
    torch.manual_seed(0)
    model, data = kind(), [_batch([40, 3, 17, 40, 1, 22], 64), _batch([9, 30, 2, 2, 2, 2], 64)]
    workload = TrainingWorkload(model, functools.partial(torch.optim.SGD, lr=0.01), mean_loss, data)
    facts = training_facts(workload)
    assert {bundle.levels.get("ragged") for bundle in bundles(facts)} >= {"trimmed" if kind is Judged else "grouped"}
    refused = conflict(Recipe({"ragged": "grouped"}), facts)
    assert ("such as a loss" in refused) == (kind is Judged)
    assert "ranks" in conflict(Recipe({"ragged": level, "parallel": "ddp"}), facts)
    losses, places = [], []
    for recipe in (Recipe(), Recipe({"ragged": level})):
        train, own = load(source(recipe, facts), str(recipe)), copy.deepcopy(model)
        own.words.register_forward_pre_hook(lambda _, args: places.append(args[0].numel()))
        steps = train(own, workload.optimizer, mean_loss, data)
        losses.append([float(value) for _, value in zip(range(4), steps, strict=False)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][2] < losses[0][0]
    assert sum(places[4:]) < 0.8 * sum(places[:4])


def test_training_that_goes_by_all_rows_of_a_batch_keeps_them() -> None:
    model = Reader()
    model.norm = nn.BatchNorm1d(3)
    workload = TrainingWorkload(model, functools.partial(torch.optim.SGD, lr=0.01), mean_loss, [_batch([9, 4, 2], 12)])
    assert "running averages" in conflict(Recipe({"ragged": "grouped"}), training_facts(workload))


def test_one_number_for_all_rows_has_no_groups() -> None:
    run = ByLength(Judged(), "mask", {"ids": 1, "mask": 1})
    with pytest.raises(RuntimeError, match="one number for all rows"):
        run(**_batch([60, 60, 60, 60, 60, 2], 64))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda batch: {"ids": batch["ids"]}, "no argument masks"),
        (lambda batch: _batch([12, 12, 11], 12), "3% of the places are padding"),
        (lambda batch: {name: value.flip(1) for name, value in batch.items()}, "no argument masks"),
    ],
)
def test_where_it_is_not_offered(model: Reader, change, why: str) -> None:
    facts = probe_facts(fettle.Workload(model, change(_batch([9, 4, 2], 12))))
    assert why in conflict(Recipe({"ragged": "grouped"}), facts)


def test_a_program_for_each_shape_is_not_made(model: Reader) -> None:
    facts = probe_facts(fettle.Workload(model, _batch([9, 4, 2], 12)))
    assert "compile=default makes a program for each shape" in conflict(
        Recipe({"ragged": "grouped", "compile": "default"}), facts
    )


def test_answers_at_places_that_are_filled_up_are_judged_unless_the_workload_says_otherwise(model: Reader) -> None:
    batch = _batch([9, 4], 12)
    output = model(**batch)
    judged = fettle.Workload(model, batch, padding="mask").judged(output, batch)
    assert not judged["each"][1, 4:].any()
    assert torch.equal(judged["each"][1, :4], output["each"][1, :4])
    assert torch.equal(judged["first"], output["first"])
    assert fettle.Workload(model, batch).judged(output, batch) is output
    with pytest.raises(fettle.UsageError, match="batch 1 has no argument of that name"):
        fettle.Workload(model, batch, padding="attention_mask")


class Deep(nn.Module):
    """Blocks of attention: torch's own, with a mask of what lies before if `causal`, and a layer for each place."""

    def __init__(self, causal: bool = False, loss: bool = False, kind: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.words, self.where, self.causal, self.loss = nn.Embedding(50, 16), nn.Embedding(64, 16), causal, loss
        own = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(kind() for _ in range(2)) if kind else nn.TransformerEncoder(own, 2)
        self.head = nn.Linear(16, 7)

    def forward(self, ids, mask):
        x, places = self.words(ids) + self.where.weight[: ids.shape[1]], ids.shape[1]
        if isinstance(self.blocks, nn.ModuleList):
            for block in self.blocks:
                x = block(x)
        else:
            later = torch.ones(places, places, dtype=torch.bool).triu(1) if self.causal else None
            x = self.blocks(x, later, src_key_padding_mask=mask == 0)
        answer = {"each": self.head(x), "first": x[:, 0]}
        if self.loss:
            answer["loss"] = ((answer["each"] - 1) ** 2 * mask[..., None]).sum() / mask.sum()
        return answer


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return x + (q @ k.transpose(1, 2)).masked_fill(later, -torch.inf).softmax(-1) @ v


class Heads(ByHand):
    """A penalty for how far away a place lies, as ALiBi has it, or what lies before without a mask."""

    penalty = True

    def slopes(self):
        return torch.tensor([0.5, 1, 2, 4])

    def forward(self, x):
        q, k, v = self.project(x).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1], dtype=x.dtype)
        away = -(places[:, None] - places).abs() * self.slopes()[:, None, None]
        away = away.masked_fill(places[:, None] < places, -torch.inf)
        attend = nn.functional.scaled_dot_product_attention
        seen = attend(q, k, v, away) if self.penalty else attend(q, k, v, is_causal=True)
        return x + seen.transpose(1, 2).flatten(2)


class Learned(Heads):
    """Penalties that are learned, and begin as none."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(4))

    def slopes(self):
        return self.learned


class Plain(Heads):
    penalty = False


class Smoothed(Plain):
    """Looks at a row's neighbours, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x):
        return super().forward(x) + self.mix(x.transpose(1, 2)).transpose(1, 2)


class Recomputed(Plain):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Placed(Plain):
    """Given a table of its own for each row, as wide as 4 places are long."""

    def forward(self, x, table):
        return super().forward(x + table.repeat(1, 1, 4))


class Given(Deep):
    def forward(self, ids, mask):
        x = self.words(ids)
        table = torch.arange(ids.shape[1])[:, None] * torch.arange(4) / 9
        for block in self.blocks:
            x = block(x, table.expand(len(ids), -1, -1))
        return x


class Beside(Deep):
    """Beside the rows are others, which blocks or a layer of their own read."""

    def forward(self, ids, mask, others):
        read = self.blocks[0] if self.causal else self.head
        return {**super().forward(ids, mask), "others": read(self.words(others))}


LENGTHS = [40, 3, 17, 40, 1, 22]


def _packed(model, batch, seen):
    """The model with its blocks packed; `seen` gets the places of each linear layer inside of them."""
    facts = probe_facts(fettle.Workload(model, batch))
    assert facts.padding is not None
    assert facts.padding.not_packed == ""
    run = load(source(Recipe({"ragged": "packed"}), facts), "packed")(model, [batch])

    def note(_, args):
        if not args[0].is_nested:  # as torch's encoder has it where it is run as given
            seen.append(args[0].shape[:-1].numel())

    for layer in next(module for module in model.modules() if isinstance(module, nn.ModuleList)).modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(note)
    return run


@pytest.mark.parametrize("places", [40, 64])
@pytest.mark.parametrize("made", [Deep, functools.partial(Deep, causal=True), functools.partial(Deep, kind=Heads),
                                  functools.partial(Deep, kind=Plain)])  # fmt: skip
def test_packed_rows_are_answered_as_alone(made, places: int) -> None:
    torch.manual_seed(0)
    model, batch, seen = made().eval(), _batch(LENGTHS, places), []
    run = _packed(model, batch, seen)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            found = run(**batch)
        assert found["each"].shape == (6, places, 7)
        for row, length in enumerate(LENGTHS):
            alone = model(batch["ids"][row : row + 1, :length], batch["mask"][row : row + 1, :length])
            torch.testing.assert_close(found["each"][row, :length], alone["each"][0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found["first"][row], alone["first"][0], atol=1e-5, rtol=1e-4)
    del seen[:]
    run(**batch)
    assert set(seen) == {sum(LENGTHS)}


_SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "max_position_embeddings": 80}  # fmt: skip
_HEADS = {**_SIZES, "num_key_value_heads": 2, "use_cache": False}


@pytest.mark.parametrize(
    ("kind", "config", "options"),
    [
        ("BertModel", "BertConfig", _SIZES),
        ("BertForSequenceClassification", "BertConfig", _SIZES),
        ("DistilBertForMaskedLM", "DistilBertConfig", {"vocab_size": 50, "dim": 32, "hidden_dim": 64, "n_layers": 2,
                                                       "n_heads": 4, "max_position_embeddings": 80}),
        ("RobertaForTokenClassification", "RobertaConfig", _SIZES),
        ("LlamaForCausalLM", "LlamaConfig", _HEADS),
        ("Qwen2Model", "Qwen2Config", _HEADS),
        ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4,
                                           "n_positions": 80, "use_cache": False}),
    ],
)  # fmt: skip
def test_packed_rows_of_transformers(kind: str, config: str, options: dict) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()
    ids, mask = _batch(LENGTHS, 40).values()
    batch, seen = {"input_ids": ids.clamp(min=3) * mask + (1 - mask), "attention_mask": mask}, []
    run = _packed(model, batch, seen)
    with torch.no_grad():
        found = run(**batch)
        for row, length in enumerate(LENGTHS):
            alone = model(**{name: value[row : row + 1, :length] for name, value in batch.items()})
            for name, whole in found.items():
                own = whole[row, :length] if whole.shape[1] == 40 else whole[row]
                torch.testing.assert_close(own, alone[name][0], atol=1e-5, rtol=1e-4)
    assert kind == "GPT2LMHeadModel" or seen[0] == sum(LENGTHS)  # whose layers are none of torch's


def _dropping() -> Deep:
    model = Deep(kind=Plain)
    model.config = types.SimpleNamespace(encoder_layerdrop=0.1)
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Reader(), "no blocks"),
        (Deep(kind=ByHand), "no scaled_dot_product_attention"),
        (Deep(kind=Smoothed), "answer otherwise"),
        (_dropping(), "layerdrop"),
    ],
)
def test_blocks_that_cannot_tell_rows_apart_are_not_packed(model, why: str) -> None:
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    facts = probe_facts(fettle.Workload(model.eval(), _batch(LENGTHS, 64)))
    assert why in conflict(Recipe({"ragged": "packed"}), facts)
    assert not conflict(Recipe({"ragged": "grouped"}), facts)
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize("loss", [False, True])
def test_training_with_packed_rows_learns_the_same(loss: bool) -> None:
    torch.manual_seed(0)
    model, data = Deep(loss=loss), [_batch(LENGTHS, 64), _batch([9, 30, 2, 2, 2, 2], 30)]
    workload = TrainingWorkload(model, functools.partial(torch.optim.SGD, lr=0.01), mean_loss, data)
    facts, usual = training_facts(workload), "trimmed" if loss else "grouped"
    assert {bundle.levels["ragged"] for bundle in bundles(facts) if "ragged" in bundle.levels} == {"packed", usual}
    repeated = dataclasses.replace(facts, block_classes=("Layer",))
    assert "recomputed" in conflict(Recipe({"ragged": "packed", "checkpoint": "blocks"}), repeated)
    losses = []
    for recipe in (Recipe(), Recipe({"ragged": "packed"})):
        train = load(source(recipe, facts), str(recipe))
        steps = train(copy.deepcopy(model), workload.optimizer, mean_loss, data)
        losses.append([float(value) for _, value in zip(range(4), steps, strict=False)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][2] < losses[0][0]


def test_an_encoder_with_a_decoder_is_not_packed_though_both_have_rows_of_one_length() -> None:
    transformers = pytest.importorskip("transformers")
    names = ("layers", "attention_heads", "ffn_dim")
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in names}
    config = transformers.BartConfig(vocab_size=50, d_model=16, max_position_embeddings=64, use_cache=False, **sizes)
    model, (ids, mask) = transformers.BartForConditionalGeneration(config).eval(), _batch([9, 4, 2], 12).values()
    batch = {"input_ids": ids, "attention_mask": mask}
    labels = ids.masked_fill(torch.arange(12) >= torch.tensor([[6], [3], [1]]), -100)
    facts = probe_facts(fettle.Workload(model, {**batch, "labels": labels}))
    assert "rows of other lengths" in conflict(Recipe({"ragged": "packed"}), facts)
    encoder = probe_facts(fettle.Workload(model.get_encoder(), batch))
    assert not conflict(Recipe({"ragged": "packed"}), encoder)
    with_window = dataclasses.replace(encoder, has_window=True)  # whose mask is looked at some places at a time
    assert "tells rows apart" in conflict(Recipe({"ragged": "packed", "attention": "windowed"}), with_window)


@pytest.mark.parametrize("by_blocks", [False, True])
def test_rows_of_two_lengths_are_not_packed(by_blocks: bool) -> None:
    torch.manual_seed(0)
    model, batch = Beside(by_blocks, kind=Plain).eval(), _batch([9, 4, 2], 12)
    facts = probe_facts(fettle.Workload(model, {**batch, "others": torch.randint(1, 50, (3, 7))}))
    assert "rows of other lengths" in conflict(Recipe({"ragged": "packed"}), facts)


def test_a_learned_bias_that_begins_as_none_is_learned_where_rows_are_packed() -> None:
    torch.manual_seed(0)
    model, batch, found = Deep(kind=Learned).eval(), _batch(LENGTHS, 40), []
    for run in (model, _packed(model, batch, [])):
        model.zero_grad()
        mean_loss(run, batch).backward()
        found.append([block.learned.grad.clone() for block in model.blocks])
    assert all(one.abs().min() > 0 for one in found[0])
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-4)


def test_what_is_recomputed_in_the_backward_pass_is_refused_where_rows_are_packed() -> None:
    model, batch = Deep(kind=Recomputed), _batch(LENGTHS, 64)
    run = _packed(model, batch, [])
    with pytest.raises(RuntimeError, match="recomputed in the backward pass"):
        run(**batch)


def test_a_batch_in_which_places_could_be_pairs_of_them_is_run_as_given() -> None:
    torch.manual_seed(0)
    model, seen = Given(kind=Placed).eval(), []
    run = _packed(model, _batch(LENGTHS, 40), seen)
    for lengths, places, packed in (([8, 2, 3], 8, True), ([4, 1, 2], 4, False), ([8, 2, 3, 1, 1, 1, 1, 1], 8, False),
                                    ([2, 3, 3], 8, False)):  # fmt: skip
        batch = _batch(lengths, places)
        del seen[:]
        found = run(**batch)
        assert seen[-1] == (sum(lengths) if packed else places * len(lengths))
        for row, length in enumerate(lengths):
            alone = model(batch["ids"][row : row + 1, :length], batch["mask"][row : row + 1, :length])[0]
            torch.testing.assert_close(found[row, :length], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_one_call_for_all_rows_is_asked_for_what_many_are(causal: bool) -> None:
    rows = PackedRows([5, 2, 5], 8, torch.device("cpu"))
    rows.ends, rows.longest = torch.tensor([0, 2, 7, 12]), 5
    query, (key, value) = torch.randn(1, 4, 12, 8).bfloat16(), torch.randn(2, 1, 2, 12, 8).bfloat16()

    def varlen(q, k, v, ends, _, longest, __, scale, window_size):
        assert q.shape == k.shape == v.shape == (12, 4, 8)
        spans = [slice(*pair) for pair in ends.unfold(0, 2, 1).tolist()]
        attend = functools.partial(nn.functional.scaled_dot_product_attention, scale=scale,
                                   is_causal=window_size == (-1, 0))  # fmt: skip
        assert max(span.stop - span.start for span in spans) == longest
        parts = [attend(*(x[span].transpose(0, 1)[None] for x in (q, k, v)))[0] for span in spans]
        return torch.cat(parts, 1).transpose(0, 1)

    several = rows.attend(query, key, value, is_causal=causal, scale=0.3, enable_gqa=True)
    rows.varlen = varlen
    assert rows.attend(*torch.randn(3, 1, 2, 12, 264).bfloat16()).shape == (1, 2, 12, 264)  # wider than it can be
    at_once = rows.attend(query, key, value, is_causal=causal, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(at_once, several, atol=0.02, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Plain, None])
def test_packed_rows_on_a_gpu(kind, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = Deep(kind=kind).eval()
    batch = {name: value.cuda() for name, value in _batch(LENGTHS, 40).items()}
    model = copy.deepcopy(made).to("cuda", dtype)
    run = _packed(model, batch, [])
    found, right = run(**batch), made.to("cuda")(**batch)
    for row, length in enumerate(LENGTHS):
        near = 1e-3 if dtype == torch.float32 else 0.1
        own = found["each"][row, :length].float()
        torch.testing.assert_close(own, right["each"][row, :length], atol=near, rtol=near)
