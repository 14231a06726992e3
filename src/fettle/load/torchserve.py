"""Load runs in the columns of TorchServe's benchmark, its ``ab_report.csv``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = (
    "Benchmark", "TS failed requests", "TS throughput", "TS latency P50", "TS latency P90", "TS latency P99",
    "TS latency mean", "TS error rate", "Batch size", "Batch delay", "Workers", "Model", "Concurrency", "Input",
    "Requests", "Model_p50", "Model_p90", "Model_p99", "Queue time p50", "Queue time p90", "Queue time p99",
    "predict_mean", "handler_time_mean", "waiting_time_mean", "worker_thread_mean", "cpu_percentage_mean",
    "memory_percentage_mean", "gpu_percentage_mean", "gpu_memory_percentage_mean", "gpu_memory_used_mean",
)  # fmt: skip
"""The columns of that file, in its order."""


def torchserve_row(run: Mapping[str, Any], model: str, **known: Any) -> dict[str, str]:
    """A run (`fettle.load.run.as_data`) and what else is `known`, by column; what is not known stays empty."""
    total = sum(run["statuses"].values())
    bad = total - run["answered"]
    latency = {f"TS latency {name.upper()}": run["latency_ms"][name] for name in ("p50", "p90", "p99")}
    row = {
        "Benchmark": "fettle", "TS failed requests": bad, "TS throughput": run["throughput"], **latency,
        "TS latency mean": run["mean_ms"], "TS error rate": bad / total * 100 if total else 0.0, "Model": model,
        "Requests": total, "Concurrency": run["concurrency"] or None, **known,
    }  # fmt: skip
    return {column: _cell(row.get(column)) for column in COLUMNS}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
