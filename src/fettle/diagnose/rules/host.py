"""The host: modes it left on, Python around operators, waiting, and what happens before the first call."""

from __future__ import annotations

from fettle.diagnose.evidence import MATRIX, Evidence, Operation
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._rule import (
    GRAPHS,
    LEAST,
    OPTIMIZER,
    UNKNOWN,
    about_operators,
    cause,
    named,
    rule,
    short,
    taken,
)
from fettle.units import count_text


@rule("inference")
def train_mode(call: Evidence) -> Finding | None:
    """The model computes dropout or batch statistics although it is called for answers."""
    if not call.facts.training:
        return None
    names = ("native_dropout", "bernoulli_", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
    ops = named(call, *names)
    if not ops and not call.facts.train_mode_differs:
        return None
    return about_operators(
        call,
        "The model is in train mode: it drops out values or normalises with the batch's own statistics.",
        ops,
        "call model.eval() before inference",
        seconds=max(1 - call.share(call.ideal_s()), call.variants.get("mode=eval", UNKNOWN)[2]) * call.whole_s,
        levels={"mode": "eval"},
        least=0.0,
        formula="(call - products at the measured peak) / call, or what model.eval() saved when it was tried",
        after="model.eval()\ny = model(x)",
    )


@rule("inference")
def grad_recorded(call: Evidence) -> Finding | None:
    """Autograd records a graph that is not used."""
    if call.settings.get("records") != "True":
        return None
    on_gpu = call.facts.device == "cuda"
    if on_gpu:  # nothing is switched and tried there
        saved = low = high = call.share(call.host_s)
        line = "the answers hold on to the graph, and to the activations that it keeps"
        formula = "time outside operators and loaders / call"
    else:
        saved, low, high = call.variants.get("grad=inference_mode", UNKNOWN)
        line = f"the same call in inference mode took {saved:.0%} less"
        formula = "upper end of what inference_mode saved when it was tried"
    if saved < LEAST or low <= 0:
        return None
    return cause(
        "Autograd records every operation for a backward pass that never comes.",
        bound=high,
        evidence=(line,),
        levels={"grad": "inference_mode"},
        advice="wrap inference in torch.inference_mode()",
        formula=formula,
        after="with torch.inference_mode():\n    y = model(x)",
        opportunity=on_gpu,
    )


@rule("inference", "training")
def host_bound(call: Evidence) -> Finding | None:
    """The host's own work around operators outweighs what they do."""
    calls = sum(op.calls for op in call.operations)
    without_core_s = call.crowded * call.wall_s  # taken by other programs, not the host's own work
    if calls < 20 or call.share(call.host_s - without_core_s) < 0.25 or call.slept_s > 0.3 * call.wall_s:
        return None
    line = f"{calls} operators a call; {call.host_s * 1e6 / calls:.0f} us of host time around each"
    levels = GRAPHS if call.facts.device == "cuda" else {"compile": "default", "grad": "inference_mode"}
    return cause(
        "The host's work around many small operators takes longer than they do.",
        bound=call.share(call.host_s),
        evidence=(line,),
        levels=levels,
        advice="compile the model, batch more rows into a call, or replace Python loops by one tensor operation",
        formula="time outside operators and loaders, less long pauses between operators / call",
        after="model = torch.compile(model)\ny = model(x)",
    )


@rule("inference", "training")
def other_work(call: Evidence) -> Finding | None:
    """What a call does without torch: a tokeniser, NumPy, parsing."""
    if call.share(call.other_work_s) < 0.2:
        return None
    longest = sorted(call.pauses, key=lambda end: -call.pauses[end])[:4]
    return cause(
        f"Python, NumPy or another library works for {call.share(call.other_work_s):.0%} of a call, outside operators.",
        bound=call.share(call.other_work_s),
        where=tuple(f"before {end}" for end in longest if end),
        evidence=tuple(
            f"{call.pauses[end] * 1e3:.3g} ms without an operator before {end or 'one of no line of yours'}"
            for end in longest
        ),
        advice="do it before the call (in a loader's workers), or with operations on tensors",
        formula="long pauses between operators, less sleeping, loading, collecting garbage and fetching memory / call",
        before="def predict(text):\n    return model(torch.tensor(tokenise(text)))",
        after="ids = torch.tensor(tokenise(text))  # beforehand\n\ndef predict(ids):\n    return model(ids)",
    )


@rule("inference", "training")
def python_loop(call: Evidence) -> Finding | None:
    """One source line that calls the same small operator very often: a Python loop over a tensor."""
    stepping = {op.line for op in named(call, *OPTIMIZER)}
    layers = {op.line for op in call.operations if op.weights > 8}  # called by one line of a container
    often = 24 * max(1, call.loading.batches)  # once a batch is normal
    lines: dict[str, list[Operation]] = {}
    for op in call.operations:
        if op.calls >= often and op.seconds / op.calls < 1e-4 and op.line and op.line not in stepping | layers:
            lines.setdefault(op.line, []).append(op)
    if not lines:
        return None
    calls = {line: sum(op.calls for op in at_line) for line, at_line in lines.items()}
    line = max(calls, key=lambda key: calls[key])
    total = sum(op.calls for op in call.operations)
    if calls[line] < 0.3 * total or any(op.repeated > 0.3 for op in call.operations):
        return None  # recomputing a sequence is the cause, which another rule says
    # The loop is what runs as often as it turns, with what its function does around it (stack, unbind). One call for
    # the whole tensor takes at least as long as one turn.
    turns = max(op.calls for op in lines[line])
    around = {op.function for op in lines[line] if op.function}
    body = [
        op for op in call.operations if op.line not in stepping and (op.calls >= 0.5 * turns or op.function in around)
    ]
    host_s = call.outside_s * sum(op.calls for op in body) / total
    spent = (taken(body) + host_s) * (1 - 1 / turns)
    joining = [op for op in named(call, "stack", "cat", "unbind", "split") if op not in body]
    return about_operators(
        call,
        f"A Python loop calls small operators {calls[line]} times at {line}.",
        lines[line],
        "replace the loop by one operation on the whole tensor",
        seconds=spent,
        formula="time of all that the loop's lines and function run, less one turn, and of stacking and cutting / call",
        besides=taken(joining),
        before="rows = [net(row) for row in x]",
        after="rows = net(x)",
    )


@rule("inference", "training")
def optimizer(call: Evidence) -> Finding | None:
    """An optimizer that walks through its parameters one at a time."""
    marks = [op for op in named(call, *OPTIMIZER) if op.calls >= 16]
    if not marks:
        return None
    places = {(op.line, op.function) for op in marks}
    ops = [op for op in call.operations if (op.line, op.function) in places and op.calls >= 16]
    share = sum(op.calls for op in ops) / max(1, sum(op.calls for op in call.operations))
    return about_operators(
        call,
        f"The optimizer updates {max(op.calls for op in marks)} parameters one at a time.",
        ops,
        "fused=True, or foreach=True: one kernel for many parameters",
        seconds=taken(ops) + share * call.host_s,
        formula="time of the update's operators and their share of the host's work / call",
        before="torch.optim.AdamW(parameters, foreach=False)",
        after="torch.optim.AdamW(parameters, fused=True)",
    )


@rule("inference", "training")
def built_in_call(call: Evidence) -> Finding | None:
    """A model, or a part of it, that is built on every call."""
    if not call.built:
        return None
    count = sum(call.built.values())
    places = sorted(call.built, key=lambda line: -call.built[line])[:4]
    # What constructors take is not known, and new weights are in no cache: only the loader and the products at their
    # peak are sure to be left of the call.
    return cause(
        f"Modules are built on every call: {count_text(count, 'parameter')}.",
        bound=1 - call.share(call.ideal_s() + call.loading.seconds),
        where=tuple(line for line in places if line),
        evidence=tuple(f"{line or 'no line known'}: parameters made there: {call.built[line]}" for line in places),
        advice="build them once, outside the call",
        formula="(call - products at the measured peak - loader) / call",
        before="def predict(x):\n    return Net()(x)",
        after="net = Net()\n\ndef predict(x):\n    return net(x)",
    )


@rule("inference", "training")
def syncs(call: Evidence) -> Finding | None:
    """Places where the host would wait for the device."""
    # A line that breaks a compiled model's graph is left to that rule: it is the same fix.
    breaks = {(b.file, b.line) for b in call.compile.breaks} if call.compiled and call.compile else set()
    syncs = [sync for sync in call.syncs if (sync.file, sync.line) not in breaks]
    if not syncs:
        return None
    count = sum(sync.count for sync in syncs)
    waits = "waits for the GPU" if call.facts.device == "cuda" else "would wait for a GPU"
    # Without it the host could run ahead, and what is computed only for it would go: all but products may be saved.
    return cause(
        f"The host {waits} {f'{count} times' if count > 1 else 'once'} a call.",
        bound=1 - call.share(call.seconds(MATRIX) + call.loading.seconds),
        where=tuple(f"{short(s.file)}:{s.line}" for s in syncs[:6]),
        evidence=tuple(f"{short(s.file)}:{s.line}: {s.operator}, {s.count}x: {s.reason}" for s in syncs[:6]),
        count=count,
        opportunity=call.facts.device != "cuda",
        advice="keep values on the device: torch.where, masks of fixed size, .item() once at the end",
        formula="(call - products - loader) / call",
        before="if loss.item() > limit:\n    x = x * 0.5",
        after="x = torch.where(loss > limit, x * 0.5, x)",
    )


@rule("inference", "training")
def waiting(call: Evidence) -> Finding | None:
    """The call waits for something that is not computation."""
    # Threads that wait for each other sleep too: what operators took is computation, in whichever thread.
    waiting = min(call.slept_s, call.outside_s)
    if call.share(waiting) < 0.1 or call.facts.device != "cpu":
        return None
    if call.compiled and call.compile is not None and not call.compile.healthy:
        return None  # it waits for the compiler's processes, which another rule says
    return cause(
        "The call sleeps or waits for files or the network.",
        bound=call.share(waiting),
        evidence=(f"{waiting * 1e3:.3g} ms a call outside all operators, off the processor",),
        advice="move loading out of the call, or overlap it with computing",
        formula="time off the processor outside all operators / call",
        before="y = model(load(path))",
        after="x = load(path)  # once, or in a loader's workers\ny = model(x)",
    )


@rule("inference", "training")
def garbage_collection(call: Evidence) -> Finding | None:
    """Python's garbage collector runs during calls."""
    if call.share(call.gc_s) < LEAST:
        return None
    return cause(
        "Python's garbage collector runs during calls.",
        bound=call.share(call.gc_s),
        evidence=(f"{call.gc_s * 1e3:.3g} ms a call",),
        advice="gc.freeze() after loading, collect between requests; look for reference cycles made by the model",
        formula="time in the collector / call",
        before="serve(model)",
        after="gc.collect()\ngc.freeze()\nserve(model)",
    )


@rule("inference", "training")
def debugging(call: Evidence) -> Finding | None:
    """Anomaly detection, determinism or a profiler left on."""
    names = {
        "anomaly": "autograd's anomaly detection",
        "deterministic": "deterministic algorithms",
        "profiler": "a profiler",
    }
    on = [text for key, text in names.items() if call.settings.get(key) == "True"]
    if not on:
        return None
    tried = [call.variants[name] for name in ("anomaly=off", "deterministic=off") if name in call.variants]
    saved = [f"the same call without took {share:.0%} less" for share, _, _ in tried if share > 0]
    return cause(
        f"{' and '.join(on)} left on.",
        bound=max(high for _, _, high in tried) if tried else call.share(call.host_s),
        evidence=(*(f"{text} is on after the workload is built" for text in on), *saved),
        advice="switch it off outside debugging",
        formula="upper end of what switching it off saved when it was tried, else the time outside operators",
        before="torch.autograd.set_detect_anomaly(True)",
        after="torch.autograd.set_detect_anomaly(False)",
    )


@rule("inference")
def first_call(call: Evidence) -> Finding | None:
    """The first call costs much more than the others."""
    extra = call.first_call_s - call.wall_s
    if extra < 2.0:
        return None
    return cause(
        f"The first call takes {call.first_call_s:.1f} s, a later one {call.wall_s:.3g} s.",
        startup_s=extra,
        evidence=("lazy loading, or compiling, happens in it",),
        advice="warm up before the first user, and keep the compile cache",
        formula="first call - a later one",
        before="serve(model)",
        after="model(example)  # warm up\nserve(model)",
        opportunity=True,
    )


@rule("inference", "training")
def loading(call: Evidence) -> Finding | None:
    """Building the model takes long."""
    if call.load_s < 5.0:
        return None
    return cause(
        f"Building the workload takes {call.load_s:.1f} s.",
        startup_s=call.load_s,
        evidence=(f"weights: {call.weights.bytes >> 20} MiB",),
        advice="skip the random initialisation (torch.device('meta') and assign), and map weight files",
        formula="seconds to build the workload",
        before="model = Net()\nmodel.load_state_dict(state)",
        after="with torch.device('meta'):\n    model = Net()\nmodel.load_state_dict(state, assign=True)",
        opportunity=True,
    )
