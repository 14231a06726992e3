"""Memory that piles up, is held twice, or is fetched again and again."""

from __future__ import annotations

import math

from fettle.diagnose.evidence import POINTWISE, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._rule import LEAST, about_operators, cause, rule
from fettle.units import size_text


@rule("inference", "training")
def spike(call: Evidence) -> Finding | None:
    """An intermediate tensor far larger than what it was made from."""
    grown = [op for op in call.operations if op.group == POINTWISE and op.growth >= 8]
    if not grown:
        return None
    shapes = {op.largest for op in grown}
    ops = [op for op in call.operations if op.largest in shapes or op in grown]
    # And those that read all of it afterwards, mostly reductions.
    size = 2 * max(math.prod(op.largest) for op in grown)  # bytes in a 16-bit type
    ops += [op for op in call.operations if op not in ops and op.bytes >= size * op.calls]
    first = max(grown, key=lambda op: op.growth)
    shape = "x".join(map(str, first.largest))
    return about_operators(
        call,
        f"Broadcasting makes a tensor of {shape}, {first.growth:.0f} times what goes in, to work on it.",
        ops,
        "write it as a matrix product (for distances: torch.cdist), or work on it in parts",
        formula="time of all operators that write or read tensors of that size / call",
        before="d = (x[:, None] - y[None]).square().sum(-1).sqrt()",
        after="d = torch.cdist(x, y)",
    )


@rule("inference", "training")
def leak(call: Evidence) -> Finding | None:
    """Tensors that pile up."""
    graph = call.kept.graphs >= 1
    if call.kept.tensors < 1 or not (graph or call.kept.bytes >= 1 << 20):  # a number kept for a log is not a leak
        return None
    written = sum(op.written for op in call.operations)
    what = ", with the autograd graphs that made them" if graph else ""
    count = f"{call.kept.tensors:.3g} tensor{'s' if call.kept.tensors >= 2 else ''}, {size_text(call.kept.bytes)},"
    return cause(
        f"{count} more stay alive after every call{what}.",
        bound=call.share(written * call.fresh.s_per_byte) if graph else 0.0,
        bound_bytes=int(call.kept.bytes),
        evidence=("counted after a full collection, call after call",),
        advice="keep loss.detach() or loss.item(), not the loss" if graph else "look for a list or cache that grows",
        formula="bytes that its operators write x measured cost of a fresh page / call: kept memory is never reused",
        before="losses.append(loss)",
        after="losses.append(loss.detach())",
    )


@rule("inference", "training")
def churn(call: Evidence) -> Finding | None:
    """A device's allocator that gives memory back and fetches it again, after warm-up."""
    counted = call.allocator
    fetched, retries = counted.get("num_device_alloc", 0), counted.get("num_alloc_retries", 0)
    if not retries and not (fetched and counted.get("num_device_free", 0)):
        return None
    how = f"in {counted['calls']} calls: {fetched} segments fetched, {counted.get('num_device_free', 0)} given back"
    near_full = "lower the peak (a smaller batch, checkpointing), or expandable_segments:True"
    return cause(
        f"The device is nearly full: {retries} requests in {counted['calls']} calls had to give the cache back first."
        if retries
        else "Calls give device memory back and fetch it again.",
        evidence=(how, f"{retries} requests only after the cache was given back, {counted.get('num_ooms', 0)} failed"),
        advice=near_full if retries else "remove empty_cache() from the loop: the memory is fetched again at once",
        formula="no bound: counters hold no time",
        before="torch.cuda.empty_cache()  # every step",
        after="# let the cache work",
    )


@rule("inference", "training")
def fresh_memory(call: Evidence) -> Finding | None:
    """Memory that the C library hands back to the system after each call, and fetches again for the next."""
    share = call.share(call.fresh.seconds)
    if call.facts.device != "cpu" or share < LEAST or call.kept.tensors >= 1:  # what is kept must be fetched anew
        return None
    each_us = call.fresh.seconds / call.fresh.pages * 1e6
    return cause(
        f"{share:.0%} of a call goes into fetching memory from the system that the call before gave back.",
        bound=share,
        evidence=(f"{call.fresh.pages:.0f} pages a call, {each_us:.2g} us for each, as measured here",),
        levels={"allocator": "keep"} if "glibc" in call.facts.libraries else {},
        advice="let the C library keep what is freed, or preload jemalloc or tcmalloc",
        formula="pages fetched a call x measured cost of one / call",
        before="for batch in data:\n    step(batch)",
        after="libc = ctypes.CDLL(None)\nlibc.mallopt(-4, 0), libc.mallopt(-1, -1)  # M_MMAP_MAX, M_TRIM_THRESHOLD\n"
        "for batch in data:\n    step(batch)",
        opportunity=True,
    )


@rule("inference")
def weight_memory(call: Evidence) -> Finding | None:
    """Half of the weights' memory could be freed."""
    if call.facts.dtype != "float32" or call.weights.bytes < 256 << 20:
        return None
    return cause(
        "The weights are stored in 32 bits.",
        bound_bytes=call.weights.bytes // 2,
        evidence=(f"{call.weights.bytes >> 20} MiB of weights",),
        levels={"precision": "bf16"},
        advice="store them in bfloat16: half the memory, and half the time to load",
        formula="half of the weights' bytes",
        before="model = Net()",
        after="model = Net().bfloat16()",
        opportunity=True,
    )


@rule("inference")
def duplicate_weights(call: Evidence) -> Finding | None:
    """The same values stored twice."""
    if call.weights.duplicate_bytes < 1 << 20:
        return None
    return cause(
        "Parameters are stored twice with the same values.",
        bound_bytes=call.weights.duplicate_bytes,
        evidence=(f"{call.weights.duplicate_bytes >> 20} MiB of copies",),
        advice="tie them: assign the same parameter to both places",
        formula="bytes of the copies",
        before="head.weight = nn.Parameter(embedding.weight.clone())",
        after="head.weight = embedding.weight",
    )
