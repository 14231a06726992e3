"""Small traces made by hand: every number in the tests can be checked on paper. Times are microseconds, as in the
files.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from fettle.trace import Trace, load


class Build:
    """Collects events; `host` and `launch` return what later events refer to."""

    def __init__(self, **metadata: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.metadata = metadata
        self.correlation = 100

    def add(
        self, cat: str, name: str, ts: float, dur: float, *, pid: Any = 1, tid: Any = 1, ph: str = "X", **args: Any
    ) -> Build:
        self.events.append(
            {"ph": ph, "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )
        return self

    def step(self, number: int, ts: float, dur: float) -> Build:
        return self.add("user_annotation", f"ProfilerStep#{number}", ts, dur)

    def op(self, name: str, ts: float, dur: float, *, tid: Any = 1, **args: Any) -> Build:
        return self.add("cpu_op", name, ts, dur, tid=tid, **args)

    def call(self, name: str, ts: float, dur: float, *, tid: Any = 1, **args: Any) -> Build:
        return self.add("cuda_runtime", name, ts, dur, tid=tid, **args)

    def kernel(
        self,
        name: str,
        ts: float,
        dur: float,
        *,
        call: float | None = None,
        call_dur: float = 2,
        device: int = 0,
        stream: int = 7,
        tid: Any = 1,
        launch: str = "cudaLaunchKernel",
        cat: str = "kernel",
        **args: Any,
    ) -> Build:
        """Device work; with `call`, also its launch at that time."""
        self.correlation += 1
        if call is not None:
            self.call(launch, call, call_dur, tid=tid, correlation=self.correlation)
        return self.add(
            cat,
            name,
            ts,
            dur,
            pid=device,
            tid=stream,
            device=device,
            stream=stream,
            correlation=self.correlation,
            **args,
        )

    def text(self) -> str:
        return json.dumps({**self.metadata, "traceEvents": self.events})

    def write(self, path: Path) -> Path:
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(self.text().encode()))
        else:
            path.write_text(self.text())
        return path

    def load(self, folder: Path, name: str = "trace.json") -> Trace:
        return load(self.write(folder / name), use_sidecar=False)


def training(
    steps: int = 3, *, kernel: float = 30, extra_gap: float = 0.0, name: str = "gemm", ranks: int = 1
) -> Build:
    """A small loop: per 100 us step one operator launching one kernel, an all-reduce, a copy, and a synchronise."""
    build = Build(distributedInfo={"rank": 0, "world_size": ranks})
    length = 100 + extra_gap
    for i in range(steps):
        t = 1000 + i * length
        build.step(i, t, length)
        build.op("aten::linear", t + 5 + extra_gap, 10, **{"Input Dims": [[8, 8]], "External id": 10 + i})
        build.kernel(f"void {name}<4>(int)", t + 20 + extra_gap, kernel, call=t + 8 + extra_gap)
        build.kernel(
            "ncclDevKernel_AllReduce_Sum",
            t + 20 + kernel + extra_gap,
            20,
            call=t + 30 + extra_gap,
            stream=20,
            **{
                "Collective name": "allreduce",
                "In msg nelems": 1000,
                "Out msg nelems": 1000,
                "dtype": "Float",
                "Group size": 2,
                "Process Group Name": "0",
            },
        )
        build.kernel(
            "Memcpy DtoH",
            t + 45 + kernel + extra_gap,
            5,
            call=t + 40 + extra_gap,
            launch="cudaMemcpyAsync",
            cat="gpu_memcpy",
            bytes=5000,
            **{"memory bandwidth (GB/s)": 1.0},
        )
        build.call("cudaDeviceSynchronize", t + 50 + extra_gap, kernel + 5)
    return build
