"""The rule `cudnn-benchmark`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, above_peak


def look(seen: Evidence) -> Finding | None:
    """cuDNN picks its algorithm without trying."""
    if seen.facts.device != "cuda" or seen.settings.get("cudnn_benchmark") == "True" or not seen.facts.num_conv:
        return None
    ops = [op for op in seen.operations if "conv" in op.name]
    return about(
        seen,
        "cudnn-benchmark",
        "cuDNN chooses its algorithms without trying them.",
        ops,
        "torch.backends.cudnn.benchmark = True where shapes are few",
        seconds=above_peak(seen, ops),
        levels={"cudnn_benchmark": "on"},
        formula="(time of convolutions - FLOPs / measured peak) / call",
        before="y = model(x)",
        after="torch.backends.cudnn.benchmark = True\ny = model(x)",
        opportunity=True,
    )
