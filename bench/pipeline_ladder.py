"""A pipeline, rung by rung: the whole call as given and with each recipe, in turn, with the workload's own metric.

    python bench/pipeline_ladder.py workloads/segment_anything.py --small small --json sam.json --recipe "mode=eval"
    python bench/pipeline_ladder.py TARGET start ...; python bench/pipeline_ladder.py TARGET rounds ...; ... stop
    python bench/pipeline_ladder.py workloads/stable_diffusion.py --small small --json sd.json --argument device=cuda \
        --given @attention=products --recipe "precision[unet]=bf16" --together

Each recipe has a process of its own, which is idle (it waits for a line) while another one calls. The first call, on
what the metric judges or the first batch, is no figure; then every process makes one call in each round, in an order
that changes from round to round. Where a call is short it only warms what the others' calls have emptied, and the
median of those that follow in half a second counts. What a recipe's code goes by is looked up on the factory `--small`
of the same file, a reduced pipeline of the same parts: looking a pipeline over takes several calls of it. A ratio is to
the call as given of the same round; what is printed is their pseudo-median with its interval of 95%.
Runs that are continued with the same `--json` add their rounds to it, so that a ladder may be made in pieces; the model
as given is part of each. `start` builds all processes and leaves them idle, `rounds` has those of the recipes that are
named make their calls, `stop` ends them: what needs the machine for itself is then short.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fettle.machine import this_machine
from fettle.measure import ratio_interval
from fettle.workload import Target, find_target

SHORT_S, SLICE_S = 0.2, 0.5


def with_arguments(target: Target, arguments: list[str]) -> Target:
    """The target whose factory is given those arguments: NAME=VALUE."""
    found = dict(one.split("=", 1) for one in arguments)
    numbers = {name: int(value) if value.isdigit() else value for name, value in found.items()}
    return replace(target, arguments={**target.arguments, **numbers})


def worker(target: str, small: str, recipe: str, arguments: list[str]) -> None:
    """Build the workload, apply the recipe, answer with the metric; then a timed call for every line that is read."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    import torch

    from fettle.measure import _meters
    from fettle.recipe import Recipe
    from fettle.techniques import conflict, environment, load, probe_facts, source
    from fettle.workload import map_tensors, spread, tensors

    words = recipe.split()
    arguments = arguments + [word[1:] for word in words if word.startswith("@")]
    metric, asked = None, Recipe.parse(" ".join(word for word in words if not word.startswith("@")))
    reduced = with_arguments(find_target(f"{target.partition(':')[0]}:{small}"), arguments)
    facts = probe_facts(reduced.load()) if asked.levels else None
    variables = environment(asked, facts) if facts else {}
    if any(os.environ.get(name) != value for name, value in variables.items()):  # read when a process starts
        os.dup2(answers.fileno(), 1)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **variables})
    made = with_arguments(find_target(target), arguments).load()
    on_gpu = any(tensor.is_cuda for tensor in made.model.parameters())

    def peak_bytes() -> int:
        if on_gpu:
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = peak_bytes()
    run = partial(made.call, made.model) if made.call else made.model
    if facts is None:
        metric = made.metric(run) if made.metric else None
    else:
        if why_not := conflict(asked, facts):
            raise SystemExit(why_not)
        optimize = load(source(asked, facts), "optimized")
        run = optimize(made.model, list(made.inputs), *([made.call] if made.call else []))
        metric = made.metric(run) if made.metric else None

    def call_s(batch: Any = made.inputs[0]) -> float:
        args, kwargs = spread(batch)
        start = time.perf_counter()
        found = run(*args, **kwargs)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        assert tensors(found)
        return seconds

    def enlarged(times: int) -> list:
        """The second call with so many times the rows, and all bytes of its peak; why there is none."""
        device = "cuda" if on_gpu else "cpu"
        try:
            batch = map_tensors(lambda one: one.repeat_interleave(times, 0), made.inputs[0])
            call_s(batch)  # it finds the memory, and compiles for these rows
            _meters.reset_peak(device)
            return [call_s(batch), _meters.peak_bytes(device)]
        except (RuntimeError, MemoryError) as error:
            return [None, None, str(error).partition("\n")[0]]
        finally:
            _meters.trim()
            _meters.reset_peak(device)  # on a GPU this gives back what is free: the others need it

    if made.metric is None:
        call_s()
    print(json.dumps({"metric": metric, "loaded_bytes": before}), file=answers, flush=True)
    for question in sys.stdin:
        if question == "stop\n":
            break
        if question.strip():
            print(json.dumps(enlarged(int(question))), file=answers, flush=True)
            continue
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = call_s()
        if seconds < SHORT_S:
            seconds = statistics.median(call_s() for _ in range(max(3, int(SLICE_S / seconds))))
        print(json.dumps([seconds, peak_bytes() - before]), file=answers, flush=True)


def start(asked: argparse.Namespace, recipes: list[str], folder: Path) -> None:
    """A process for each recipe, built and judged; its questions and answers are files of a folder of its own."""
    processes = {}
    for recipe in recipes:
        own = folder / hashlib.sha256(recipe.encode()).hexdigest()[:12]
        own.mkdir(parents=True)
        os.mkfifo(own / "questions")
        command = [sys.executable, __file__, asked.target, f"--small={asked.small}", f"--json={os.devnull}"]
        command += [f"--argument={one}" for one in asked.argument]
        with (own / "questions").open("r+b", buffering=0) as questions, (own / "answers").open("wb") as answers:
            processes[recipe] = subprocess.Popen(
                [*command, f"--worker={recipe}"], stdin=questions, stdout=answers, start_new_session=True
            )
        if not asked.together:
            wait_for(folder, {recipe: processes[recipe]})
    if asked.together:
        wait_for(folder, processes)


def wait_for(folder: Path, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Until they have answered with their metrics; one that ended instead is told."""
    for recipe, process in processes.items():
        own = folder / hashlib.sha256(recipe.encode()).hexdigest()[:12]
        while not (own / "answers").read_bytes().endswith(b"\n") and process.poll() is None:
            time.sleep(0.2)
        if process.poll() is not None:
            print(f"{recipe or 'as given'}: its process ended with exit code {process.returncode}", flush=True)
            continue
        print(f"{recipe or 'as given'}: metric {said_of(folder, recipe)['metric']}", flush=True)


def said_of(folder: Path, recipe: str) -> dict:
    """What a recipe's process said when it was ready, its metric and the bytes it held then; nothing where it ended."""
    answers = folder / hashlib.sha256(recipe.encode()).hexdigest()[:12] / "answers"
    lines = answers.read_text("utf-8").splitlines() if answers.exists() else []
    return json.loads(lines[0]) if lines else {}


def ask(folder: Path, recipe: str, question: str, answered: bool = True) -> list:
    """The answer of a recipe's process: seconds of a call, and bytes of its peak memory above the loaded model; to a
    number, those of a call with so many times the rows, and all bytes, or two times None and why."""
    own = folder / hashlib.sha256(recipe.encode()).hexdigest()[:12]
    before = (own / "answers").read_bytes().count(b"\n")
    with (own / "questions").open("wb") as questions:
        questions.write(question.encode() + b"\n")
    deadline = time.monotonic() + 300
    while answered and (own / "answers").read_bytes().count(b"\n") == before:
        if time.monotonic() > deadline:
            raise SystemExit(f"{recipe or 'as given'}: no answer in five minutes")
        time.sleep(0.02)
    return json.loads((own / "answers").read_text("utf-8").splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("what", nargs="?", choices=["all", "start", "rounds", "stop"], default="all")
    parser.add_argument("--small", required=True)
    parser.add_argument("--recipe", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--argument", action="append", default=[], metavar="NAME=VALUE", help="of the factory")
    parser.add_argument("--given", default="", metavar="@NAME=VALUE", help="further ones of the model as given")
    parser.add_argument("--together", action="store_true", help="build all processes side by side")
    parser.add_argument("--worker")
    asked = parser.parse_args()
    if asked.worker is not None:
        return worker(asked.target, asked.small, asked.worker, asked.argument)

    kept = json.loads(asked.json.read_text("utf-8")) if asked.json.exists() else {}
    kept |= {"target": asked.target, "machine": this_machine().summary}
    rows = kept.setdefault("recipes", {})
    recipes, folder = [asked.given, *asked.recipe], asked.json.with_suffix(".running")
    if asked.what in ("all", "start"):
        start(asked, recipes, folder)
    recipes = [recipe for recipe in recipes if said_of(folder, recipe)]
    if asked.given not in recipes:
        raise SystemExit("the model as given does not run: there is nothing to compare with")
    for recipe in recipes:
        rows[recipe] = {"seconds": [], "speedups": [], **rows.get(recipe, {}), **said_of(folder, recipe)}
    for _ in range(asked.rounds if asked.what in ("all", "rounds") else 0):
        seconds = {}
        for recipe in random.sample(recipes, len(recipes)):
            seconds[recipe], rows[recipe]["peak_bytes"] = ask(folder, recipe, "")
        for recipe, taken in seconds.items():
            rows[recipe]["seconds"].append(taken)
            rows[recipe]["speedups"].append(seconds[asked.given] / taken)
        print({recipe or "as given": round(taken, 2) for recipe, taken in seconds.items()}, flush=True)
    asked.json.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    if asked.what in ("all", "stop"):
        for recipe in recipes:
            ask(folder, recipe, "stop", answered=False)
        shutil.rmtree(folder)
    for recipe, row in rows.items():
        if row["seconds"]:
            times = ratio_interval([math.log(speedup) for speedup in row["speedups"]], 0.05)
            print(f"{times}  {row['metric']}  {row['peak_bytes'] / 2**30:.2f} GiB  {recipe or 'as given'}")


if __name__ == "__main__":
    main()
