"""The rules for a workload: each looks at the evidence and says one thing, or nothing.

A bound is the most that mending the cause could take off the wall time: what is spent there now, less what the machine
would need at its measured peak where that is known. It is a ceiling, not a forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fettle.diagnose.evidence import CAST, GROUPS, INDEX, LAYOUT, MATRIX, POINTWISE, Evidence, Operation
from fettle.diagnose.finding import Finding

Rule = Callable[[Evidence], Finding | None]
LEAST = 0.03
"""Share of the wall time below which a cause is not worth a line."""

_EVAL = {"mode": "eval"}
_UNKNOWN = (0.0, 0.0, 0.0)
"""Share saved and its interval where nothing was tried."""


def dropout_in_train_mode(seen: Evidence) -> Finding | None:
    """The model computes dropout or batch statistics although it is called for answers."""
    if not seen.facts.training:
        return None
    names = ("native_dropout", "bernoulli_", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
    ops = _named(seen, *names)
    if not ops and not seen.facts.train_mode_differs:
        return None
    return _finding(
        seen,
        "train-mode",
        "The model is in train mode: it drops out values or normalises with the batch's own statistics.",
        max(seen.wall_s - seen.seconds(MATRIX), seen.variants.get("mode=eval", _UNKNOWN)[2] * seen.wall_s),
        ops,
        _EVAL,
        "call model.eval() before inference",
        always=True,
    )


def graph_is_recorded(seen: Evidence) -> Finding | None:
    """Autograd records a graph that nobody asks for."""
    saved, low, high = seen.variants.get("grad=inference_mode", _UNKNOWN)
    if seen.settings.get("records") != "True" or saved < LEAST or low <= 0:
        return None
    return Finding(
        "grad-recorded",
        "Autograd records every operation for a backward pass that never comes.",
        bound=high,
        evidence=(f"the same call in inference mode took {saved:.0%} less",),
        levels={"grad": "inference_mode"},
        advice="wrap inference in torch.inference_mode()",
    )


def float32_on_bfloat16_units(seen: Evidence) -> Finding | None:
    """Products in float32 on a machine whose 16-bit units are faster."""
    ops = [op for op in seen.operations if op.group == MATRIX and op.dtype == "float32"]
    fast, slow = seen.peak_flops("bfloat16"), seen.peak_flops("float32")
    if not ops or fast == float("inf") or fast < 1.3 * slow:
        return None
    could = sum(max(0.0, op.seconds - op.flops / fast) for op in ops)
    could += 0.5 * sum(op.seconds for op in seen.operations if op.group == POINTWISE and op.dtype == "float32")
    line = f"products in bfloat16 run at {fast / 1e12:.2f} TFLOP/s here, in float32 at {slow / 1e12:.2f}"
    return _finding(
        seen,
        "float32",
        "Matrix products run in float32, and this machine multiplies bfloat16 faster.",
        could,
        ops,
        {"precision": "bf16"},
        "run the model in bfloat16, or under autocast",
        more=(line,),
    )


def float64_anywhere(seen: Evidence) -> Finding | None:
    """Double precision that slipped in."""
    ops = [op for op in seen.operations if op.dtype in ("float64", "complex128")]
    if seen.facts.dtype == "float64" or not ops:
        ops = ops if seen.facts.dtype == "float64" else []
    ops = ops or [op for op in seen.operations if op.dtype == "float64"]
    if not ops:
        return None
    return _finding(
        seen,
        "float64",
        "Work is done in double precision.",
        sum(op.seconds for op in ops),
        ops,
        {},
        "make the tensor float32 where it is created: NumPy arrays and Python scalars bring float64 along",
    )


def casts(seen: Evidence) -> Finding | None:
    """The same values converted from type to type on every call."""
    ops = [op for op in seen.operations if op.group == CAST]
    return _finding(
        seen,
        "casts",
        "Tensors are converted between types on every call.",
        sum(op.seconds for op in ops),
        ops,
        {"precision": "bf16"} if any(op.dtype in ("bfloat16", "float16") for op in ops) else {},
        "convert weights once, or keep a chain of operations in one type",
    )


def layout_changes(seen: Evidence) -> Finding | None:
    """Copies that only move values: clone, contiguous, cat, pad."""
    ops = [op for op in seen.operations if op.group == LAYOUT]
    return _finding(
        seen,
        "copies",
        "Time goes into copying and rearranging tensors.",
        sum(op.seconds for op in ops),
        ops,
        {"compile": "default", "grad": "inference_mode"},
        "avoid clone(), contiguous() and cat() in the hot path; a compiler fuses many of them away",
    )


def convolutions_channels_first(seen: Evidence) -> Finding | None:
    """Convolutions far below the machine's peak in the layout that suits them least."""
    if not seen.facts.num_4d_inputs or not seen.facts.num_conv:
        return None
    ops = [op for op in seen.operations if "conv" in op.name]
    could = sum(max(0.0, op.seconds - op.flops / seen.peak_flops(op.dtype)) for op in ops)
    norm = [op for op in seen.operations if op.group == POINTWISE and len(op.largest) == 4]
    could += 0.5 * sum(op.seconds for op in norm) + 0.5 * seen.seconds(LAYOUT)
    reached = sum(op.flops for op in ops) / max(sum(op.seconds for op in ops), 1e-12)
    peak = seen.peak_flops("float32")
    line = f"convolutions reach {reached / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s" if peak != float("inf") else ""
    return _finding(
        seen,
        "channels-first",
        "Convolutions run in the channels-first layout, below the machine's peak.",
        could,
        ops,
        {"channels_last": "on"},
        "convert model and input to torch.channels_last",
        more=(line,),
    )


def element_wise_work(seen: Evidence) -> Finding | None:
    """Memory-bound operators one by one, each reading and writing everything."""
    ops = [op for op in seen.operations if op.group == POINTWISE]
    could = sum(op.seconds for op in ops) + 0.5 * seen.outside_s
    return _finding(
        seen,
        "not-fused",
        "Element-wise operators run one by one, each reading and writing all its values.",
        could,
        ops,
        {"compile": "default", "grad": "inference_mode"},
        "torch.compile fuses them into their neighbours",
    )


def many_small_operators(seen: Evidence) -> Finding | None:
    """The host's own work around operators outweighs what they do."""
    calls = sum(op.calls for op in seen.operations)
    host_s = max(0.0, seen.outside_s - seen.loader_s)
    if calls < 20 or seen.share(host_s) < 0.25 or seen.slept_s > 0.3 * seen.wall_s:
        return None
    line = f"{calls} operators a call; {host_s * 1e6 / calls:.0f} us of host time around each"
    levels = {"cuda_graphs": "on"} if seen.facts.device == "cuda" else {"compile": "default", "grad": "inference_mode"}
    return Finding(
        "host-bound",
        "The host's work around many small operators takes longer than they do.",
        bound=seen.share(host_s),
        evidence=(line,),
        levels=levels,
        advice="compile the model, batch more rows into a call, or replace Python loops by one tensor operation",
    )


def loops_over_elements(seen: Evidence) -> Finding | None:
    """One source line that calls the same small operator very often: a Python loop over a tensor."""
    stepping = {op.line for op in _named(seen, *_OPTIMIZER)}
    ops = [
        op
        for op in seen.operations
        if op.calls >= 24 and op.seconds / op.calls < 1e-4 and op.line and op.line not in stepping
    ]
    layers = {op.line for op in seen.operations if op.weights > 8}
    ops = [op for op in ops if op.line not in layers]  # many layers called by one line of a container
    lines: dict[str, list[Operation]] = {}
    for op in ops:
        lines.setdefault(op.line, []).append(op)
    if not lines:
        return None
    calls = {line: sum(op.calls for op in found) for line, found in lines.items()}
    line = max(calls, key=lambda key: calls[key])
    total = sum(op.calls for op in seen.operations)
    if calls[line] < 0.3 * total or any(op.repeated > 0.3 for op in seen.operations):
        return None  # where a sequence is computed again and again, that is the cause
    # The body of the loop is all that runs as often; one pass over the whole takes at least what one turn took.
    turns = max(op.calls for op in lines[line])
    body = [op for op in seen.operations if op.calls >= 0.5 * turns and op.line not in stepping]
    host_s = max(0.0, seen.outside_s - seen.loader_s) * sum(op.calls for op in body) / total
    spent = (sum(op.seconds for op in body) + host_s) * (1 - 1 / turns)
    return _finding(
        seen,
        "python-loop",
        f"A Python loop calls small operators {calls[line]} times at {line}.",
        spent,
        lines[line],
        {},
        "replace the loop by one operation on the whole tensor",
    )


_OPTIMIZER = ("addcdiv_", "addcmul_", "lerp_")
"""In-place operators that hardly anything but an optimizer's step uses."""


def optimizer_one_by_one(seen: Evidence) -> Finding | None:
    """An optimizer that walks through its parameters one at a time."""
    marks = [op for op in _named(seen, *_OPTIMIZER) if op.calls >= 16]
    if not marks:
        return None
    lines = {op.line for op in marks}
    ops = [op for op in seen.operations if op.line in lines and op.calls >= 16]
    share = sum(op.calls for op in ops) / max(1, sum(op.calls for op in seen.operations))
    return _finding(
        seen,
        "optimizer",
        f"The optimizer updates {max(op.calls for op in marks)} parameters one at a time.",
        sum(op.seconds for op in ops) + share * seen.outside_s,
        ops,
        {},
        "fused=True, or foreach=True: one kernel for many parameters",
    )


def attention_by_hand(seen: Evidence) -> Finding | None:
    """Attention that writes its whole matrix to memory."""
    if seen.facts.uses_sdpa and not seen.facts.manual_attention:
        return None
    softmax = [op for op in _named(seen, "_softmax") if len(op.largest) >= 3 and op.largest[-1] == op.largest[-2]]
    if not softmax:
        return None
    matrices = {op.largest for op in softmax}
    ops = [op for op in seen.operations if op.largest in matrices or op in softmax]
    modules = {op.module for op in softmax}
    ops += [op for op in _named(seen, "bmm", "baddbmm") if op.module in modules and op not in ops]
    # A fused kernel still multiplies; it may reach more than one large product does, so half of that time is granted.
    could = sum(max(0.0, op.seconds - 0.5 * (op.flops / seen.peak_flops(op.dtype) if op.flops else 0.0)) for op in ops)
    could += 0.5 * sum(op.seconds for op in seen.operations if op.group == LAYOUT and op.module in modules)
    shape = "x".join(map(str, max(matrices)))
    implementation = "sdpa"
    return _finding(
        seen,
        "attention",
        f"Attention is written out by hand and stores its matrix of {shape}.",
        could,
        ops,
        {"attention": implementation},
        "use torch.nn.functional.scaled_dot_product_attention",
    )


def too_few_threads(seen: Evidence) -> Finding | None:
    """Fewer threads than cores."""
    if seen.facts.device != "cpu" or seen.threads >= seen.cores:
        return None
    saved, low, high = seen.variants.get(f"threads={seen.cores}", _UNKNOWN)
    if saved < LEAST or low <= 0:
        return None
    return Finding(
        "threads",
        f"{seen.threads} of {seen.cores} cores are used.",
        bound=high,
        evidence=(f"the same call with {seen.cores} threads took {saved:.0%} less",),
        levels={"threads": str(seen.cores)},
        advice="torch.set_num_threads(number of cores)",
    )


def too_many_threads(seen: Evidence) -> Finding | None:
    """More threads than cores, or threads that only wait for each other."""
    if seen.facts.device != "cpu":
        return None
    for name, levels in ((f"threads={seen.cores}", {}), ("threads=1", {"threads": "1"})):
        saved, low, high = seen.variants.get(name, _UNKNOWN)
        more = seen.threads > seen.cores or name == "threads=1"
        if more and saved > 0.1 and low > 0:
            what = "more than there are cores" if seen.threads > seen.cores else "and they mostly wait for each other"
            wanted = name.partition("=")[2]
            return Finding(
                "threads",
                f"{seen.threads} threads, {what}.",
                bound=high,
                evidence=(f"the same call with {wanted} took {saved:.0%} less",),
                levels=levels,
                advice=f"torch.set_num_threads({wanted})",
            )
    return None


def padding_waste(seen: Evidence) -> Finding | None:
    """Positions that only fill up a batch."""
    if seen.padding < 0.1:
        return None
    return Finding(
        "padding",
        f"{seen.padding:.0%} of the positions in the inputs are padding.",
        bound=seen.padding,
        evidence=(f"seen by {seen.padding_where}",),
        advice="batch rows of like length together, or use nested tensors",
    )


def weights_read_for_few_rows(seen: Evidence) -> Finding | None:
    """A call with few rows: reading the weights takes as long as the call."""
    bandwidth = seen.peaks.get("copy", 0.0)
    ops = [op for op in seen.operations if op.group == MATRIX and op.flops and op.flops < 16 * op.bytes]
    spent = sum(op.seconds for op in ops)
    if not bandwidth or seen.rows > 4 or seen.share(spent) < 0.3 or seen.weight_bytes < 32 << 20:
        return None
    return _finding(
        seen,
        "weight-bound",
        "With so few rows a call mostly reads weights from memory.",
        0.75 * spent,
        ops,
        {"quantize": "int8-weight"},
        "batch requests together, or store the weights in 8 bits",
        more=(f"weights {seen.weight_bytes >> 20} MiB; memory {bandwidth / 1e9:.0f} GB/s",),
    )


def batch_norm_apart(seen: Evidence) -> Finding | None:
    """Batch norm in eval mode that could be folded into the convolution before it."""
    if seen.facts.training:
        return None
    ops = _named(
        seen, "native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_with_update", "cudnn_batch_norm"
    )
    return _finding(
        seen,
        "batch-norm",
        "Batch norms run as operators of their own, though their weights could be folded away.",
        sum(op.seconds for op in ops),
        ops,
        {"compile": "default", "freeze": "on", "grad": "inference_mode"},
        "compile with frozen weights, or torch.nn.utils.fusion.fuse_conv_bn_eval",
    )


def below_the_roof(seen: Evidence) -> Finding | None:
    """Products well below what the machine reaches in their own type."""
    ops = [op for op in seen.operations if op.group == MATRIX and op.flops > 1e6 and "conv" not in op.name]
    spent = sum(op.seconds for op in ops)
    could = sum(max(0.0, op.seconds - op.flops / seen.peak_flops(op.dtype)) for op in ops)
    if not spent or could < 0.5 * spent or any(seen.peak_flops(op.dtype) == float("inf") for op in ops):
        return None
    reached = sum(op.flops for op in ops) / spent
    return _finding(
        seen,
        "small-products",
        "Matrix products are too small, or too oddly shaped, to reach the machine's peak.",
        could,
        ops,
        {},
        "more rows a call, or sizes that are multiples of 64",
        more=(f"they reach {reached / 1e9:.0f} GFLOP/s",),
    )


def eight_bits(seen: Evidence) -> Finding | None:
    """Large products on a machine with 8-bit units."""
    if not {"avx512_vnni", "amx_int8"} & set(seen.facts.cpu_flags) or seen.facts.device != "cpu":
        return None
    ops = [op for op in seen.operations if op.group == MATRIX and op.flops > 1e7]
    if seen.share(sum(op.seconds for op in ops)) < 0.4:
        return None
    return _finding(
        seen,
        "int8",
        "Large products could run in 8 bits on this machine's units, if the answers allow it.",
        0.9 * sum(op.seconds for op in ops),
        ops,
        {"quantize": "int8-static" if seen.facts.num_conv > seen.facts.num_linear else "int8-dynamic"},
        "quantise, with the accuracy checked",
    )


def indexing(seen: Evidence) -> Finding | None:
    """Gathers and scatters that take a large part of a call."""
    ops = [op for op in seen.operations if op.group == INDEX]
    return _finding(
        seen,
        "indexing",
        "Gathering and scattering single elements takes much of the time.",
        sum(op.seconds for op in ops),
        ops,
        {},
        "sort or group the indices, or use a mask",
        least=0.15,
    )


def sorting(seen: Evidence) -> Finding | None:
    """Sorts and top-k."""
    ops = _named(seen, "sort", "topk", "argsort", "unique_dim", "_unique2", "kthvalue", "median")
    return _finding(
        seen,
        "sorting",
        "Sorting takes much of the time.",
        sum(op.seconds for op in ops),
        ops,
        {},
        "topk of what is needed, or a threshold, instead of a whole sort",
        least=0.15,
    )


def computed_again(seen: Evidence) -> Finding | None:
    """Growing inputs, computed whole each time: generation without a key-value cache."""
    ops = [op for op in seen.operations if op.repeated > 0]
    spent = sum(op.seconds * op.repeated for op in ops)
    # What stands around these products (norms, activations) is computed again with them.
    rest = sum(op.seconds for op in seen.operations if op.group == POINTWISE)
    share = spent / max(sum(op.seconds for op in ops), 1e-12)
    calls = max((op.calls for op in ops), default=0)
    return _finding(
        seen,
        "recomputation",
        f"Layers compute a growing sequence from its beginning each time, {calls} times a call.",
        spent + share * rest,
        ops,
        {},
        "keep what was computed: a key-value cache (use_cache=True), or append to the last result",
    )


def same_data_again(seen: Evidence) -> Finding | None:
    """Batches that the model has seen before in the same pass."""
    again, run = seen.batches_seen_before, seen.batches_run
    if run < 4 or again < 0.2 * run:
        return None
    return Finding(
        "duplicate-data",
        f"{again} of {run} batches of a call have the same values as an earlier one.",
        bound=again / run,
        evidence=("equal contents, found by hashing what the outermost modules are given",),
        advice="an IterableDataset gives every worker all its rows: divide them by get_worker_info()",
    )


def random_numbers(seen: Evidence) -> Finding | None:
    """Random numbers drawn for answers."""
    ops = _named(
        seen,
        "normal_",
        "uniform_",
        "bernoulli_",
        "randperm",
        "random_",
        "multinomial",
        "native_dropout",
        "rand",
        "randn",
        "rand_like",
        "randn_like",
    )
    if seen.facts.training:
        return None
    return _finding(
        seen,
        "random",
        "Random numbers are drawn on every call.",
        sum(op.seconds for op in ops),
        ops,
        {},
        "draw them once, or on the device where they are used",
    )


def constants_made_anew(seen: Evidence) -> Finding | None:
    """Tensors of constants that are made again on every call."""
    ops = _named(
        seen,
        "arange",
        "linspace",
        "full",
        "zeros",
        "ones",
        "eye",
        "tril",
        "triu",
        "fill_",
        "zero_",
        "new_zeros",
        "new_full",
        "ones_like",
        "zeros_like",
        "full_like",
        "scalar_tensor",
    )
    return _finding(
        seen,
        "constants",
        "Constant tensors (masks, positions) are made again on every call.",
        sum(op.seconds for op in ops),
        ops,
        {},
        "make them once and register them as buffers",
    )


def weights_transformed_each_call(seen: Evidence) -> Finding | None:
    """Parametrisations (weight norm, spectral norm) computed on every call."""
    names = ("_weight_norm", "_weight_norm_interface", "linalg_vector_norm", "norm")
    ops = [
        op
        for op in _named(seen, *names)
        if "arametriz" in op.kind or "arametriz" in op.module or "weight_norm" in op.name
    ]
    return _finding(
        seen,
        "parametrised",
        "Weights are computed anew on every call by a parametrisation.",
        sum(op.seconds for op in ops),
        ops,
        {},
        "torch.nn.utils.parametrize.remove_parametrizations",
    )


def recurrent(seen: Evidence) -> Finding | None:
    """A recurrent layer walks through time step by step."""
    ops = [op for op in seen.operations if any(word in op.name for word in ("lstm", "gru", "rnn"))]
    return _finding(
        seen,
        "recurrent",
        "A recurrent layer walks through its sequence step by step.",
        sum(op.seconds for op in ops) * 0.9,
        ops,
        {"precision": "bf16"},
        "more rows a call, bfloat16, or another runtime",
        least=0.3,
    )


def waiting_for_data(seen: Evidence) -> Finding | None:
    """A loop that waits for its loader."""
    if seen.share(seen.loader_s) < LEAST:
        return None
    return Finding(
        "data-wait",
        "The loop waits for its DataLoader.",
        bound=seen.share(seen.loader_s),
        evidence=(f"{seen.loader_s * 1e3:.3g} ms of {seen.wall_s * 1e3:.3g} ms a call are spent in it",),
        advice="workers that persist, cheaper transforms: fettle data TARGET finds the setting",
    )


def made_large_by_broadcasting(seen: Evidence) -> Finding | None:
    """An intermediate tensor far larger than what it was made from."""
    grown = [op for op in seen.operations if op.group == POINTWISE and op.growth >= 8]
    if not grown:
        return None
    shapes = {op.largest for op in grown}
    ops = [op for op in seen.operations if op.largest in shapes or op in grown]
    # Whoever reads it next reads all of it: reductions, mostly.
    lines = {op.line for op in grown}
    ops += [op for op in seen.operations if op.line in lines and op not in ops and op.group == POINTWISE]
    first = max(grown, key=lambda op: op.growth)
    shape = "x".join(map(str, first.largest))
    return _finding(
        seen,
        "spike",
        f"Broadcasting makes a tensor of {shape}, {first.growth:.0f} times what goes in, to work on it.",
        sum(op.seconds for op in ops),
        ops,
        {},
        "write it as a matrix product (for distances: torch.cdist), or work on it in parts",
    )


def kept_from_call_to_call(seen: Evidence) -> Finding | None:
    """Tensors that pile up."""
    graph = seen.graphs_kept >= 1
    if seen.tensors_kept < 1 or not (graph or seen.bytes_kept >= 1 << 20):  # a number kept for a log is no leak
        return None
    what = ", with the autograd graphs that made them" if graph else ""
    count = f"{seen.tensors_kept:.3g} tensor{'s' if seen.tensors_kept >= 2 else ''}"
    return Finding(
        "leak",
        f"{count} more stay alive after every call{what}.",
        bound=0.1 if graph else 0.0,
        evidence=("counted after a full collection, call after call",),
        advice="keep loss.detach() or loss.item(), not the loss" if graph else "look for a list or cache that grows",
    )


def sleeping(seen: Evidence) -> Finding | None:
    """The call waits for something that is not computation."""
    if seen.share(seen.slept_s) < 0.1 or seen.facts.device != "cpu" or seen.cores < 1:
        return None
    # Threads that wait for each other sleep too: what operators took is computation whoever did it.
    if seen.compiled and seen.compile is not None and not seen.compile.healthy:
        return None  # it waits for the compiler's processes, which another rule says
    waiting = min(seen.slept_s, max(0.0, seen.outside_s - seen.loader_s))
    if seen.share(waiting) < 0.1:
        return None
    return Finding(
        "waiting",
        "The call sleeps or waits for files or the network.",
        bound=seen.share(waiting),
        evidence=(f"{waiting * 1e3:.3g} ms a call outside all operators, off the processor",),
        advice="move loading out of the call, or overlap it with computing",
    )


def garbage(seen: Evidence) -> Finding | None:
    """Python's garbage collector runs during calls."""
    if seen.share(seen.gc_s) < LEAST:
        return None
    return Finding(
        "garbage-collection",
        "Python's garbage collector runs during calls.",
        bound=seen.share(seen.gc_s),
        evidence=(f"{seen.gc_s * 1e3:.3g} ms a call",),
        advice="gc.freeze() after loading, collect between requests; look for reference cycles made by the model",
    )


def subnormals(seen: Evidence) -> Finding | None:
    """Weights so small that the CPU handles them in microcode."""
    if seen.subnormal_weights < 0.01:
        return None
    ops = [op for op in seen.operations if op.group in (MATRIX, POINTWISE)]
    return _finding(
        seen,
        "subnormal",
        f"{seen.subnormal_weights:.0%} of the weights are subnormal, which CPUs handle slowly.",
        sum(op.seconds for op in ops),
        ops,
        {},
        "torch.set_flush_denormal(True), or set such weights to zero",
    )


def debugging_left_on(seen: Evidence) -> Finding | None:
    """Anomaly detection, determinism or a profiler left on."""
    names = {
        "anomaly": "autograd's anomaly detection",
        "deterministic": "deterministic algorithms",
        "profiler": "a profiler",
    }
    on = [text for key, text in names.items() if seen.settings.get(key) == "True"]
    if not on:
        return None
    tried = [seen.variants[name] for name in ("anomaly=off", "deterministic=off") if name in seen.variants]
    told = [f"the same call without took {saved:.0%} less" for saved, _, _ in tried if saved > 0]
    return Finding(
        "debugging",
        f"{' and '.join(on)} left on.",
        bound=min(0.999, max((high for _, _, high in tried), default=0.9)),
        evidence=(*(f"{text} is on after the workload is built" for text in on), *told),
        advice="switch it off outside debugging",
    )


def fast_kernels_off(seen: Evidence) -> Finding | None:
    """oneDNN switched off on a CPU."""
    if seen.facts.device != "cpu" or seen.settings.get("mkldnn") != "False":
        return None
    return Finding(
        "onednn-off",
        "oneDNN, which has the CPU's fast kernels, is switched off.",
        bound=seen.share(seen.seconds(MATRIX, POINTWISE)),
        evidence=("torch.backends.mkldnn.enabled is False",),
        advice="torch.backends.mkldnn.enabled = True",
    )


def cudnn_not_tuned(seen: Evidence) -> Finding | None:
    """cuDNN picks its algorithm without trying."""
    if seen.facts.device != "cuda" or seen.settings.get("cudnn_benchmark") == "True" or not seen.facts.num_conv:
        return None
    ops = [op for op in seen.operations if "conv" in op.name]
    could = sum(max(0.0, op.seconds - op.flops / seen.peak_flops(op.dtype)) for op in ops)
    return _finding(
        seen,
        "cudnn-benchmark",
        "cuDNN chooses its algorithms without trying them.",
        could,
        ops,
        {"cudnn_benchmark": "on"},
        "torch.backends.cudnn.benchmark = True where shapes are few",
    )


def float32_without_tf32(seen: Evidence) -> Finding | None:
    """Full float32 products on a GPU with TensorFloat-32."""
    if seen.facts.device != "cuda" or seen.facts.cuda_capability < (8, 0) or seen.settings.get("matmul") != "highest":
        return None
    ops = [op for op in seen.operations if op.group == MATRIX and op.dtype == "float32"]
    return _finding(
        seen,
        "no-tf32",
        "float32 products do not use TensorFloat-32.",
        0.85 * sum(op.seconds for op in ops),
        ops,
        {"matmul": "high"},
        "torch.set_float32_matmul_precision('high')",
    )


def synchronisations(seen: Evidence) -> Finding | None:
    """Places where the host would wait for the device."""
    if not seen.syncs:
        return None
    count = sum(sync.count for sync in seen.syncs)
    lines = tuple(f"{_short(s.file)}:{s.line}: {s.operator}, {s.count}x: {s.reason}" for s in seen.syncs[:6])
    # Without it the host could run ahead, and what was computed only to be looked at need not be: all but the products.
    spent = seen.wall_s - seen.seconds(MATRIX) - seen.loader_s
    return Finding(
        "syncs",
        f"The host would wait for a GPU {count} time{'s' if count > 1 else ''} a call.",
        bound=min(0.999, seen.share(max(0.0, spent))),
        evidence=lines,
        count=count,
        advice="keep values on the device: torch.where, masks of fixed size, .item() once at the end",
    )


def graph_breaks(seen: Evidence) -> Finding | None:
    """Places where torch.compile falls back to Python."""
    health = seen.compile
    if health is None or not (health.breaks or health.errors):
        return None
    lines = [f"{_short(b.file)}:{b.line}: {b.reason} ({b.count}x)" for b in health.breaks[:6]]
    lines += [f"not compiled: {error}" for error in health.errors[:3]]
    places = len(health.breaks)
    says = f"torch.compile breaks the model into pieces at {places} place{'s' if places > 1 else ''}."
    return Finding(
        "graph-breaks",
        says if places else "torch.compile cannot compile the model.",
        bound=_unfused(seen),
        evidence=tuple(lines),
        count=max(sum(b.count for b in health.breaks), 1),
        advice="rewrite those lines as tensor operations, or compile the repeated blocks only",
    )


def _unfused(seen: Evidence) -> float:
    """Of a compiled model: the share of a call that one whole graph would not need. 0 where nobody compiles."""
    return seen.share(seen.seconds(POINTWISE, LAYOUT, CAST, INDEX) + seen.outside_s) if seen.compiled else 0.0


def recompiles(seen: Evidence) -> Finding | None:
    """Compiling again and again, until it gives up."""
    health = seen.compile
    if health is None or not (health.recompiles or health.limits):
        return None
    count = sum(item.count for item in health.recompiles)
    lines = [f"{r.function} at {_short(r.file)}:{r.line}: {r.guard}" for r in health.recompiles[:6]]
    says = f"torch.compile compiles {count} more time{'s' if count > 1 else ''} for these batches."
    if health.limits:
        says = "torch.compile reached its recompile limit: from then on it silently runs eagerly."
        lines = [f"{hit.function} at {_short(hit.file)}:{hit.line}, limit {hit.limit}" for hit in health.limits] + lines
    if health.specialised:
        lines += [f"compiled for one number: {s.name} = {', '.join(s.values[:4])}" for s in health.specialised[:3]]
        advice = "pass changing numbers as tensors: each new value compiles again"
    else:
        advice = "mark changing sizes dynamic, and keep Python numbers out of the graph"
    shapes = any(item.kind == "shape" for item in health.recompiles) and not health.specialised
    return Finding(
        "recompiles",
        says,
        bound=_unfused(seen),
        evidence=tuple(lines),
        count=count,
        advice=advice,
        levels={"compile": "default", "shapes": "dynamic"} if shapes else {},
    )


def cache_does_not_persist(seen: Evidence) -> Finding | None:
    """Compiled code is thrown away with the process."""
    if seen.compile is None or seen.compile.cache.enabled:
        return None
    return Finding(
        "compile-cache",
        "The compile cache is switched off: each start compiles everything again.",
        startup_s=seen.compile.compile_s,
        evidence=("the environment switches the cache off",),
        advice="unset TORCHINDUCTOR_FORCE_DISABLE_CACHES and TORCHINDUCTOR_FX_GRAPH_CACHE=0",
    )


def slow_first_call(seen: Evidence) -> Finding | None:
    """The first call costs much more than the others."""
    extra = seen.first_call_s - seen.wall_s
    if extra < 2.0:
        return None
    return Finding(
        "first-call",
        f"The first call takes {seen.first_call_s:.1f} s, a later one {seen.wall_s:.3g} s.",
        startup_s=extra,
        evidence=("lazy loading, or compiling, happens in it",),
        advice="warm up before the first user, and keep the compile cache",
    )


def slow_loading(seen: Evidence) -> Finding | None:
    """Building the model takes long."""
    if seen.load_s < 5.0:
        return None
    return Finding(
        "loading",
        f"Building the workload takes {seen.load_s:.1f} s.",
        startup_s=seen.load_s,
        evidence=(f"weights: {seen.weight_bytes >> 20} MiB",),
        advice="skip the random initialisation (torch.device('meta') and assign), and map weight files",
    )


def weights_in_float32(seen: Evidence) -> Finding | None:
    """Half of the weights' memory could be freed."""
    if seen.facts.dtype != "float32" or seen.weight_bytes < 256 << 20:
        return None
    return Finding(
        "weight-memory",
        "The weights are stored in 32 bits.",
        bound_bytes=seen.weight_bytes // 2,
        evidence=(f"{seen.weight_bytes >> 20} MiB of weights",),
        levels={"precision": "bf16"},
        advice="store them in bfloat16: half the memory, and half the time to load",
    )


def duplicate_weights(seen: Evidence) -> Finding | None:
    """The same values stored twice."""
    if seen.duplicate_bytes < 1 << 20:
        return None
    return Finding(
        "duplicate-weights",
        "Parameters are stored twice with the same values.",
        bound_bytes=seen.duplicate_bytes,
        evidence=(f"{seen.duplicate_bytes >> 20} MiB of copies",),
        advice="tie them: assign the same parameter to both places",
    )


RULES: Sequence[Rule] = (
    dropout_in_train_mode,
    graph_is_recorded,
    float32_on_bfloat16_units,
    float64_anywhere,
    casts,
    layout_changes,
    convolutions_channels_first,
    element_wise_work,
    many_small_operators,
    loops_over_elements,
    optimizer_one_by_one,
    attention_by_hand,
    too_few_threads,
    too_many_threads,
    padding_waste,
    weights_read_for_few_rows,
    batch_norm_apart,
    below_the_roof,
    eight_bits,
    indexing,
    sorting,
    computed_again,
    same_data_again,
    random_numbers,
    constants_made_anew,
    weights_transformed_each_call,
    recurrent,
    waiting_for_data,
    made_large_by_broadcasting,
    kept_from_call_to_call,
    sleeping,
    garbage,
    subnormals,
    debugging_left_on,
    fast_kernels_off,
    cudnn_not_tuned,
    float32_without_tf32,
    graph_breaks,
    recompiles,
    synchronisations,
    cache_does_not_persist,
    slow_first_call,
    slow_loading,
    weights_in_float32,
    duplicate_weights,
)


OPPORTUNITIES = frozenset({
    "float32", "channels-first", "not-fused", "weight-bound", "batch-norm", "small-products", "int8", "recurrent",
    "cudnn-benchmark", "no-tf32", "weight-memory", "indexing", "sorting", "first-call", "loading",
})  # fmt: skip
"""Rules that find no fault, only something that a technique could do better."""


def findings(seen: Evidence) -> list[Finding]:
    """What all rules say of the evidence: faults, the costliest first, then opportunities."""
    found = [finding for rule in RULES if (finding := rule(seen)) is not None]
    # What a compiler would trip over is no fault of a model that nobody compiles.
    chances = OPPORTUNITIES if seen.compiled else OPPORTUNITIES | {"graph-breaks", "recompiles"}
    found = [replace(finding, opportunity=finding.rule in chances) for finding in found]
    return sorted(found, key=lambda finding: finding.weight, reverse=True)


def _named(seen: Evidence, *names: str) -> list[Operation]:
    wanted = {f"aten.{name}" for name in names}
    return [op for op in seen.operations if op.name in wanted]


def _finding(
    seen: Evidence,
    rule: str,
    says: str,
    seconds: float,
    ops: Iterable[Operation],
    levels: dict[str, str],
    advice: str,
    *,
    more: Sequence[str] = (),
    least: float = LEAST,
    always: bool = False,
) -> Finding | None:
    """A finding about operators, unless mending it could bring next to nothing."""
    bound = seen.share(seconds)
    if bound < least and not always:
        return None
    dearest = sorted(ops, key=lambda op: -op.seconds)[:4]
    lines = [f"{_place(op)}: {op.name} {op.dtype}, {op.calls}x, {op.seconds * 1e3:.3g} ms" for op in dearest]
    return Finding(rule, says, bound, evidence=(*(line for line in more if line), *lines), levels=levels, advice=advice)


def _place(op: Operation) -> str:
    module = f"{op.module} ({op.kind})" if op.module else "the model itself"
    return f"{module} at {op.line}" if op.line else module


def _short(path: str) -> str:
    return path.rpartition("/")[2]


def group_name(group: str) -> str:
    """What people call a group of operators."""
    return GROUPS[group]
