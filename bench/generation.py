"""Writing text: recipes of fettle beside what a user would pick otherwise, all in one run, in turn.

    python bench/generation.py workloads/gpt2_text.py --rounds 9
    python bench/generation.py workloads/smollm2_text.py --llama PYTHON --openvino PYTHON --onnxruntime PYTHON \\
        --optimum PYTHON --gguf FILE

Each way is a process of its own that builds the model once and then waits. In a round every way writes after each of
the workload's prompts, in random order, the others idle; told are the time to the first token, the time per token after
it, and the ratio of whole texts to transformers' `generate` in the same round. Before that all ways are fed the same
tokens, and the mean divergence of their next token's distribution from the float32 model's is told; where it is above
`--max-kl` a way is marked. The model in float32 writes these tokens. OpenVINO GenAI shows no scores: those of the model
that it makes of the file, and saves, stand for it.

A step of decoding reads all weights, and the keys and values so far: of fettle's recipes the bytes that it reads are
told as a share of what a sum over memory reads in that time, measured in the same round (`read_bytes_per_s`): on a
virtual machine it is another one in another hour.

Peers: transformers as it comes, in bfloat16, with its static cache compiled, and its continuous batching
(`generate_batch`); llama.cpp and OpenVINO GenAI with the GGUF file; ONNX Runtime GenAI (from its model builder) and
optimum-intel with the workload's model in 4 and 8 bits. The latter four run where their options name a Python that has
`llama_cpp`, `openvino_genai`, `onnxruntime_genai` (with torch, transformers, onnx_ir) or `optimum.intel` (with nncf).
A way that fails is told with its reason. `--step` waits for a line on stdin before each round, for a machine that
others use in between.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from generation_peers import PLAIN, Write, by_transformers

RECIPES = {
    "fettle, int8 in blocks": "grad=inference_mode weights=int8-blocks kv_cache=static-prompts",
    "fettle, int8 in blocks, bf16": "grad=inference_mode precision=bf16 weights=int8-blocks kv_cache=static-prompts",
    "fettle, int4 in blocks": "grad=inference_mode weights=int4-blocks kv_cache=static-prompts",
    "fettle, OpenVINO, int8": "grad=inference_mode runtime=openvino-stateful weights=int8",
    "fettle, OpenVINO, int8 dynamic": "grad=inference_mode runtime=openvino-stateful weights=int8-dynamic",
    "fettle, OpenVINO, int8 dynamic, 8 bits kept": (
        "grad=inference_mode runtime=openvino-stateful weights=int8-dynamic kv_cache=int8"
    ),
    "fettle, OpenVINO, int4": "grad=inference_mode runtime=openvino-stateful weights=int4",
    "fettle, int8": "grad=inference_mode precision=bf16 weights=int8-dynamic kv_cache=static-prompts",
    "fettle, int8, 16-bit tokens": "grad=inference_mode precision=bf16 weights=int8-16 kv_cache=static-compiled",
    "fettle, bf16": "grad=inference_mode precision=bf16 kv_cache=static-frozen",
}
PEERS = ("transformers", "transformers, bf16", "transformers, bf16, static, compiled", "transformers, generate_batch")
BASE = PEERS[0]


def made(path: str) -> dict[str, Any]:
    import torch

    sys.path.insert(0, str(Path(path).resolve().parent))  # for what workloads share
    spec = importlib.util.spec_from_file_location("workload_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    found: dict[str, Any] = module.workload()
    found.pop("name", None)
    return found


# -- ways: what writes, and what scores forced tokens ----------------------------------------------------------------


def by_fettle(work: dict[str, Any], levels: str) -> tuple[Write, Any, int]:
    import fettle
    from fettle.generate.limits import cache_bytes, weights_read
    from fettle.recipe import Recipe
    from fettle.techniques import load, probe_facts, source

    workload = fettle.GenerationWorkload(**work)
    recipe = Recipe(dict(level.split("=") for level in levels.split()))
    run = load(source(recipe, probe_facts(workload)), str(recipe))(workload.model, workload.inputs)

    def write(index: int, heard: Callable[..., None]) -> None:
        run(**workload.inputs[index], on_tokens=lambda tokens: heard())

    write(len(workload.inputs) - 1, lambda *at: None)
    read = weights_read(workload.model, run.decoder) + cache_bytes(run.decoder)
    return write, lambda ids, forced: run(input_ids=ids, forced=forced)[0], read


# -- one way in a process of its own -------------------------------------------------------------------------------


def way(name: str, path: str, folder: Path) -> None:
    """Answer the parent's lines: `score`, or `write`, each with one line of JSON."""
    out, sys.stdout = sys.stdout, sys.stderr
    began = time.perf_counter()
    read = 0
    if name in PLAIN:
        work = json.loads((folder / "prompts.json").read_text())
        write, score = PLAIN[name][1](work, name, folder)
    elif name in RECIPES:
        work = made(path)
        write, score, read = by_fettle(work, RECIPES[name])
    else:
        work = made(path)
        write, score = by_transformers(work, name)
    for index in range(len(work["inputs"])):  # warms up, compiles
        write(index, lambda *at: None)
        write(index, lambda *at: None)
    print(json.dumps({"ready_s": time.perf_counter() - began, "read_bytes": read}), file=out, flush=True)
    for line in sys.stdin:
        if line.strip() == "score":
            answer = {"kl": divergence(score, folder, name in PLAIN)}
        else:
            answer = {"texts": [timed(write, index) for index in range(len(work["inputs"]))]}
        print(json.dumps(answer), file=out, flush=True)


def timed(write: Write, index: int) -> dict[str, float]:
    times: list[float] = []
    began = time.perf_counter()
    write(index, lambda at=None: times.append(at or time.perf_counter()))
    return {"text_ms": (time.perf_counter() - began) * 1e3, "ttft_ms": (times[0] - began) * 1e3,
            "decode_ms": (times[-1] - times[0]) * 1e3, "steps": len(times) - 1}  # fmt: skip


def divergence(score: Any, folder: Path, plain: bool) -> float:
    """Mean KL divergence from the reference's distributions, nats a token."""
    import numpy

    found = []
    for number in range(len(list(folder.glob("forced-*.npz")))):
        held = numpy.load(folder / f"forced-{number}.npz")
        if plain:
            scores = score(held["ids"][0].tolist(), held["forced"][0].tolist())
        else:
            import torch

            scores = score(torch.from_numpy(held["ids"]), torch.from_numpy(held["forced"])).float().numpy()
        log_q = scores - scores.max(-1, keepdims=True)
        log_q = log_q.astype(numpy.float64)
        log_q -= numpy.log(numpy.exp(log_q).sum(-1, keepdims=True))
        log_p = held["log_p"].astype(numpy.float64)
        found.append((numpy.exp(log_p) * (log_p - log_q[:, : log_p.shape[1]])).sum(-1))
    return float(numpy.concatenate(found).mean())


def write_reference(path: str, folder: Path) -> None:
    """What those get that know no workload: prompts, and the model as transformers saves it, with a tokenizer of one
    token; and what the float32 model writes after the prompts and after the first tokens of the texts, with its
    distributions."""
    import numpy
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    work = made(path)
    model = work["model"].float().eval()
    model.save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"0": 0}, "0"))).save_pretrained(folder / "model")
    prompts = {"inputs": [ids[0].tolist() for ids in work["inputs"]], "new_tokens": work["new_tokens"]}
    (folder / "prompts.json").write_text(json.dumps(prompts))
    pairs = []
    with torch.inference_mode():
        for ids in [*work["inputs"], *work.get("check_inputs", [])]:
            new = work["new_tokens"]
            whole = model.generate(ids, do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
            pairs.append((ids, whole[:, ids.shape[1] :]))
        pairs += [(text[:, :1], text[:, 1:]) for text in work.get("texts", [])]
        for number, (ids, forced) in enumerate(pairs):
            scores = model(torch.cat([ids, forced], 1)).logits[0, ids.shape[1] - 1 : -1]
            numpy.savez(folder / f"forced-{number}.npz", ids=ids.numpy(), forced=forced.numpy(),
                        log_p=scores.log_softmax(-1).numpy())  # fmt: skip


# -- the run -------------------------------------------------------------------------------------------------------


class Child:
    """A way's process."""

    def __init__(self, name: str, python: str, given: argparse.Namespace, folder: Path) -> None:
        self.name, self.kl, self.rounds = name, None, []
        self.log = folder / f"{name}.log"
        command = [python, __file__, given.workload, "--way", name, "--folder", str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=self.log.open("w"))  # fmt: skip
        self.failure = ""
        self.ready = self.heard()

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        if not self.failure:
            with contextlib.suppress(BrokenPipeError):  # it has ended: `heard` says so
                self.process.stdin.write(line + "\n")
                self.process.stdin.flush()
        return self.heard()

    def heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if self.failure:
            return {}
        line = self.process.stdout.readline()
        if not line:
            said = [text for text in self.log.read_text().splitlines() if text.strip()]
            self.failure = said[-1][:300] if said else "it ended"
            return {}
        answer: dict[str, Any] = json.loads(line)
        return answer


def read_bytes_per_s(values: Any) -> float:
    """What a sum over memory reads at best in a tenth of a second or so."""
    took = []
    for _ in range(8):
        began = time.perf_counter()
        values.sum()
        took.append(time.perf_counter() - began)
    return float(values.nbytes / min(took))


def figures(child: Child, base: Child, max_kl: float, read_peaks: list[float]) -> dict[str, Any]:
    if child.failure or not child.rounds:
        return {"failed": child.failure or "not run"}
    texts = [text for texts in child.rounds for text in texts]
    told_apart = all(text["steps"] > 1 for text in texts)
    ratios = [
        sum(text["text_ms"] for text in theirs) / sum(text["text_ms"] for text in ours)
        for theirs, ours in zip(base.rounds, child.rounds, strict=True)
    ]
    ordered = sorted(ratios)
    mean = [statistics.fmean(text["text_ms"] for text in texts) for texts in child.rounds]
    found = {
        "text_ms": statistics.median(mean),
        "speedup": statistics.median(ratios),
        "speedup_of_rounds": [ordered[0], ordered[-1]],
        "kl": child.kl,
        "inside_max_kl": child.kl is not None and child.kl <= max_kl,
        **child.ready,
        "rounds": child.rounds,
    }
    if told_apart:
        found["ttft_ms"] = statistics.median(
            statistics.fmean(text["ttft_ms"] for text in texts) for texts in child.rounds
        )
        found["tpot_ms"] = statistics.median(text["decode_ms"] / text["steps"] for text in texts)
        found["tokens_per_s"] = 1e3 / found["tpot_ms"]
        found["read_share"] = statistics.median(
            child.ready["read_bytes"] * sum(text["steps"] for text in texts) / sum(text["decode_ms"] for text in texts)
            * 1e3 / peak
            for texts, peak in zip(child.rounds, read_peaks, strict=True)
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", help="ways by name")
    for option in dict.fromkeys(option for option, _ in PLAIN.values()):
        parser.add_argument(f"--{option}", metavar="PYTHON")
    parser.add_argument("--gguf")
    parser.add_argument("--max-kl", type=float, default=0.01)
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("generation.json"))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        return way(given.way, given.workload, given.folder)
    import torch

    from fettle.machine import measure_peaks, this_machine

    pythons = dict.fromkeys([*PEERS, *RECIPES], sys.executable)
    pythons |= {name: python for name, (option, _) in PLAIN.items() if (python := vars(given)[option])}

    def turn(label: str) -> None:
        if given.step:
            print(label, flush=True)
            sys.stdin.readline()

    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        turn("reference")
        write_reference(given.workload, folder)
        (folder / "gguf").mkdir()
        if given.gguf:
            (folder / "gguf" / "model.gguf").symlink_to(Path(given.gguf).resolve())
        children = []
        for name, python in pythons.items():
            if not given.only or name in given.only or name == BASE:
                turn(f"start {name}")
                children.append(Child(name, python, given, folder))
                if not children[-1].failure:
                    children[-1].kl = children[-1].ask("score").get("kl")
                print(f"{name}: {children[-1].failure or f'ready, KL {children[-1].kl}'}", flush=True)
        base = next(child for child in children if child.name == BASE)
        peaks = dict(measure_peaks("cpu"))
        values = torch.ones(1 << 27)  # 512 MiB: far above any last-level cache
        read_peaks: list[float] = []
        for number in range(given.rounds):
            turn(f"round {number + 1}")
            before = read_bytes_per_s(values)
            for child in random.sample(children, len(children)):
                found = child.ask("write").get("texts")
                if found:
                    child.rounds.append(found)
            read_peaks.append((before + read_bytes_per_s(values)) / 2)
            ways = {child.name: figures(child, base, given.max_kl, read_peaks) for child in children}
            told = {"machine": this_machine().summary, "peaks": peaks, "read_bytes_per_s": read_peaks,
                    "workload": given.workload, "max_kl": given.max_kl, "recipes": RECIPES, "ways": ways}  # fmt: skip
            given.json.write_text(json.dumps(told, indent=1) + "\n")  # what was measured so far, should it be stopped
        turn("end")
        for child in children:
            child.process.kill()
    for name, row in ways.items():
        if "failed" in row:
            print(f"{name:40} failed: {row['failed']}")
            continue
        apart = f"{row['ttft_ms']:8.1f} ms first {row['tpot_ms']:8.2f} ms/token" if "ttft_ms" in row else " " * 34
        share = f"  {row['read_share']:.0%} of the bandwidth" if row.get("read_share") else ""
        print(f"{name:40} {row['text_ms']:8.1f} ms {row['speedup']:6.2f}x {apart}  KL {row['kl']}{share}")


if __name__ == "__main__":
    main()
