"""What operators do: work that is needless, or that fewer operators could do."""

from __future__ import annotations

import math

import torch

from fettle.diagnose.evidence import CAST, INDEX, LAYOUT, POINTWISE, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._rule import about_operators, in_bf16, named, rule, taken


@rule("inference", "training")
def casts(call: Evidence) -> Finding | None:
    """The same values converted from type to type on every call."""
    ops = [op for op in call.operations if op.group == CAST]
    spent = taken(ops)
    return about_operators(
        call,
        "Tensors are converted between types on every call.",
        ops,
        "convert weights once, or keep a chain of operations in one type",
        levels=in_bf16(call) if any(op.dtype in ("bfloat16", "float16") for op in ops) else {},
        # Each makes a tensor, for which the C library need not fetch memory any more.
        formula="time of casts, with what fetching memory costs / call",
        besides=min(spent, call.fresh.seconds),
        before="x = layer(x).half().float()",
        after="x = layer(x)",
    )


@rule("inference", "training")
def copies(call: Evidence) -> Finding | None:
    """Copies that only move values: clone, contiguous, cat, pad."""
    ops = [op for op in call.operations if op.group == LAYOUT]
    spent = taken(ops)
    least = min((math.prod(op.largest) for op in ops if math.prod(op.largest) >= 1 << 18), default=math.inf)
    large = sum(op.seconds for op in call.operations if op.group == POINTWISE and math.prod(op.largest) >= least)
    return about_operators(
        call,
        "Time goes into copying and rearranging tensors.",
        ops,
        "avoid clone(), contiguous() and cat() in the hot path; a compiler fuses many of them away",
        levels={"compile": "default", "grad": "inference_mode"},
        # Without their results caches hold more of the rest, and the C library fetches less memory.
        formula="copying operators, and as much again of work on their results, with what fetching memory costs / call",
        besides=min(large, spent + call.fresh.seconds),
        before="x = x.clone() * 2",
        after="x = x * 2",
    )


@rule("inference", "training")
def not_fused(call: Evidence) -> Finding | None:
    """Memory-bound operators one by one, each reading and writing everything."""
    ops = [op for op in call.operations if op.group == POINTWISE]
    if not ops:
        return None
    return about_operators(
        call,
        "Element-wise operators run one by one, each reading and writing all its values.",
        ops,
        "torch.compile fuses them into their neighbours",
        seconds=taken(ops) + 0.5 * call.host_s,
        levels={"compile": "default", "grad": "inference_mode"},
        formula="(time of element-wise operators, and half of the host's own work) / call",
        after="model = torch.compile(model)\ny = model(x)",
        opportunity=True,
    )


@rule("inference", "training")
def attention(call: Evidence) -> Finding | None:
    """Attention that writes its whole matrix to memory."""
    if call.facts.uses_sdpa and not call.facts.manual_attention:
        return None
    softmax = [op for op in named(call, "_softmax") if len(op.largest) >= 3 and op.largest[-1] == op.largest[-2]]
    if not softmax:
        return None
    matrices = {op.largest for op in softmax}
    ops = [op for op in call.operations if op.largest in matrices or op in softmax]
    modules = {op.module for op in softmax}
    ops += [op for op in named(call, "bmm", "baddbmm") if op.module in modules and op not in ops]
    # A fused kernel still multiplies, and may be faster at it than one large product: half of that time remains.
    could = sum(max(0.0, op.seconds - 0.5 * (op.flops / call.peak_flops(op.dtype) if op.flops else 0.0)) for op in ops)
    could += 0.5 * sum(op.seconds for op in call.operations if op.group == LAYOUT and op.module in modules)
    shape = "x".join(map(str, max(matrices)))
    return about_operators(
        call,
        f"Attention is written out by hand and stores its matrix of {shape}.",
        ops,
        "use torch.nn.functional.scaled_dot_product_attention",
        seconds=could,
        levels={"attention": "sdpa"},
        formula="(time of operators on the matrix - half of FLOPs / measured peak) / call",
        before="y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v",
        after="y = F.scaled_dot_product_attention(q, k, v)",
    )


@rule("inference")
def batch_norm(call: Evidence) -> Finding | None:
    """Batch norm in eval mode that could be folded into the convolution before it."""
    if call.facts.training:
        return None
    ops = named(
        call,
        "native_batch_norm",
        "_native_batch_norm_legit_no_training",
        "_batch_norm_with_update",
        "cudnn_batch_norm",
    )
    return about_operators(
        call,
        "Batch norms run as operators of their own, though their weights could be folded away.",
        ops,
        "compile with frozen weights, or torch.nn.utils.fusion.fuse_conv_bn_eval",
        levels={"compile": "default", "freeze": "on", "grad": "inference_mode"},
        formula="time of batch norms / call",
        before="y = bn(conv(x))",
        after="conv = fuse_conv_bn_eval(conv, bn)\ny = conv(x)",
        opportunity=True,
    )


@rule("inference", "training")
def recurrent(call: Evidence) -> Finding | None:
    """A recurrent layer walks through time step by step."""
    ops = [op for op in call.operations if any(word in op.name for word in ("lstm", "gru", "rnn"))]
    return about_operators(
        call,
        "A recurrent layer walks through its sequence step by step.",
        ops,
        "more rows a call, bfloat16, or another runtime",
        seconds=0.9 * taken(ops),
        levels=in_bf16(call),
        least=0.3,
        formula="9/10 of the time of recurrent layers / call",
        before="y, state = lstm(x)",
        after="y, state = lstm.bfloat16()(x.bfloat16())",
        opportunity=True,
    )


@rule("inference", "training")
def recomputation(call: Evidence) -> Finding | None:
    """Growing inputs, computed whole each time: generation without a key-value cache."""
    ops = [op for op in call.operations if op.repeated > 0]
    spent = sum(op.seconds * op.repeated for op in ops)
    # Norms and activations around these products are computed again with them.
    share = spent / max(taken(ops), 1e-12)
    calls = max((op.calls for op in ops), default=0)
    return about_operators(
        call,
        f"Layers compute a growing sequence from its beginning each time, {calls} times a call.",
        ops,
        "keep what was computed: a key-value cache (use_cache=True), or append to the last result",
        seconds=spent + share * call.seconds(POINTWISE),
        formula="(repeated products x share of their FLOPs done before, as much of element-wise work) / call",
        before="for end in range(1, n):\n    keys = project(tokens[:end])",
        after="for token in tokens:\n    keys.append(project(token))  # or use_cache=True",
    )


@rule("inference")
def parametrised(call: Evidence) -> Finding | None:
    """Parametrisations (weight norm, spectral norm) computed on every call."""
    names = ("_weight_norm", "_weight_norm_interface", "linalg_vector_norm", "norm")
    ops = [
        op
        for op in named(call, *names)
        if "arametriz" in op.kind or "arametriz" in op.module or "weight_norm" in op.name
    ]
    hooked = not any("arametriz" in op.kind + op.module for op in ops)  # the older torch.nn.utils.weight_norm
    return about_operators(
        call,
        "Weights are computed anew on every call by a parametrisation.",
        ops,
        f"torch.nn.utils.{'remove_weight_norm' if hooked else 'parametrize.remove_parametrizations'} before inference",
        formula="time of the parametrisation's operators / call",
        before="layer = weight_norm(layer)",
        after="remove_weight_norm(layer)" if hooked else "remove_parametrizations(layer, 'weight')",
    )


@rule("inference", "training")
def indexing(call: Evidence) -> Finding | None:
    """Gathers and scatters that take a large part of a call."""
    ops = [op for op in call.operations if op.group == INDEX]
    return about_operators(
        call,
        "Gathering and scattering single elements takes much of the time.",
        ops,
        "sort or group the indices, or use a mask",
        least=0.15,
        formula="time of gathers and scatters / call",
        before="x[index] = value",
        after="x = torch.where(mask, value, x)",
        opportunity=True,
    )


@rule("inference", "training")
def sorting(call: Evidence) -> Finding | None:
    """Sorts and top-k."""
    ops = named(call, "sort", "topk", "argsort", "unique_dim", "_unique2", "kthvalue", "median")
    return about_operators(
        call,
        "Sorting takes much of the time.",
        ops,
        "topk of what is needed, or a threshold, instead of a whole sort",
        least=0.15,
        formula="time of sorting / call",
        before="best = x.sort().values[-k:]",
        after="best = x.topk(k).values",
        opportunity=True,
    )


_DRAWING = ("normal_", "uniform_", "bernoulli_", "randperm", "random_", "multinomial", "native_dropout",
            "rand", "randn", "rand_like", "randn_like")  # fmt: skip


@rule("inference")
def random(call: Evidence) -> Finding | None:
    """Random numbers drawn for answers."""
    if call.facts.training:
        return None
    return about_operators(
        call,
        "Random numbers are drawn on every call.",
        named(call, *_DRAWING),
        "draw them on the device where they are used; only once where the same noise will do for every answer",
        formula="time of drawing / call",
        before="noise = torch.randn(shape)  # every call",
        after="noise = torch.randn(shape, device=x.device)  # or a buffer, where the same noise will do",
        opportunity=True,
    )


_MAKERS = ("arange", "linspace", "full", "zeros", "ones", "eye", "tril", "triu", "fill_", "zero_", "new_zeros",
           "new_full", "ones_like", "zeros_like", "full_like", "scalar_tensor")  # fmt: skip


@rule("inference", "training")
def constants(call: Evidence) -> Finding | None:
    """Tensors of constants that are made again on every call."""
    ops = [op for op in named(call, *_MAKERS) if not hasattr(torch.nn, op.kind)]  # not those of torch's own modules
    return about_operators(
        call,
        "Constant tensors (masks, positions) are made again on every call.",
        ops,
        "make them once and register them as buffers",
        least=0.05,
        formula="time of making them / call",
        before="mask = torch.ones(n, n).tril()  # every call",
        after="self.register_buffer('mask', torch.ones(n, n).tril())  # once",
    )
