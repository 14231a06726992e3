"""The rule `int8`."""

from __future__ import annotations

from fettle.diagnose.evidence import MATRIX, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, taken


def look(seen: Evidence) -> Finding | None:
    """Large products on a machine with 8-bit units."""
    if not {"avx512_vnni", "amx_int8"} & set(seen.facts.cpu_flags) or seen.facts.device != "cpu":
        return None
    ops = [op for op in seen.operations if op.group == MATRIX and op.flops > 1e7]
    if seen.share(taken(ops)) < 0.4:
        return None
    static = seen.facts.num_conv > seen.facts.num_linear
    how = {"quantize": "int8-static", "freeze": "on"} if static else {"quantize": "int8-dynamic"}
    return about(
        seen,
        "int8",
        "Large products could run in 8 bits on this machine's units, if the answers allow it.",
        ops,
        "quantise, with the accuracy checked",
        seconds=0.9 * taken(ops),
        levels={**how, "compile": "default", "grad": "inference_mode"},
        formula="9/10 of the time of large products / call",
        before="y = model(x)",
        after="torchao.quantize_(model, Int8DynamicActivationInt8WeightConfig())\ny = model(x)",
        opportunity=True,
    )
