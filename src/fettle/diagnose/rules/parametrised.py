"""The rule `parametrised`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, named


def look(seen: Evidence) -> Finding | None:
    """Parametrisations (weight norm, spectral norm) computed on every call."""
    names = ("_weight_norm", "_weight_norm_interface", "linalg_vector_norm", "norm")
    ops = [
        op
        for op in named(seen, *names)
        if "arametriz" in op.kind or "arametriz" in op.module or "weight_norm" in op.name
    ]
    return about(
        seen,
        "parametrised",
        "Weights are computed anew on every call by a parametrisation.",
        ops,
        "torch.nn.utils.parametrize.remove_parametrizations",
        formula="time of the parametrisation's operators / call",
        before="layer = weight_norm(layer)",
        after="remove_parametrizations(layer, 'weight')  # before inference",
    )
