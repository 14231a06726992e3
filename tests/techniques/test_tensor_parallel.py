"""Tensor parallelism for inference: what two ranks say together is what one process says."""

import subprocess
import sys
from pathlib import Path

import pytest

import fettle
from fettle.errors import UsageError
from fettle.procs.rendezvous import LAUNCHER
from fettle.techniques import probe_facts
from fettle.workload import find_target
from tests.conftest import quick_comparisons
from tests.forking import forked
from tests.processes import alive, left_behind

pytest.importorskip("transformers")

WORK = """
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}

def workload(tied=True):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
                         initializer_range=0.3, tie_word_embeddings=tied, **SMALL)
    prompts = [torch.randint(96, (2, tokens)) for tokens in (5, 12)]
    return {"model": LlamaForCausalLM(config).eval(), "inputs": prompts, "new_tokens": 6, "batches": (1, 2)}

def bert():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=96, num_labels=8, initializer_range=0.3, **SMALL))
    return model.eval(), [{"input_ids": torch.randint(96, (2, 12))} for _ in range(2)]

def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4)), [torch.randint(96, (1, 5))]
"""
MODELS = ["transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("split") / "split.py"
    path.write_text(WORK)
    return path


@pytest.fixture(autouse=True)
def no_orphans():
    before = alive(LAUNCHER)
    with quick_comparisons(), forked(*MODELS):
        yield
    assert not left_behind(before, LAUNCHER)


def raced(target: str, *recipes: str) -> list[fettle.Trial]:
    return list(fettle.bench(target, recipes, nproc=2).trials[1:])


@pytest.mark.parametrize("more", [" kv_cache=static", pytest.param("", marks=pytest.mark.slow)])
def test_two_ranks_write_what_one_would(file: Path, more: str) -> None:
    [trial] = raced(str(file), f"tensor_parallel=on{more}")
    assert trial.status == "measured", trial.reason
    assert trial.accuracy.error < 1e-6
    assert trial.accuracy.unequal == 0
    assert trial.generation is not None
    assert trial.generation.tokens_per_s["2"] > 0


@pytest.mark.slow
def test_what_goes_with_it(file: Path) -> None:
    split = "tensor_parallel=on precision=bf16"
    names = ("weights=int8", "weights=int4", "guessing=prompt", "kv_cache=static-compiled")
    for name, trial in zip(names, raced(f"{file}:workload", *(f"{split} {name}" for name in names)), strict=True):
        assert trial.status in ("measured", "rejected"), trial.reason
        assert trial.accuracy.error < (2 if "int4" in name else 0.2)  # 4 bits of random weights are far off
    plain, half = raced(f"{file}:bert", "tensor_parallel=on", split)  # its layers have biases
    for trial, most in ((plain, 1e-5), (half, 0.05)):
        assert trial.status in ("measured", "rejected"), trial.reason
        assert trial.accuracy.error < most


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_of_a_program_applies_it(file: Path, tmp_path: Path, tied: bool) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys
import torch, fettle
sys.path.insert(0, {str(file.parent)!r})
from split import workload

made = workload({tied})
wanted = made["model"].generate(made["inputs"][1], max_new_tokens=6, do_sample=False)[:, 12:]
fast = fettle.apply(fettle.GenerationWorkload(**made), "tensor_parallel=on")
assert torch.equal(fast(made["inputs"][1]), wanted)
assert made["model"].lm_head.weight.shape == (48, 64)
""")
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_cannot_be_split_is_refused(file: Path) -> None:
    for factory, nproc, said in (
        ("gpt2", 2, "`nproc=2`: the model cannot be split: the model has no pairs of Linear layers"),
        ("workload", 3, "3 ranks do not divide"),
        ("workload", 1, "tensor_parallel=on: there is one rank"),
    ):
        with pytest.raises(UsageError, match=said):
            fettle.bench(f"{file}:{factory}", "tensor_parallel=on", nproc=nproc)
    facts = probe_facts(find_target(f"{file}:bert").load())
    assert not facts.tensor.why_not
    assert facts.tensor.why_not_over(8) == "8 ranks do not divide its 4 attention heads"
