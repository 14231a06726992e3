"""The rule `train-mode`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import UNKNOWN, about, named


def look(seen: Evidence) -> Finding | None:
    """The model computes dropout or batch statistics although it is called for answers."""
    if not seen.facts.training:
        return None
    names = ("native_dropout", "bernoulli_", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
    ops = named(seen, *names)
    if not ops and not seen.facts.train_mode_differs:
        return None
    return about(
        seen,
        "train-mode",
        "The model is in train mode: it drops out values or normalises with the batch's own statistics.",
        ops,
        "call model.eval() before inference",
        seconds=max(1 - seen.share(seen.ideal_s()), seen.variants.get("mode=eval", UNKNOWN)[2]) * seen.whole_s,
        levels={"mode": "eval"},
        always=True,
        formula="(call - products at the measured peak) / call, or what model.eval() saved when it was tried",
        before="y = model(x)",
        after="model.eval()\ny = model(x)",
    )
