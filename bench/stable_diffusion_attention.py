"""Stable Diffusion by the kinds of attention that PyTorch's post on accelerating diffusers compares: for 1, 2, 4, ...
pictures at once a race of all of them, and the most pictures that each can make within a limit of memory.

    python bench/stable_diffusion_attention.py --model middle --memory 4GiB --json attention.json
    python bench/stable_diffusion_attention.py --device cuda --json attention.json     # 2.1 as published, bfloat16
    python bench/stable_diffusion_attention.py most ...; python bench/stable_diffusion_attention.py 4 ...

The file is written after each call, and the same command goes on where it was stopped; `most` or a number is that piece
alone. In a race all configurations sample in turn, A B C D E A B ..., each in a process of its own (those of
bench/pipeline_ladder.py), the second of two calls; ratios are to the first configuration of the same round. Beside the
file, in a folder of its name, stands a picture of every round for each number of pictures. On a GPU the limit is its
memory; `--memory` counts the whole process. The metric is that of one picture.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench import pipeline_ladder as ladder  # noqa: E402
from fettle.files import write_text  # noqa: E402
from fettle.machine import this_machine  # noqa: E402
from fettle.measure import Trial  # noqa: E402
from fettle.page.drawn import write_pictures  # noqa: E402
from fettle.recipe import Recipe  # noqa: E402
from fettle.studies.batches import largest  # noqa: E402
from fettle.studies.charts import figures  # noqa: E402
from fettle.studies.table import Experiment, Response, Table  # noqa: E402
from fettle.techniques import LARGEST  # noqa: E402
from fettle.units import parse_size, size_text  # noqa: E402

COMMON = {
    "cpu": "grad=inference_mode",
    "cuda": "grad=inference_mode precision[unet]=bf16 precision[vae.decoder]=bf16 precision[text_encoder]=bf16",
}
CONFIGURATIONS = {
    "products and a softmax": "@attention=products",
    "SDPA, math": "sdpa_backend[unet]=math",
    "SDPA, memory-efficient": "sdpa_backend[unet]=efficient",
    "SDPA, flash": "sdpa_backend[unet]=flash",
    "SDPA, flash, compiled": "sdpa_backend[unet]=flash compile[unet]=default compile[vae.decoder]=default",
    **({"xFormers": "@attention=xformers"} if find_spec("xformers") else {}),
}
FIRST, NUMBERS = next(iter(CONFIGURATIONS)), [2**power for power in range(int(math.log2(LARGEST)) + 1)]


class Study:
    """What is known, in a file that is written after each call, and the processes that find out more."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.running = asked, asked.json.with_suffix(".running")
        target = f"{ROOT / 'workloads' / 'stable_diffusion.py'}:{asked.model}"
        self.processes = argparse.Namespace(target=target, small="small", together=asked.device == "cuda")
        about = {
            "machine": this_machine().summary, "model": asked.model, "steps": asked.steps,
            "memory_bytes": parse_size(asked.memory) if asked.memory else None,
        }  # fmt: skip
        self.known: dict[str, Any] = {"most": {}, "pictures": {}, **about}
        if asked.json.exists():
            self.known = json.loads(asked.json.read_text("utf-8"))
            if other := [name for name in about if self.known[name] != about[name]]:
                raise SystemExit(f"{asked.json} is of another `{other[0]}`: name another file")

    def keep(self) -> None:
        self.known["table"] = table(self.known)
        write_text(self.asked.json, json.dumps(self.known, indent=1) + "\n")

    def with_processes(self, names: list[str], steps: int, work: Callable[[dict[str, str]], None]) -> None:
        """Do that with a process for each configuration, given the recipes of those that run here."""
        self.processes.argument = [f"device={self.asked.device}", f"steps={steps}"]
        recipes = {name: f"{CONFIGURATIONS[name]} {COMMON[self.asked.device]}" for name in names}
        shutil.rmtree(self.running, ignore_errors=True)
        try:
            ladder.start(self.processes, list(recipes.values()), self.running)
            work({name: recipe for name, recipe in recipes.items() if ladder.said_of(self.running, recipe)})
        finally:
            for recipe in filter(lambda one: ladder.said_of(self.running, one), recipes.values()):
                ladder.ask(self.running, recipe, "stop", answered=False)
            shutil.rmtree(self.running, ignore_errors=True)

    def most(self) -> None:
        """The most pictures of each configuration, each alone on the machine."""
        for name in CONFIGURATIONS:
            row = self.known["most"].setdefault(name, {"tries": {}})
            if "pictures" not in row:
                # what a call holds does not depend on the steps
                self.with_processes([name], 2, partial(self.find, row))
                self.keep()
                print(f"{name}: {row['pictures']} pictures at most; {row['why']}", flush=True)

    def find(self, row: dict[str, Any], recipes: dict[str, str]) -> None:
        found, why = 0, "it does not run here"
        for recipe in recipes.values():
            tried = partial(self.tried, recipe, row["tries"])
            found, why = largest(tried, self.known["memory_bytes"] or math.inf)
        row |= {"pictures": found, "why": why}

    def tried(self, recipe: str, tries: dict[str, Any], number: int) -> Trial:
        if str(number) not in tries:
            tries[str(number)] = ladder.ask(self.running, recipe, str(number))
            self.keep()
        _, peak, *why = tries[str(number)]
        return Trial(Recipe(), "failed", why[0]) if why else Trial(Recipe(), "measured", peak_bytes=peak)

    def race(self, number: int) -> None:
        """Rounds of all configurations that make so many pictures at once."""
        rows = self.known["pictures"].setdefault(str(number), {})
        most = {name: row.get("pictures", LARGEST) for name, row in self.known["most"].items()}
        names = [name for name in CONFIGURATIONS if most.get(name, LARGEST) >= number]
        missing = [name for name in names if len(rows.get(name, {}).get("seconds", ())) < self.asked.rounds]
        if not [name for name in missing if not rows.get(name, {}).get("why")]:
            return

        def rounds(recipes: dict[str, str]) -> None:
            for name in names:
                row = rows.setdefault(name, {"seconds": [], "why": ""})
                row["why"] = "" if name in recipes else "it does not run here"
                row |= ladder.said_of(self.running, recipes[name]) if name in recipes else {}
            for turn in range(self.asked.rounds):
                for name, recipe in recipes.items():
                    row = rows[name]
                    if len(row["seconds"]) > turn or row["why"]:
                        continue
                    seconds, row["peak_bytes"], *why = ladder.ask(self.running, recipe, str(number))
                    row["why"] = "".join(why)
                    row["seconds"] += [] if why else [seconds]
                    self.keep()
                print(f"{number} pictures: round {turn + 1} of {self.asked.rounds}", flush=True)

        self.with_processes(names, self.asked.steps, rounds)
        self.keep()


def table(known: dict[str, Any]) -> list[str]:
    """Configurations by numbers of pictures: seconds a picture, how many times as fast as the first of the same rounds,
    and the most pictures that fit."""
    numbers = sorted(map(int, known["pictures"]))
    heads = [f"{number}: s a picture, times as fast" for number in numbers]
    lines = [f"| {' | '.join(['attention', *heads, 'similarity', 'most pictures', 'peak at these'])} |"]
    lines.append(f"| --- {'| --- ' * len(numbers)}| --: | --: | --: |")
    for name in CONFIGURATIONS:
        cells = [name]
        for number in numbers:
            rows = known["pictures"][str(number)]
            taken, first = (rows.get(one, {}).get("seconds", []) for one in (name, FIRST))
            ratios = [one / other for one, other in zip(first, taken, strict=False)]
            over = f", {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
            cells.append(f"{statistics.median(taken) / number:.3g}{over}" if taken else "–")
        judged = [row[name]["metric"] for row in known["pictures"].values() if "metric" in row.get(name, {})]
        cells.append(f"{judged[0]:.4f}" if judged else "–")
        most = known["most"].get(name, {})
        peak = most.get("tries", {}).get(str(most.get("pictures")), (None, None))[1]
        cells += [str(most.get("pictures", "–")), size_text(peak) if peak else "–"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def pictures(known: dict[str, Any], folder: Path) -> None:
    """A picture of every round for each number of pictures, as a study has it."""
    experiments = [
        Experiment(
            {"attention": name}, {"seconds": statistics.median(row["seconds"])}, f"{number} at once",
            rounds=list(enumerate(row["seconds"], 1)),
        )
        for number, rows in known["pictures"].items() for name, row in rows.items() if len(row["seconds"]) > 2
    ]  # fmt: skip
    if experiments:
        found = Table({"attention": ("", *CONFIGURATIONS)}, (Response("seconds"),), tuple(experiments))
        drawn = zip(figures(found, (), {}), found.groups, strict=True)
        write_pictures([replace(figure, name=group.replace(" ", "-")) for figure, group in drawn], folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=["all", "most", *map(str, NUMBERS)])
    parser.add_argument("--model", default="workload", choices=["workload", "middle", "small"])
    parser.add_argument("--device", default="cpu", choices=list(COMMON))
    parser.add_argument("--memory", metavar="SIZE", help="bytes of a process that no call may exceed, as in 4GiB")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    if asked.device == "cpu" and not asked.memory:
        raise SystemExit("a CPU has no memory of its own: name a limit, --memory 4GiB")
    study = Study(asked)
    if asked.what in ("all", "most"):
        study.most()
    fit = max((row.get("pictures", LARGEST) for row in study.known["most"].values()), default=LARGEST)
    for number in NUMBERS if asked.what == "all" else [int(asked.what)] * (asked.what != "most"):
        if number <= fit:
            study.race(number)
    study.keep()
    pictures(study.known, asked.json.with_suffix(""))
    print("\n".join(study.known["table"]))


if __name__ == "__main__":
    main()
