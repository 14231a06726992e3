"""The rule `batch-norm`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, named


def look(seen: Evidence) -> Finding | None:
    """Batch norm in eval mode that could be folded into the convolution before it."""
    if seen.facts.training:
        return None
    ops = named(
        seen, "native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_with_update", "cudnn_batch_norm"
    )
    return about(
        seen,
        "batch-norm",
        "Batch norms run as operators of their own, though their weights could be folded away.",
        ops,
        "compile with frozen weights, or torch.nn.utils.fusion.fuse_conv_bn_eval",
        levels={"compile": "default", "freeze": "on", "grad": "inference_mode"},
        formula="time of batch norms / call",
        before="y = bn(conv(x))",
        after="conv = fuse_conv_bn_eval(conv, bn)\ny = conv(x)",
        opportunity=True,
    )
