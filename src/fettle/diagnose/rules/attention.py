"""The rule `attention`."""

from __future__ import annotations

from fettle.diagnose.evidence import LAYOUT, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, named


def look(seen: Evidence) -> Finding | None:
    """Attention that writes its whole matrix to memory."""
    if seen.facts.uses_sdpa and not seen.facts.manual_attention:
        return None
    softmax = [op for op in named(seen, "_softmax") if len(op.largest) >= 3 and op.largest[-1] == op.largest[-2]]
    if not softmax:
        return None
    matrices = {op.largest for op in softmax}
    ops = [op for op in seen.operations if op.largest in matrices or op in softmax]
    modules = {op.module for op in softmax}
    ops += [op for op in named(seen, "bmm", "baddbmm") if op.module in modules and op not in ops]
    # A fused kernel still multiplies; it may reach more than one large product does, so half of that time is granted.
    could = sum(max(0.0, op.seconds - 0.5 * (op.flops / seen.peak_flops(op.dtype) if op.flops else 0.0)) for op in ops)
    could += 0.5 * sum(op.seconds for op in seen.operations if op.group == LAYOUT and op.module in modules)
    shape = "x".join(map(str, max(matrices)))
    return about(
        seen,
        "attention",
        f"Attention is written out by hand and stores its matrix of {shape}.",
        ops,
        "use torch.nn.functional.scaled_dot_product_attention",
        seconds=could,
        levels={"attention": "sdpa"},
        formula="(time of operators on the matrix - half of FLOPs / measured peak) / call",
        before="y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v",
        after="y = F.scaled_dot_product_attention(q, k, v)",
    )
