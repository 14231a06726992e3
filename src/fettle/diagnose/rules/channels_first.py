"""The rule `channels-first`."""

from __future__ import annotations

from fettle.diagnose.evidence import LAYOUT, POINTWISE, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, above_peak, taken


def look(seen: Evidence) -> Finding | None:
    """Convolutions far below the machine's peak in the layout that suits them least."""
    if not seen.facts.num_4d_inputs or not seen.facts.num_conv:
        return None
    ops = [op for op in seen.operations if "conv" in op.name]
    norms = [op for op in seen.operations if op.group == POINTWISE and len(op.largest) == 4]
    reached = sum(op.flops for op in ops) / max(taken(ops), 1e-12)
    peak = seen.peak_flops("float32")
    line = f"convolutions reach {reached / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s" if peak != float("inf") else ""
    return about(
        seen,
        "channels-first",
        "Convolutions run in the channels-first layout, below the machine's peak.",
        ops,
        "convert model and input to torch.channels_last",
        seconds=above_peak(seen, ops) + 0.5 * taken(norms) + 0.5 * seen.seconds(LAYOUT),
        levels={"channels_last": "on"},
        more=(line,),
        formula="(time of convolutions - FLOPs / measured peak, and half of norms and copies) / call",
        before="y = model(x)",
        after="model.to(memory_format=torch.channels_last)\ny = model(x.to(memory_format=torch.channels_last))",
        opportunity=True,
    )
