"""What is fettle's own HTTP connection worth? The same engine and worker behind it, behind uvicorn and behind granian.

    pip install uvicorn granian
    python bench/http_front.py --json bench/results/http_front.json

All three listen in one process, on one event loop (uvloop), and call one `App`; only what lies between the socket and
the `App` differs. Models as in `serving.py`: `tiny`, a call of microseconds, and `middle`, of about 11 ms. At 1, 8 and
32 clients the fronts take turns in random order, `--rounds` times; shown are requests a second and the median, over
rounds, of own over the other's, with the least and the greatest.
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
from pathlib import Path
from typing import Any

from serving import PEERS, numbers, package, request_to, wait_until_it_answers

from fettle.load.loops import closed_loop
from fettle.loop import run
from fettle.machine import this_machine

OWN, OTHERS = "own", ("uvicorn", "granian")
CLIENTS = (1, 8, 32)


def measured(model: str, fronts: list[str], port: int, rounds: int, seconds: float, folder: Path) -> dict[str, Any]:
    """By clients and front: requests a second of each round."""
    package(model, folder)
    ports = {name: port + place for place, name in enumerate((OWN, *OTHERS)) if name in fronts}
    command = [sys.executable, str(PEERS / "fronts.py"), str(folder / model), str(port)]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        for own in ports.values():
            wait_until_it_answers("fettle", own, process)
        found: dict[str, Any] = {str(clients): {name: [] for name in fronts} for clients in CLIENTS}
        for _ in range(rounds):
            for clients in CLIENTS:
                for name in random.sample(fronts, len(fronts)):
                    seen = numbers(run(closed_loop([request_to("fettle", ports[name])], clients, seconds)))
                    if seen["failed"]:
                        raise RuntimeError(f"{name}: {seen['failed']} requests failed")
                    found[str(clients)][name].append(round(seen["throughput"], 1))
        return found
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


def ratios(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Own over each other: median, least and greatest of the rounds."""
    made = {}
    for name, values in found.items():
        if name != OWN:
            each = [own / other for own, other in zip(found[OWN], values, strict=True)]
            made[name] = [round(x, 3) for x in (statistics.median(each), min(each), max(each))]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "middle"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--port", type=int, default=18400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    fronts = [OWN, *(name for name in OTHERS if importlib.util.find_spec(name))]
    print("not installed: " + (", ".join(sorted(set(OTHERS) - set(fronts))) or "nothing"))
    results: dict[str, Any] = {"machine": this_machine().summary, "models": {}}
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            found = measured(model, fronts, options.port, options.rounds, options.seconds, Path(folder))
        results["models"][model] = {"requests_per_s": found, "own_over": {at: ratios(row) for at, row in found.items()}}
        for clients, row in found.items():
            print(model, clients, {name: statistics.median(values) for name, values in row.items()}, ratios(row))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
