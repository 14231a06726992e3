"""Text token by token: fettle's generate handler with kept keys and values and without, and transformers' own.

    python bench/generation.py --rounds 3

The same model (half of GPT-2's layers, random weights: nothing is downloaded), the same prompts, greedy, the same
number of new tokens, in one process. The ways take turns, in random order, `--rounds` times; shown is the median time,
and the median over the rounds of its ratio to transformers' `generate` of the same round, which is what a user would
write instead. The tokens must be the same, else nothing is timed and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import tokenizers
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fettle.machine import this_machine
from fettle.package import generating
from fettle.package.export import write_package
from fettle.package.handler import find_handler
from fettle.package.handlers.generate import Ask
from fettle.package.handlers.sampling import Sampling
from fettle.package.model_runner import ModelRunner
from fettle.recipe import Recipe
from fettle.workload import Workload

WORDS = 5000


def model_of(layers: int, width: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=max(1, width // 64), vocab_size=WORDS, bos_token_id=None,
        eos_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def running_of(model: GPT2LMHeadModel, folder: Path, most: int, *, keeps: bool):
    ids = torch.randint(0, WORDS, (2, 16))
    work = Workload(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(WORDS)}, "0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with mock.patch.object(generating, "cached", generating.cached if keeps else lambda *given: None):
        package = write_package(
            work, Recipe(), folder, name="gpt", handler="generate", files={"tokenizer.json": made.to_str().encode()},
            handler_settings={"max_new_tokens": most, "max_tokens": 1024},
        )  # fmt: skip
    assert keeps == ("past" in {spec.name for spec in package.manifest.inputs})
    return find_handler(package, ModelRunner(package), "").running(8, 0, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("generation.json"))
    given = parser.parse_args()
    model = model_of(given.layers, given.width)
    found = []
    print(f"exporting a model of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters, twice",
          flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        handlers = {
            "fettle, kept": running_of(model, Path(folder) / "kept", given.new, keeps=True),
            "fettle, whole text": running_of(model, Path(folder) / "whole", given.new, keeps=False),
        }
        for rows in given.rows:
            ids = torch.randint(0, WORDS, (rows, given.prompt))
            texts = [" ".join(map(str, row)) for row in ids.tolist()]
            asks = [Ask(text=text, sampling=Sampling(max_tokens=given.new)) for text in texts]

            def by(running, asks=asks) -> list[str]:
                texts = [""] * len(asks)

                def tell(number: int, said: Any) -> None:
                    texts[number] += said.text

                for number, ask in enumerate(asks):
                    running.add(number, ask)
                while running.texts:
                    running.step(tell)
                return [text.strip() for text in texts]

            def by_transformers(ids=ids) -> list[str]:
                with torch.inference_mode():
                    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                                         max_new_tokens=given.new)  # fmt: skip
                return [" ".join(map(str, row)) for row in out[:, ids.shape[1] :].tolist()]

            ways = {name: (lambda handler=handler: by(handler)) for name, handler in handlers.items()}
            ways["transformers"] = by_transformers
            answers = {name: way() for name, way in ways.items()}  # warms up, too
            wrong = [name for name, answer in answers.items() if answer != answers["transformers"]]
            if wrong:
                sys.exit(f"{rows} texts: not the tokens of transformers: {', '.join(wrong)}")
            took: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(given.rounds):
                for name in random.sample(list(ways), len(ways)):
                    began = time.perf_counter()
                    ways[name]()
                    took[name].append(time.perf_counter() - began)
            row: dict[str, dict[str, Any]] = {}
            print(f"{rows} texts, {given.prompt} + {given.new} tokens, the same ones by all", flush=True)
            for name, seconds in took.items():
                ratios = [mine / other for mine, other in zip(seconds, took["transformers"], strict=True)]
                row[name] = {"seconds": seconds, "ratio_to_transformers": statistics.median(ratios)}
                middle = statistics.median(seconds)
                print(f"  {name:20} {middle:8.3f} s  {rows * given.new / middle:8.1f} tokens/s  "
                      f"{statistics.median(ratios):6.2f}x transformers' time", flush=True)  # fmt: skip
            found.append({"rows": rows, "ways": row})
    settings = {key: value for key, value in vars(given).items() if key != "json"}
    found_all = {"machine": this_machine().summary, "settings": settings, "runs": found}
    given.json.write_text(json.dumps(found_all, indent=1) + "\n")


if __name__ == "__main__":
    main()
