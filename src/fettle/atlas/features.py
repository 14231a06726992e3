"""What a model and a machine are, as numbers: from what the study's probe saw, at no further cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fettle.atlas.table import Subject

if TYPE_CHECKING:
    from fettle.diagnose import Evidence
    from fettle.machine import Machine
    from fettle.techniques import Facts

_RECURRENT = ("lstm", "gru", "rnn")
_VECTOR = ("avx512f", "avx2", "sve", "neon")
_MOST_SHAPES = 3


def model_features(evidence: Evidence) -> dict[str, Any]:
    """The columns of `Subject` that the operators of one call fill. Empty where none was recorded."""
    ops = evidence.operations
    seconds = sum(op.seconds for op in ops)
    if not seconds:
        return {}
    flops = sum(op.flops for op in ops)
    recurrent_s = sum(op.seconds for op in ops if any(word in f"{op.name} {op.kind}".lower() for word in _RECURRENT))
    ranked = sorted(ops, key=lambda op: (-op.flops, -op.seconds, op.name))  # products first, if there are any
    shapes = dict.fromkeys("x".join(map(str, op.largest)) for op in ranked if op.largest)

    def of_flops(kind: str) -> float:
        return min(1.0, sum(op.flops for op in ops if kind in op.name) / flops) if flops else 0.0

    return {
        "flops": float(flops),
        "bytes": float(sum(op.bytes for op in ops)),
        "calls": float(sum(op.calls for op in ops)),
        "matrix": _share(evidence, seconds, "matrix"),
        "pointwise": _share(evidence, seconds, "pointwise"),
        "layout": _share(evidence, seconds, "layout", "cast"),
        "index": _share(evidence, seconds, "index"),
        "convolution": of_flops("convolution"),
        "attention": of_flops("attention"),
        "recurrent": min(1.0, recurrent_s / seconds),
        "shapes": " ".join(list(shapes)[:_MOST_SHAPES]),
    }


def subject(
    name: str, fingerprint: str, facts: Facts, features: Mapping[str, Any], machine: Machine,
    peaks: Mapping[str, float], family: str = "",
) -> Subject:  # fmt: skip
    """A model on a machine. `features` are those of `model_features`, empty where they are not known."""
    vector = next((flag for flag in _VECTOR if flag in facts.cpu_flags), "")
    units = " ".join(flag for flag in facts.cpu_flags if flag.startswith("amx"))
    if facts.device == "cuda":
        units = facts.amd or "sm{}{}".format(*facts.cuda_capability)
    others = {name: version for name, version in machine.versions.items() if name not in ("torch", "torch-fettle")}
    return Subject(
        workload=name[:300], fingerprint=fingerprint, family=(family or _family(facts, features))[:300],
        mode=facts.mode, device=facts.device, dtype=facts.dtype, parameters=facts.num_parameters,
        parameter_bytes=facts.parameter_bytes, samples=facts.samples, **features,
        machine=machine.id, cpu=machine.cpu[:300], gpu=", ".join(machine.gpus)[:300], cores=machine.cores,
        vector=vector, matrix_units=units, peak_fp32=peaks.get("matmul_float32"),
        peak_bf16=peaks.get("matmul_bfloat16"), peak_copy=peaks.get("copy"), torch=machine.versions.get("torch", ""),
        versions=" ".join(f"{name}={version}" for name, version in sorted(others.items()))[:300],
    )  # fmt: skip


def _family(facts: Facts, features: Mapping[str, Any]) -> str:
    """What kind of model it looks like; a person may know better (a mixture, a graph network, a diffusion model)."""
    if features.get("recurrent", 0.0) > 0.2:
        return "recurrent"
    attends = facts.uses_sdpa or facts.manual_attention or features.get("attention", 0.0) > 0
    convolves = features.get("convolution", 1.0 if facts.num_conv and not facts.num_linear else 0.0) > 0.5
    if attends:
        return "diffusion" if convolves else "transformer"
    return "convolutional" if convolves else "MLP" if facts.num_linear else "other"


def _share(evidence: Evidence, seconds: float, *groups: str) -> float:
    return min(1.0, evidence.seconds(*groups) / seconds)
