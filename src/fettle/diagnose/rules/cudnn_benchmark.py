"""The rule `cudnn-benchmark`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about


def look(seen: Evidence) -> Finding | None:
    """cuDNN picks its algorithm without trying."""
    if seen.facts.device != "cuda" or seen.settings.get("cudnn_benchmark") == "True" or not seen.facts.num_conv:
        return None
    ops = [op for op in seen.operations if "conv" in op.name]
    could = sum(max(0.0, op.seconds - op.flops / seen.peak_flops(op.dtype)) for op in ops)
    return about(
        seen,
        "cudnn-benchmark",
        "cuDNN chooses its algorithms without trying them.",
        could,
        ops,
        {"cudnn_benchmark": "on"},
        "torch.backends.cudnn.benchmark = True where shapes are few",
        formula="(time of convolutions - FLOPs / measured peak) / call",
        before="y = model(x)",
        after="torch.backends.cudnn.benchmark = True\ny = model(x)",
        opportunity=True,
    )
