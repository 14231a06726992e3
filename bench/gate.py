"""Does the performance gate find planted regressions, and does it let unchanged code pass?

In a git repository that this benchmark makes, a model of 100 equal steps; a commit that adds 3 or 10 of them is 3% or
10% slower, and one that only adds a comment is not. Each piece is one gate, as `fettle bench --against` runs it, of the
working tree against its parent commit, on the quiet machine or beside a neighbour.

`own` is each of the last commits of fettle's own repository against the one before it, none of which changed the model
in `workloads/lstm.py`.

    python bench/gate.py --minutes 1       # goes on from the JSON that it left
    python bench/gate.py --show            # the table

3% is looked for with ``--fail-slower 2%``, as the documentation advises, all else with the default of 3%.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from busy import NEIGHBOURS, neighbour, others, quota

from fettle.gate import Settings, gate
from fettle.machine import this_machine
from fettle.measure import Interval, Rules, verdict

HERE = Path(__file__).parent
MODEL = """
import torch
from steps import STEPS

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(192, 192)

    def forward(self, x):
        for _ in range(STEPS):
            x = torch.tanh(self.layer(x))
        return x

def workload():
    return Model().eval(), [torch.randn(16, 192)]
"""
PLANTED = {"none": ("STEPS = 100  # unchanged\n", 0.03), "3%": ("STEPS = 103\n", 0.02), "10%": ("STEPS = 110\n", 0.03)}
"""What the new code is, and the limit."""
OWN = "own"
WAIT_S = 300.0
"""How long a piece waits for others to go."""


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=bench", "-c", "user.email=bench@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def repository(folder: Path, planted: str) -> Path:
    """A repository of two commits; the second has the planted change."""
    git(folder, "init", "-q")
    (folder / "model.py").write_text(MODEL)
    for message, text in (("before", "STEPS = 100\n"), (planted, PLANTED[planted][0])):
        (folder / "steps.py").write_text(text)
        git(folder, "add", "model.py", "steps.py")
        git(folder, "commit", "-qm", message)
    return folder / "model.py"


def own_commits(most: int) -> list[str]:
    """The last of fettle's own commits that changed more than results."""
    words = ["--format=%h", "--first-parent", f"-{most}", "--", "src", "workloads", "docs", "tests"]
    return git(HERE.parent, "log", *words).split()


def own_repository(folder: Path, commit: str) -> Path:
    """fettle's own, at a commit."""
    git(folder, "clone", "-q", "--shared", str(HERE.parent), "fettle")
    clone = folder / "fettle"
    git(clone, "checkout", "-q", commit)
    return clone / "workloads" / "lstm.py"


def piece(planted: str, beside: str, name: str) -> dict[str, object]:
    """One gate; `name` is its number, or the commit of fettle's own history."""
    with tempfile.TemporaryDirectory() as folder, neighbour(beside), quota(beside) as processes:
        if processes is not None:
            processes.write_text(str(os.getpid()))
        own = planted == OWN
        model = own_repository(Path(folder), name) if own else repository(Path(folder), planted)
        limit = PLANTED["none" if own else planted][1]
        settings = Settings(fail_slower=limit, output=Path(folder) / "out")
        began = time.monotonic()
        found = gate(str(model), "HEAD~1", settings=settings)
        (time_change,) = found.judged
        change = time_change.change
        return {
            "verdict": found.verdict,
            "change": None if change is None else [round(v, 5) for v in (change.estimate, change.low, change.high)],
            "processes": time_change.processes,
            "quiet": found.trials[1].is_quiet,
            "seconds": round(time.monotonic() - began, 1),
        }


def alone(until: float) -> bool:
    """Wait until nobody else has the cores, `WAIT_S` at most; whether that came."""
    until = min(until, time.monotonic() + WAIT_S)
    while (load := others(0.5)).others > 0.1:
        if time.monotonic() > until:
            print(f"others have {load.others:.0%} of the cores: nothing is measured", flush=True)
            return False
        time.sleep(2.0)
    return True


def differs(one: dict[str, object]) -> bool:
    """Whether the interval says that the two are not equally fast, whatever the limit."""
    found = None if one["change"] is None else Interval(*one["change"])
    return verdict(found, Rules().indifference) in ("faster", "slower")


def summary(pieces: dict[str, dict[str, object]]) -> list[dict[str, object]]:
    """By what was planted and beside whom: how many gates said what."""
    rows = []
    for planted in (*PLANTED, OWN):
        for beside in NEIGHBOURS:
            found = [one for key, one in pieces.items() if key.rpartition(" ")[0] == f"{planted} {beside}"]
            if found:
                said = [one["verdict"] for one in found]
                rows.append({"planted": planted, "neighbour": beside, "gates": len(found), "worse": said.count("worse"),
                             "within": said.count("within"), "cannot tell": said.count("cannot tell"),
                             "a difference": sum(differs(one) for one in found)})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing later")
    parser.add_argument("--planted", nargs="+", default=list(PLANTED), choices=[*PLANTED, OWN])
    parser.add_argument("--neighbours", nargs="+", default=["none", "busy"], choices=list(NEIGHBOURS))
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gate.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the neighbour ends with this benchmark
    empty: dict[str, object] = {"machine": this_machine().summary, "pieces": {}}
    seen = json.loads(options.output.read_text()) if options.output.exists() else empty
    pieces, longest, end = seen["pieces"], 0.0, time.monotonic() + 60 * options.minutes
    own = own_commits(options.repeats)
    order = [f"{planted} {beside} {own[number] if planted == OWN else number}" for number in range(options.repeats)
             for beside in options.neighbours for planted in options.planted]  # fmt: skip
    for key in [] if options.show else order:
        if key in pieces:
            continue
        if time.monotonic() + longest > end:
            break
        if not alone(end):
            break
        planted, beside, name = key.split(" ")[0], " ".join(key.split(" ")[1:-1]), key.split(" ")[-1]
        began = time.monotonic()
        pieces[key] = piece(planted, beside, name)
        longest = max(longest, time.monotonic() - began)
        print(key, pieces[key], flush=True)
        options.output.write_text(json.dumps({**seen, "summary": summary(pieces)}, indent=1) + "\n")
    for row in summary(pieces):
        print(row)


if __name__ == "__main__":
    main()
