"""The probe sees what is there, leaves the workload as it was, and no odd model breaks it."""

import copy
import threading
from collections import UserDict, deque
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import fettle
from fettle.recipe import Recipe
from fettle.techniques import bundles, conflict, find, load, probe_facts, repeated_blocks, source, state_kept
from fettle.workload import Workload


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x)


class Dropping(nn.Module):
    """Looks at `self.training` without any layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return nn.functional.dropout(x, 0.5, self.training)


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


def test_a_weight_that_is_computed_by_what_16_bits_lack_is_refused_them_before_a_trial():
    made, said = nn.utils.parametrizations, []
    for layer in (made.weight_norm(nn.Linear(4, 4)), made.orthogonal(nn.Linear(4, 4), orthogonal_map="householder")):
        facts = probe_facts(Workload(nn.Sequential(layer), [torch.rand(2, 4)]))
        said += [conflict(Recipe({"precision": level}), facts) for level in ("bf16", "autocast-bf16")]
    assert said == ["", "", "precision=bf16: 0.weight is computed by Orthogonal, which torch has not in 16 bits", ""]


@pytest.mark.parametrize("adds", [True, False])
def test_where_rows_are_added_by_index_compiling_for_one_thread_is_tried_early(adds):
    def arrive(x, to):
        return x + (torch.zeros_like(x).index_add(0, to, x) if adds else x[to])

    facts = probe_facts(Workload(arrive, [(torch.rand(4, 3), torch.tensor([0, 0, 1, 3]))]))
    assert facts.adds_by_index == adds
    early = Recipe({"compile": "default", "threads": "1", "grad": "inference_mode"})
    assert (early in bundles(replace(facts, threads=2, physical_cores=2))) == adds


def test_counts_layers_and_shapes():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 3), nn.Flatten(), nn.LazyLinear(2)).eval()
    facts = probe_facts(Workload(model, [(torch.rand(2, 3, 8, 8),), (torch.rand(3, 3, 8, 8),)]))
    assert (facts.num_conv, facts.num_other_conv, facts.num_linear) == (1, 1, 1)
    assert (facts.num_4d_inputs, facts.num_input_shapes, facts.samples) == (1, 2, 2)
    assert facts.device == "cpu"
    assert facts.dtype == "float32"
    assert facts.physical_cores >= 1
    assert facts.packages["torchao"]


def test_finds_repeated_blocks():
    facts = probe_facts(Workload(nn.Sequential(*(Block() for _ in range(3))), [torch.rand(2, 4)]))
    assert [name.rpartition(".")[2] for name in facts.block_classes] == ["Block"]
    lists = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)]) for _ in range(3))  # a stage each, and nothing calls them
    assert not repeated_blocks(lists)
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.Linear(4, 4)))
    assert repeated_blocks(stages) == [stages[0][0], stages[0][1], stages[1][0]]
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    assert repeated_blocks(whole) == list(whole)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Dropout(0.5)), nn.BatchNorm1d(4), Dropping(),
        nn.utils.spectral_norm(nn.Linear(4, 4)),  # whose calls in train mode change the next one
    ],
)  # fmt: skip
def test_train_mode_that_changes_answers(model):
    batch = torch.rand(3, 4)
    before = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    facts = probe_facts(Workload(model, [batch]))
    assert facts.training
    assert facts.train_mode_differs
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert not probe_facts(Workload(model.eval(), [batch])).train_mode_differs


class Merging(nn.Linear):
    """As loralib's: `eval` adds an adapter to the weight, `train` takes it out."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.adapter, self.merged = nn.Parameter(torch.ones(4, 4)), False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.weight.data += -self.adapter if mode else self.adapter
            self.merged = not mode
        return self


def test_a_mode_that_changes_weights_is_left_as_it_was_entered():
    model = nn.Sequential(Merging(), nn.Dropout(0.5), Merging().eval())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    facts = probe_facts(Workload(model, [torch.rand(3, 4)]))
    assert facts.training
    assert [child.training for child in model] == [True, True, False]
    assert [child.merged for child in model if isinstance(child, Merging)] == [False, True]
    torch.testing.assert_close(list(model.parameters()), before)


def test_train_mode_that_changes_nothing():
    facts = probe_facts(Workload(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), [torch.rand(3, 4)]))
    assert facts.training
    assert not facts.train_mode_differs


def test_sees_sdpa():
    class Attention(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    assert probe_facts(Workload(Attention(), [torch.rand(1, 2, 4, 8)])).uses_sdpa
    assert not probe_facts(Workload(nn.Linear(4, 4), [torch.rand(3, 4)])).uses_sdpa


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (lambda x: x * 2, torch.rand(3)),
        (lambda x=None: {"y": x["a"]}, {"x": {"a": torch.rand(3)}}),
        (lambda pair: pair.left + pair.right, Pair(torch.rand(2, 3), torch.rand(2, 3))),
        (lambda text: text.upper(), "no tensor at all"),
        (nn.Linear(4, 4), torch.rand(2, 5)),  # the model rejects its input
    ],
)
def test_odd_models(model, batch):
    facts = probe_facts(Workload(model, [batch]), allow_batch=True)
    assert facts.allow_batch
    assert facts.is_module == isinstance(model, nn.Module)
    assert not facts.uses_sdpa


def test_an_exported_program_has_one_mode_and_torchscript_is_not_compiled():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    batch = torch.rand(3, 4)
    exported = probe_facts(Workload(torch.export.export(model.eval(), (batch,)).module(), [batch]))
    assert not exported.training
    assert not exported.train_mode_differs
    scripted = probe_facts(Workload(torch.jit.script(model), [batch]))
    assert "TorchScript" in conflict(Recipe({"compile": "default"}), scripted)
    assert "TorchScript" in conflict(Recipe({"runtime": "aoti"}), scripted)
    within = [level for name in ("shapes", "region", "quantize") for level in find(name).levels(scripted)[1:]]
    assert all("TorchScript" in level.why_not for level in within)


def test_what_an_exported_program_calls_is_seen():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.same, self.up = nn.Conv2d(3, 4, 3, padding="same"), nn.ConvTranspose2d(4, 4, 2)

        def forward(self, x):
            x = self.up(self.same(x))
            return nn.functional.scaled_dot_product_attention(x[:, :, :1], x, x)

    batch = torch.rand(2, 3, 8, 8)
    given = probe_facts(Workload(Attends().eval(), [batch]))
    exported = probe_facts(Workload(torch.export.export(Attends().eval(), (batch,)).module(), [batch]))
    assert (given.num_conv, given.num_other_conv, given.uses_sdpa, given.uneven_sdpa) == (1, 1, True, 1)
    for name in ("num_conv", "num_other_conv", "uses_sdpa", "uneven_sdpa"):
        assert getattr(exported, name) == getattr(given, name), name


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_settings_of_convolutions_are_for_those_of_any_number_of_dimensions(kind):
    model = kind(2, 4, 3).eval()
    batch = torch.rand(1, 2, *[5] * (model.weight.dim() - 2))
    for one in (model, torch.export.export(model, (batch,)).module()):
        facts = probe_facts(Workload(one, [batch]))
        assert facts.convolves
        assert find("cudnn_benchmark").usual(replace(facts, device="cuda")) == "on"
        assert "conv.fp32_precision" in source(Recipe({"matmul": "medium"}), facts)


def test_input_is_not_written_into():
    batch = torch.ones(3)
    probe_facts(Workload(lambda x: x.add_(1), [batch]))
    assert torch.equal(batch, torch.ones(3))


class Counting(nn.Module):
    """Its buffer changes in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_a_model_that_changes_its_buffers_is_not_exported():
    batch = torch.rand(2, 4)
    facts = probe_facts(Workload(Counting().eval(), [batch]))
    assert facts.changes_buffers
    assert "changes its own buffers" in conflict(Recipe({"runtime": "openvino"}), facts)
    for steady in (nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4), nn.Linear(4, 4)):
        assert not probe_facts(Workload(steady, [batch])).changes_buffers


class Graph(nn.Module):
    """A sparse buffer, and one that is made anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("neighbours", torch.eye(4).to_sparse())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.neighbours @ x


def test_buffers_that_are_sparse_or_made_anew_are_left_as_they_were():
    model = Graph().eval()
    assert probe_facts(Workload(model, [torch.rand(4, 3)])).changes_buffers
    assert model.calls == 0
    assert torch.equal(model.neighbours.to_dense(), torch.eye(4))


class Keeping(nn.Module):
    """It keeps its sums in what it is given."""

    def forward(self, x, sums):
        sums += x
        return sums.clone()


def test_a_model_that_writes_into_its_inputs_gets_no_copies_of_them():
    batch = (torch.rand(2, 4), torch.full((2, 4), torch.nan))
    facts = probe_facts(Workload(Keeping().eval(), [(batch[0], torch.zeros(2, 4))]))
    for text in ("precision=bf16", "runtime=openvino", "runtime=aoti", "runtime=onnxruntime"):
        assert "writes into what it is given" in conflict(Recipe.parse(text), facts)
    assert not conflict(Recipe.parse("precision=autocast-bf16"), facts)
    assert not probe_facts(Workload(lambda x, sums: x + sums, [batch])).changes_inputs


class Adding(nn.Module):
    """It answers in the dictionary that it is given, as SentenceTransformer does."""

    def __init__(self, returns_it: bool = True) -> None:
        super().__init__()
        self.layer, self.returns_it = nn.Linear(4, 4), returns_it

    def forward(self, batch):
        batch["hidden"] = self.layer(batch["x"])
        return batch if self.returns_it else batch["hidden"] * 2


@pytest.mark.parametrize("kind", [dict, UserDict])  # as tokenizers return one
def test_a_model_may_answer_in_the_dictionary_that_it_is_given(kind):
    model, x = Adding().eval(), torch.rand(2, 4)
    wanted = model({"x": x})
    for text in ("precision=bf16", "runtime=openvino", "runtime=onnxruntime"):
        given = kind({"x": x})
        answer = fettle.apply(copy.deepcopy(model), text, [(given,)])(given)
        assert (type(answer), {*answer}) == (kind, {"x", "hidden"})
        torch.testing.assert_close(answer["hidden"], wanted["hidden"], rtol=0, atol=0.02)
        assert {*given} == {"x"}
    others = probe_facts(Workload(Adding(returns_it=False).eval(), [({"x": x},)]))
    assert "writes into what it is given" in conflict(Recipe.parse("precision=bf16"), others)


class KeysCache:
    pass


class Caching(Block):
    def forward(self, x):
        return {"states": super().forward(x), "past": KeysCache()}


def test_runtimes_that_cannot_compute_in_the_types_of_the_weights():
    facts = probe_facts(Workload(Block().eval().bfloat16(), [torch.rand(2, 4).bfloat16()]))
    for text in ("runtime=openvino", "runtime=onnxruntime"):
        assert "the weights are bfloat16" in conflict(Recipe.parse(text), facts)
    assert not conflict(Recipe.parse("runtime=aoti"), facts)
    assert not conflict(Recipe.parse("runtime=onnxruntime"), replace(facts, dtype="float16"))
    doubles = replace(facts, dtype="float64", num_linear=1, packages={"torchao": "0.18"})
    assert find("quantize").why_not("int8-dynamic", doubles) == "torchao takes no weights in float64"


def test_what_other_runtimes_cannot_compute_is_seen_before_it_costs_a_trial():
    class Spectrum(nn.Module):
        def forward(self, x):
            return torch.fft.rfft(x).abs()

    facts = probe_facts(Workload(Spectrum().eval(), [torch.rand(2, 4)]))
    assert conflict(Recipe.parse("runtime=openvino"), facts).endswith("OpenVINO cannot compute the model's fft_rfft")
    assert not conflict(Recipe.parse("runtime=onnxruntime"), facts)

    class Experts(nn.Module):
        def forward(self, x):
            ends = torch.tensor([1, 4], dtype=torch.int32)
            return torch.nn.functional.grouped_mm(x, torch.ones(2, 8, 16), offs=ends)

    experts = probe_facts(Workload(Experts().eval(), [torch.rand(4, 8)]))
    for text in ("runtime=openvino", "runtime=onnxruntime"):
        assert conflict(Recipe.parse(text), experts).endswith("cannot compute the model's grouped_mm")
    doubles = probe_facts(Workload(nn.Conv2d(3, 4, 3).eval().double(), [torch.rand(2, 3, 8, 8).double()]))
    assert conflict(Recipe.parse("runtime=onnxruntime"), doubles).endswith(
        "ONNX Runtime has no conv2d in float64 on a CPU"
    )
    assert not probe_facts(Workload(nn.Conv2d(3, 4, 3).eval(), [torch.rand(2, 3, 8, 8)])).cannot_run


def test_what_an_exported_model_cannot_return_is_seen_before_it_is_exported():
    facts = probe_facts(Workload(Caching().eval(), [torch.rand(2, 4), torch.rand(2, 4)]))
    facts = replace(facts, packages={**facts.packages, "torchao": "0.18"}, cpu_flags=("avx2",))
    for text in ("runtime=openvino", "runtime=aoti", "runtime=onnxruntime", "quantize=int8-static", "cuda_graphs=on"):
        seen = replace(facts, device="cuda") if "cuda" in text else facts
        said = conflict(Recipe.parse(text), seen)
        assert "values of type KeysCache among inputs or outputs cannot be exported: call" in said
    assert not conflict(Recipe.parse("compile=default"), facts)


@pytest.mark.parametrize("text", ["precision=bf16", "precision=autocast-bf16", "channels_last=on"])
def test_a_dataclass_as_input_is_changed_inside_and_comes_back_in_float32(text):
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, pair):
            return Pair(self.conv(pair.left), pair.right)

    model, batch = Adds().eval(), Pair(torch.rand(2, 3, 8, 8), torch.rand(2))
    wanted = model(batch).left
    facts = probe_facts(Workload(model, [batch]))
    tuned = load(source(Recipe.parse(text), facts), text)(model, [batch])
    found = tuned(batch)
    assert found.left.dtype == torch.float32
    assert (found.left - wanted).norm() < 0.02 * wanted.norm()
    assert torch.allclose(found.right, batch.right, atol=0.01)
    assert batch.left.dtype == torch.float32
    assert batch.left.is_contiguous()


class Streaming(nn.Module):
    """What it remembers is in attributes: a tensor, a number, containers, and the state of a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.step, self.sums, self.draws = None, 0, torch.zeros(()), torch.Generator().manual_seed(0)
        self.seen, self.last, self.kept = [], deque(maxlen=2), {"sums": [torch.zeros(())]}

    def forward(self, x):
        self.hidden = x if self.hidden is None else self.hidden + x
        self.step += 1
        self.sums += 1
        self.kept["sums"][0].add_(1)
        self.kept[self.step] = x
        self.seen.append(x)
        self.last.append(x)
        self.more = x
        return x * self.step + self.hidden + self.sums + torch.rand((), generator=self.draws)


def test_what_a_model_remembers_in_attributes_is_forgotten():
    model, x = nn.Sequential(Streaming()).eval(), torch.rand(2, 3)
    wanted = Streaming()(x)
    probe_facts(Workload(model, [x]))
    assert torch.equal(model(x), wanted)
    assert (len(model[0].seen), len(model[0].last), list(model[0].kept), model[0].step) == (1, 1, ["sums", 1], 1)
    del model[0].more
    with state_kept(model):
        model[0].more = 1
    assert not hasattr(model[0], "more")


class State:
    def __init__(self):
        self.steps, self.kept, self.lock = 0, [], threading.Lock()


class Stateful(nn.Module):
    """It remembers in an object of its own."""

    def __init__(self):
        super().__init__()
        self.state = State()

    def forward(self, x):
        self.state.steps += 1
        self.state.kept.append(x)
        return sum(self.state.kept) * self.state.steps


def test_what_a_model_remembers_in_an_object_is_forgotten():
    model, x = Stateful().eval(), torch.rand(2, 3)
    probe_facts(Workload(model, [x]))
    assert (model.state.steps, model.state.kept) == (0, [])
    assert torch.equal(model(x), x)


class Counter:
    """A model that is no module, and remembers its calls."""

    def __init__(self):
        self.calls, self.seen, self.net, self.engine = 0, [], Streaming(), None

    def __call__(self, x):
        self.calls += 1
        self.seen.append(x)
        return self.net(x) * self.calls * len(self.seen)

    def load(self, x):
        self.engine = self.engine or nn.Identity()
        return self.engine(x)


def test_what_a_callable_remembers_that_is_no_module_is_forgotten():
    model, x = Counter(), torch.rand(2, 3)
    wanted = Counter()(x)
    for called in (model, model.__call__):
        probe_facts(Workload(called, [x]))
        with state_kept(called):
            called(x)
    assert torch.equal(model(x), wanted)
    with state_kept(model.load):
        model.load(x)
    assert model.engine is not None  # as a module that is made at the first call stays


def test_a_cache_of_transformers_among_the_inputs_is_written_into():
    transformers = pytest.importorskip("transformers")
    cache, one = transformers.DynamicCache(), torch.ones(1, 2, 3, 4)
    cache.update(one, one, 0)
    model = Workload(lambda x, cache: cache.update(x, x, 0)[0], [{"x": one, "cache": cache}])
    facts = probe_facts(model)
    assert facts.changes_inputs
    assert not facts.adds_to_inputs
    assert cache.get_seq_length() == 3


class Rebuilding(nn.Module):
    """Its first call makes it ready, and an attribute says so."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.ready, self.head = nn.Linear(4, 4), nn.Linear(4, 4), False, None

    def forward(self, x):
        if not self.ready:
            self.one.weight.data = self.one.weight.data + self.other.weight.data
            del self.other
            self.head, self.ready = nn.Linear(4, 2), True
        return self.head(self.one(x))


def test_what_a_first_call_makes_ready_stays_so():
    model, x = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), Rebuilding()).eval(), torch.rand(3, 5)
    with torch.no_grad(), state_kept(model):
        wanted = model(x)
    assert model[2].ready
    assert "head" not in vars(model[2])
    assert torch.equal(model(x), wanted)


def test_tensors_that_inference_mode_made_are_put_back():
    with torch.inference_mode():
        model = Counting().eval()
        model.sums = torch.zeros(())
    with state_kept(model), torch.inference_mode():
        model.calls += 1
        model.sums += 1
    assert (model.calls, model.sums) == (0, 0)


def test_facts_are_found_with_a_batch_that_was_computed_with_gradients():
    x = nn.Embedding(9, 4)(torch.arange(6).reshape(2, 3))
    assert probe_facts(Workload(Counting().eval(), [x])).changes_buffers
