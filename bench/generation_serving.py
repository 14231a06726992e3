"""Texts of mixed lengths at once: continuous batching, batch after batch, and transformers' own two ways.

    python bench/generation_serving.py --streams 8 --json generation_serving.json

One model (Llama's architecture, random weights: nothing is downloaded), greedy, in one process, and so many streams,
each of which asks for its next text as soon as it has one. Prompts and answers have lengths of log-normal
distributions, the same ones for all. The ways take turns in random order:

continuous       fettle's engine: a text joins and leaves between any two tokens
unrecorded       on a GPU: the same with its kernels launched one by one, not as CUDA graphs
compiled         on a CPU: the same with its step compiled (kv_cache=static-compiled)
int8 in blocks   the same with the model's weights in 8 bits (weights=int8-blocks)
int8, compiled   both
batch by batch   the same engine, but the next texts wait until the last of a batch is whole; those that are whole leave
padded batches   the same, but every text is computed until the longest of its batch is whole, as `generate` does
generate         transformers' generate: batches filled up on their left, until the longest is whole
generate_batch   transformers' continuous batching, where it runs

Tokens a second are those that were asked for. A way without batches runs for `--warm-up` seconds, so that texts have
joined and left, and what is written in the `--seconds` after that counts; one with batches runs whole ones for at least
`--seconds`. Greedy tokens must be those of the model alone, but with weights in 8 bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from fettle.machine import this_machine
from fettle.package.export import write_package
from fettle.package.handler import find_handler
from fettle.package.handlers.asking import Ask, Piece
from fettle.package.handlers.running import Running
from fettle.package.handlers.sampling import Sampling
from fettle.package.manifest import open_package
from fettle.package.model_runner import ModelRunner
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.techniques import cpu_flags
from fettle.workload import Workload

WORDS, MOST = 5000, 512
RECIPES = {
    "compiled": "kv_cache=static-compiled", "int8 in blocks": "weights=int8-blocks",
    "int8, compiled": "weights=int8-blocks kv_cache=static-compiled",
}  # fmt: skip
Asked = tuple[list[int], int]
"""Tokens of a prompt, and how many are to follow."""


def model_of(layers: int, width: int, device: str, precision: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width, num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128), vocab_size=WORDS, bos_token_id=None, eos_token_id=None,
        pad_token_id=0, max_position_embeddings=MOST, initializer_range=0.2,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(config).eval().to(getattr(torch, precision))


def packaged(model: LlamaForCausalLM, folder: Path, recipe: str = "") -> None:
    ids = torch.randint(0, WORDS, (2, 16), device=model.device)
    work = Workload(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(WORDS)}, "0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    write_package(
        work, Recipe.parse(recipe), folder, name="llama", handler="generate",
        files={"tokenizer.json": made.to_str().encode()},
        settings=ServeSettings(max_rows=32), handler_settings={"max_new_tokens": MOST, "max_tokens": MOST},
    )  # fmt: skip


def asked(seed: int) -> Iterator[Asked]:
    """Texts without end: the same ones for all."""
    draw = np.random.default_rng(seed)
    while True:
        prompt = int(np.clip(draw.lognormal(np.log(48), 0.8), 4, 200))
        yield draw.integers(1, WORDS, prompt).tolist(), int(np.clip(draw.lognormal(np.log(48), 0.9), 2, 256))


def joined(running: Running, texts: Iterator[Asked], streams: int, warm_up: float, seconds: float) -> float:
    """Tokens a second of texts that join as soon as others leave, after a warm-up."""
    written, number = 0, itertools.count()

    def tell(_: int, said: Piece | Exception) -> None:
        nonlocal written
        assert isinstance(said, Piece), said
        written += 1

    def run(seconds: float) -> float:
        nonlocal written
        written, began = 0, time.perf_counter()
        while time.perf_counter() < began + seconds:
            while len(running.texts) < streams:
                prompt, most = next(texts)
                running.add(next(number), Ask(tokens=tuple(prompt), sampling=Sampling(max_tokens=most)))
            running.step(tell)
        return written / (time.perf_counter() - began)

    run(warm_up)
    rate = run(seconds)
    for text in list(running.texts):
        running.cancel(text.number)
    return rate


def batched(running: Running, texts: Iterator[Asked], streams: int, done: Callable[[int], bool], padded: bool) -> int:
    """Tokens written in whole batches until `done(tokens)`."""
    written = 0
    while not done(written):
        batch = list(itertools.islice(texts, streams))
        longest = max(most for _, most in batch)
        for number, (prompt, most) in enumerate(batch):
            running.add(number, Ask(tokens=tuple(prompt), sampling=Sampling(max_tokens=longest if padded else most)))
        while running.texts:
            running.step(lambda number, said: None)
        written += sum(most for _, most in batch)
    return written


def generated(model: LlamaForCausalLM, texts: Iterator[Asked], streams: int, done: Callable[[int], bool]) -> int:
    """The same by transformers' generate."""
    written = 0
    while not done(written):
        batch = list(itertools.islice(texts, streams))
        longest = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch], device=model.device)
        most = max(wanted for _, wanted in batch)
        with torch.inference_mode():
            model.generate(ids, attention_mask=(ids != 0).long(), do_sample=False, max_new_tokens=most)
        written += sum(wanted for _, wanted in batch)
    return written


def by_generate_batch(
    model: LlamaForCausalLM, texts: Iterator[Asked], streams: int, warm_up: float, seconds: float
) -> float:
    """Tokens a second, after a warm-up, by transformers' continuous batching: its manager is given the next text as
    each is whole."""
    config = GenerationConfig(max_new_tokens=MOST, do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = ContinuousBatchingConfig(num_blocks=max(32, 2 * streams * MOST // 256), max_batch_tokens=512)
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=blocks)
    manager.start()

    def result() -> Any:
        found = manager.get_result(timeout=20)
        if found is None or found.error:
            raise RuntimeError(found.error if found is not None else "it says nothing for 20 s")
        return found

    try:
        manager.add_request([1, 2, 3], max_new_tokens=2)  # it makes its cache with the first request
        while not result().is_finished():
            pass
        began = time.perf_counter()
        written: dict[str, int] = {}
        for prompt, most in itertools.islice(texts, streams):
            manager.add_request(prompt, max_new_tokens=most, streaming=True)
        before, end = 0, began + warm_up + seconds
        while (now := time.perf_counter()) < end:
            if not before and now >= began + warm_up:
                before, warm = sum(written.values()), now
            found = result()
            written[found.request_id] = len(found.generated_tokens)
            if found.is_finished():
                prompt, most = next(texts)
                manager.add_request(prompt, max_new_tokens=most, streaming=True)
        return (sum(written.values()) - before) / (time.perf_counter() - warm)
    finally:
        manager.stop(block=True, timeout=20, hard_stop=True)


def check(model: LlamaForCausalLM, running: Running, streams: int) -> None:
    """Leave where a text is not the model's own."""
    texts, found = list(itertools.islice(asked(99), 2 * streams)), {}
    waiting = list(enumerate(texts))

    def tell(number: int, said: Any) -> None:
        found[number] = found.get(number, "") + said.text

    while waiting or running.texts:
        while waiting and len(running.texts) < streams:
            number, (prompt, most) = waiting.pop(0)
            running.add(number, Ask(tokens=tuple(prompt), sampling=Sampling(max_tokens=min(most, 24))))
        running.step(tell)
    for number, (prompt, most) in list(enumerate(texts))[:8]:
        ids = torch.tensor([prompt], device=model.device)
        with torch.inference_mode():
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                   max_new_tokens=min(most, 24))  # fmt: skip
        if found[number].split() != [str(token) for token in alone[0, len(prompt) :].tolist()]:
            sys.exit(f"text {number} is not what the model says alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--package", type=Path, help="keep the package here, to be used again")
    parser.add_argument("--only-package", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("generation_serving.json"))
    given = parser.parse_args()
    model = model_of(given.layers, given.width, given.device, given.precision)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.package or Path(scratch) / "m"
        if not folder.exists():
            packaged(model, folder)
        if given.only_package:
            return
        package = open_package(folder)
        running = find_handler(package, ModelRunner(package, given.device), "").running(given.streams, 0, 128)
        others = {}
        for name, recipe in RECIPES.items() if given.device == "cpu" else ():
            if "blocks" not in recipe or {"avx2", "avx512_vnni"} & set(cpu_flags()):
                packaged(model, Path(scratch) / name, recipe)
                package = open_package(Path(scratch) / name)
                others[name] = find_handler(package, ModelRunner(package), "").running(given.streams, 0, 128)
    assert running is not None
    running.warm()
    if given.precision == "float32":
        check(model, running, given.streams)
    found: dict[str, list[float]] = {}
    failed: dict[str, str] = {}

    def until() -> Callable[[int], bool]:
        end = time.perf_counter() + given.seconds
        return lambda _: time.perf_counter() >= end

    def timed(way: Callable[[Iterator[Asked], Callable[[int], bool]], int]) -> Callable[[int], float]:
        def run(seed: int) -> float:
            began = time.perf_counter()
            written = way(asked(seed), until())
            return written / (time.perf_counter() - began)

        return run

    def unrecorded(seed: int) -> float:
        recorded, running.cache.recorded = running.cache.recorded, None
        try:
            return joined(running, asked(seed), given.streams, given.warm_up, given.seconds)
        finally:
            running.cache.recorded = recorded

    ways: dict[str, Callable[[int], float]] = {
        "continuous": lambda seed: joined(running, asked(seed), given.streams, given.warm_up, given.seconds),
        "batch by batch": timed(lambda texts, done: batched(running, texts, given.streams, done, False)),
        "padded batches": timed(lambda texts, done: batched(running, texts, given.streams, done, True)),
    }
    if running.cache.recorded is not None:
        ways["unrecorded"] = unrecorded
    for name, other in others.items():
        ways[name] = lambda seed, other=other: joined(other, asked(seed), given.streams, given.warm_up, given.seconds)
    if not given.no_peers:
        ways["generate"] = timed(lambda texts, done: generated(model, texts, given.streams, done))
        ways["generate_batch"] = lambda seed: by_generate_batch(
            model, asked(seed), given.streams, given.warm_up, given.seconds
        )
    for seed in range(given.rounds):
        for name in random.sample(list(ways), len(ways)):
            if name in failed:
                continue
            try:
                found.setdefault(name, []).append(ways[name](seed))
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
    print(f"{given.streams} streams, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")
    rows = {}
    for name, rates in found.items():
        if not rates:
            continue
        ratios = [mine / other for mine, other in zip(rates, found["batch by batch"], strict=False)]
        rows[name] = {"tokens_per_s": rates, "ratio_to_batch_by_batch": statistics.median(ratios)}
        print(f"  {name:16} {statistics.median(rates):8.1f} tokens/s  {statistics.median(ratios):5.2f}x batch by batch")
    for name, why in failed.items():
        print(f"  {name:16} failed: {why}")
    settings = {key: value for key, value in vars(given).items() if key not in ("json", "package", "only_package")}
    before = json.loads(given.json.read_text())["runs"] if given.json.exists() else []
    data = {
        "machine": this_machine().summary,
        "runs": [*before, {"settings": settings, "ways": rows, "failed": failed}],
    }
    given.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
