"""What suits this machine: number types, layouts, threads, libraries and the units that it has."""

from __future__ import annotations

from fettle.diagnose.evidence import LAYOUT, MATRIX, POINTWISE, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._rule import (
    CROWDED,
    LEAST,
    UNKNOWN,
    about_operators,
    above_peak,
    cause,
    in_bf16,
    rule,
    taken,
)


@rule("inference", "training")
def float32(call: Evidence) -> Finding | None:
    """Products in float32 on a machine whose 16-bit units are faster."""
    ops = [op for op in call.operations if op.group == MATRIX and op.dtype == "float32"]
    fast, slow = call.peak_flops("bfloat16"), call.peak_flops("float32")
    if not ops or fast == float("inf") or fast < 1.3 * slow:
        return None
    pointwise = [op for op in call.operations if op.group == POINTWISE and op.dtype == "float32"]
    line = f"products in bfloat16 run at {fast / 1e12:.3g} TFLOP/s here, in float32 at {slow / 1e12:.3g}"
    return about_operators(
        call,
        "Matrix products run in float32, and this machine multiplies bfloat16 faster.",
        ops,
        "run the model in bfloat16, or under autocast",
        seconds=above_peak(call, ops, "bfloat16") + 0.5 * taken(pointwise),
        levels=in_bf16(call),
        more=(line,),
        formula="(products in float32 - their FLOPs at the measured bfloat16 peak, half of element-wise work) / call",
        after="model.bfloat16()\ny = model(x.bfloat16())",
        opportunity=True,
    )


@rule("inference", "training")
def float64(call: Evidence) -> Finding | None:
    """Double precision that slipped in."""
    double = ("float64", "complex128") if call.facts.dtype == "float64" else ("float64",)
    ops = [op for op in call.operations if op.dtype in double]
    return about_operators(
        call,
        "Work is done in double precision.",
        ops,
        "make the tensor float32 where it is created: NumPy arrays and Python scalars bring float64 along",
        formula="time of operators in double precision / call",
        before="x = torch.from_numpy(array)",
        after="x = torch.from_numpy(array).float()",
    )


@rule("inference", "training")
def no_tf32(call: Evidence) -> Finding | None:
    """Full float32 products on a GPU with TensorFloat-32; cuDNN's convolutions use it whatever this setting says."""
    if call.facts.device != "cuda" or call.facts.cuda_capability < (8, 0) or call.settings.get("matmul") != "highest":
        return None
    products = [op for op in call.operations if op.group == MATRIX and op.dtype == "float32"]
    ops = [op for op in products if "convolution" not in op.name]
    return about_operators(
        call,
        "float32 products do not use TensorFloat-32.",
        ops,
        "torch.set_float32_matmul_precision('high')",
        seconds=0.85 * taken(ops),
        levels={"matmul": "high"} if call.facts.dtype == "float32" else {},
        formula="0.85 of the time of float32 products / call",
        after="torch.set_float32_matmul_precision('high')\ny = model(x)",
        opportunity=True,
    )


@rule("inference")
def int8(call: Evidence) -> Finding | None:
    """Large products on a machine with 8-bit units."""
    if not {"avx512_vnni", "amx_int8"} & set(call.facts.cpu_flags) or call.facts.device != "cpu":
        return None
    ops = [op for op in call.operations if op.group == MATRIX and op.flops > 1e7]
    if call.share(taken(ops)) < 0.4:
        return None
    static = call.facts.num_conv > call.facts.num_linear
    how = {"quantize": "int8-static", "freeze": "on"} if static else {"quantize": "int8-dynamic"}
    return about_operators(
        call,
        "Large products could run in 8 bits on this machine's units, if the answers allow it.",
        ops,
        "quantise, with the accuracy checked",
        seconds=0.9 * taken(ops),
        levels={**how, "compile": "default", "grad": "inference_mode"},
        formula="9/10 of the time of large products / call",
        after="torchao.quantize_(model, Int8DynamicActivationInt8WeightConfig())\ny = model(x)",
        opportunity=True,
    )


@rule("inference", "training")
def channels_first(call: Evidence) -> Finding | None:
    """Convolutions far below the machine's peak in the layout that suits them least."""
    if not call.facts.num_4d_inputs or not call.facts.num_conv or call.facts.is_channels_last:
        return None
    ops = [op for op in call.operations if "conv" in op.name]
    norms = [op for op in call.operations if op.group == POINTWISE and len(op.largest) == 4]
    reached = sum(op.flops for op in ops) / max(taken(ops), 1e-12)
    peak = call.peak_flops("float32")
    line = f"convolutions reach {reached / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s" if peak != float("inf") else ""
    return about_operators(
        call,
        "Convolutions run in the channels-first layout, below the machine's peak.",
        ops,
        "convert model and input to torch.channels_last",
        seconds=above_peak(call, ops) + 0.5 * taken(norms) + 0.5 * call.seconds(LAYOUT),
        levels={"channels_last": "on"},
        more=(line,),
        formula="(time of convolutions - FLOPs / measured peak, and half of norms and copies) / call",
        after="model.to(memory_format=torch.channels_last)\ny = model(x.to(memory_format=torch.channels_last))",
        opportunity=True,
    )


@rule("inference", "training")
def cudnn_benchmark(call: Evidence) -> Finding | None:
    """cuDNN picks its algorithm without trying."""
    if call.facts.device != "cuda" or call.settings.get("cudnn_benchmark") == "True" or not call.facts.convolves:
        return None
    ops = [op for op in call.operations if "conv" in op.name]
    return about_operators(
        call,
        "cuDNN chooses its algorithms without trying them.",
        ops,
        "torch.backends.cudnn.benchmark = True where shapes are few",
        seconds=above_peak(call, ops),
        levels={"cudnn_benchmark": "on"},
        formula="(time of convolutions - FLOPs / measured peak) / call",
        after="torch.backends.cudnn.benchmark = True\ny = model(x)",
        opportunity=True,
    )


@rule("inference", "training")
def onednn_off(call: Evidence) -> Finding | None:
    """oneDNN switched off on a CPU."""
    if call.facts.device != "cpu" or call.settings.get("mkldnn") != "False":
        return None
    return cause(
        "oneDNN, which has the CPU's fast kernels, is switched off.",
        bound=call.share(call.seconds(MATRIX, POINTWISE)),
        evidence=("torch.backends.mkldnn.enabled is False",),
        advice="torch.backends.mkldnn.enabled = True",
        formula="time of products and element-wise work / call",
        before="torch.backends.mkldnn.enabled = False",
        after="torch.backends.mkldnn.enabled = True",
    )


@rule("inference", "training")
def small_products(call: Evidence) -> Finding | None:
    """Products well below what the machine reaches in their own type."""
    ops = [op for op in call.operations if op.group == MATRIX and op.flops > 1e6 and "conv" not in op.name]
    spent = taken(ops)
    could = above_peak(call, ops)
    if not spent or could < 0.5 * spent or any(call.peak_flops(op.dtype) == float("inf") for op in ops):
        return None
    reached = sum(op.flops for op in ops) / spent
    return about_operators(
        call,
        "Matrix products are too small, or too oddly shaped, to reach the machine's peak.",
        ops,
        "more rows a call, or sizes that are multiples of 64",
        seconds=could,
        more=(f"they reach {reached / 1e9:.0f} GFLOP/s",),
        formula="(time of products - FLOPs / measured peak) / call",
        before="y = model(x)  # few rows",
        after="y = model(torch.cat(rows))",
        opportunity=True,
    )


@rule("inference")
def weight_bound(call: Evidence) -> Finding | None:
    """A call with few rows: reading the weights takes as long as the call."""
    bandwidth = call.peaks.get("copy", 0.0)
    ops = [op for op in call.operations if op.group == MATRIX and op.flops and op.flops < 16 * op.bytes]
    spent = taken(ops)
    if not bandwidth or call.facts.samples > 4 or call.share(spent) < 0.3 or call.weights.bytes < 32 << 20:
        return None
    return about_operators(
        call,
        "With so few rows a call mostly reads weights from memory.",
        ops,
        "batch requests together, or store the weights in 8 bits",
        seconds=0.75 * spent,
        levels={"quantize": "int8-weight", "compile": "default", "grad": "inference_mode"},
        more=(f"weights {call.weights.bytes >> 20} MiB; memory {bandwidth / 1e9:.0f} GB/s",),
        formula="3/4 of the time of products with fewer than 16 FLOPs a byte / call",
        after="torchao.quantize_(model, Int8WeightOnlyConfig())\ny = model(x)",
        opportunity=True,
    )


@rule("inference", "training")
def subnormal(call: Evidence) -> Finding | None:
    """Weights so small that the CPU handles them in microcode."""
    if call.weights.subnormal < 0.01:
        return None
    ops = [op for op in call.operations if op.group in (MATRIX, POINTWISE)]
    return about_operators(
        call,
        f"{call.weights.subnormal:.0%} of the weights are subnormal, which CPUs handle slowly.",
        ops,
        "torch.set_flush_denormal(True), or set such weights to zero",
        formula="time of products and element-wise work / call",
        after="torch.set_flush_denormal(True)\ny = model(x)",
    )


@rule("inference", "training")
def threads(call: Evidence) -> Finding | None:
    """Fewer threads than cores, or too many: more than there are cores, or threads that only wait for each other."""
    count, cores = call.facts.threads, call.facts.physical_cores
    if not call.operations or call.facts.device != "cpu":
        return None  # threads are the operators': without any, what their number seemed to save is chance
    why = "more than there are cores" if count > cores else "and they mostly wait for each other"
    tried = [] if count == cores else [cores]
    if count > cores or call.crowded <= CROWDED:
        tried.append(1)  # where other programs take the cores, threads that wait for one seem to wait for each other
    for wanted in tried:
        few = wanted > count
        saved, low, high = call.variants.get(f"threads={wanted}", UNKNOWN)
        if saved > (LEAST if few else 0.1) and low > 0:
            return cause(
                f"{count} of {cores} cores are used." if few else f"{count} threads, {why}.",
                bound=high,
                evidence=(f"the same call with {wanted}{' threads' if few else ''} took {saved:.0%} less",),
                levels={"threads": str(wanted)} if few or wanted == 1 else {},
                advice=f"torch.set_num_threads({'number of cores' if few else wanted})",
                formula="upper end of what the other number of threads saved when it was tried",
                before=f"torch.set_num_threads({count})",
                after=f"torch.set_num_threads({wanted})",
            )
    return None
