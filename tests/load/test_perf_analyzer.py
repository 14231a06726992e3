"""Triton's load generator as an outside referee: it runs against the server, and agrees with ours within 5%.

Its binary is found on the PATH, or where FETTLE_PERF_ANALYZER says. It is in the wheel of tritonclient 2.51.0 for
manylinux1_x86_64, under data/bin, and wants libb64 and CUDA's runtime library (nvidia-cuda-runtime-cu12) beside it.
"""

import asyncio
import csv
import os
import shutil
import statistics
import subprocess

import pytest
import torch

from fettle.load.client import model_request
from fettle.load.loops import closed_loop
from fettle.package.export import write_package
from fettle.package.manifest import open_package
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.workload import Workload
from tests.serving import running

BINARY = shutil.which(os.environ.get("FETTLE_PERF_ANALYZER", "perf_analyzer"))
CLIENTS, SECONDS, ROUNDS = 4, 6, 5
WINDOWS = 3
"""That it wants to see before it says anything."""


def analyzed(server, folder):
    """Requests a second and median milliseconds as perf_analyzer sees them, over binary tensors."""
    out = folder / "seen.csv"
    command = [
        BINARY, "-m", "net", "-u", server.url.removeprefix("http://"), "-i", "http", "-b", "1",
        "--concurrency-range", str(CLIENTS), "--measurement-interval", str(SECONDS * 1000 // WINDOWS),
        "--percentile", "50", "--stability-percentage", "999", "-f", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert out.exists(), done.stdout[-1000:] + done.stderr[-1000:]
    with out.open() as file:
        (row,) = csv.DictReader(file)
    return float(row["Inferences/Second"]), float(row["p50 latency"]) / 1e3


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="perf_analyzer is not installed")
def test_it_agrees_with_our_load_generator(tmp_path):
    """They take turns; compared are the medians of their turns: the model's own time is most of each request."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 2048), *(torch.nn.Linear(2048, 2048) for _ in range(4))).eval()
    settings = ServeSettings(max_rows=1, threads=1)  # the same calls for both, however their requests meet
    write_package(Workload(model, [torch.rand(4, 64)]), Recipe(), tmp_path / "net", name="net", settings=settings)
    with running([open_package(tmp_path / "net")]) as server:
        request = model_request(server.url)
        seen = []
        for _ in range(ROUNDS):
            run = asyncio.run(closed_loop([request], CLIENTS, SECONDS))
            seen.append((run.throughput, run.percentile(50) * 1e3, *analyzed(server, tmp_path)))
        rate, median, their_rate, their_median = map(statistics.median, zip(*seen, strict=True))
        print(f"requests a second {rate:.1f} and {their_rate:.1f}, median ms {median:.2f} and {their_median:.2f}")
        assert abs(their_rate / rate - 1) < 0.05, seen
        assert abs(their_median / median - 1) < 0.05, seen
        stats = server.registry.choose("net").metrics
        assert stats.failed == 0
