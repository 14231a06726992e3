"""One loader setting, measured in a process of its own: a JSON request on stdin, a JSON answer on the last line."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fettle.errors import UsageError, first_line
from fettle.trace.record import load_target

_WARM_UP = 2


def pipeline(target: str) -> tuple[DataLoader[Any], Callable[[Any], Any] | None]:
    """What the factory returns: a loader, a dataset, or (loader or dataset, step)."""
    torch.manual_seed(0)
    factory = load_target(target)
    try:
        made = factory()
    except Exception as error:
        raise UsageError(f"{target} raised {first_line(error)}") from error
    step = None
    if isinstance(made, tuple) and len(made) == 2 and callable(made[1]):
        made, step = made
    if isinstance(made, torch.utils.data.Dataset):
        made = DataLoader(made, batch_size=32)
    if not isinstance(made, DataLoader):
        raise UsageError(f"{target} returned a {type(made).__name__}, not a DataLoader, a dataset, or (loader, step)")
    return made, step


def with_setting(loader: DataLoader[Any], setting: dict[str, Any]) -> DataLoader[Any]:
    """The same loader with another setting; sampler, collate function and batch size stay."""
    iterable = isinstance(loader.dataset, IterableDataset)
    batches: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not iterable:
        own = loader.batch_size is None
        batches = {"batch_size": None, "sampler": loader.sampler} if own else {"batch_sampler": loader.batch_sampler}
    workers = setting["num_workers"]
    if workers:
        batches |= {"prefetch_factor": setting["prefetch_factor"], "persistent_workers": True}
    return DataLoader(
        loader.dataset, num_workers=workers, collate_fn=loader.collate_fn, pin_memory=setting["pin_memory"],
        worker_init_fn=loader.worker_init_fn, generator=loader.generator, timeout=loader.timeout, **batches,
    )  # fmt: skip


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """Batches, epoch after epoch."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise UsageError("the loader gives no batch")


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Time batches and steps under one setting; a few batches first, unmeasured."""
    given, step = pipeline(request["target"])
    loader = given if request["setting"] is None else with_setting(given, request["setting"])
    began = time.perf_counter()
    batches = endless(loader)
    first = next(batches)
    start_s = time.perf_counter() - began
    run = step or (lambda batch: None)
    run(first)
    for _ in range(_WARM_UP):
        run(next(batches))
    waits: list[float] = []
    walls: list[float] = []
    begin = time.perf_counter()
    cpu = time.process_time()
    while (time.perf_counter() - begin < request["seconds"] or len(walls) < 4) and len(walls) < 2000:
        started = time.perf_counter()
        batch = next(batches)
        got = time.perf_counter()
        run(batch)
        walls.append(time.perf_counter() - started)
        waits.append(got - started)
    elapsed = time.perf_counter() - begin
    alone = []
    for _ in range(5 if request.get("step_alone") else 0):
        started = time.perf_counter()
        run(first)
        alone.append(time.perf_counter() - started)
    return {
        "waits": waits,
        "walls": walls,
        "start_s": start_s,
        "rate": len(walls) / elapsed,
        "cpu_share": (time.process_time() - cpu) / elapsed,
        "step_s": statistics.median(alone) if alone else None,
        "batch_bytes": _bytes(first),
        "num_workers": given.num_workers,
        "prefetch_factor": given.prefetch_factor or 2,
        "pin_memory": bool(given.pin_memory),
        "cuda": torch.cuda.is_available(),
    }


def _bytes(batch: Any) -> int:
    from torch.utils import _pytree as pytree

    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.readline())
    torch.set_num_threads(request["threads"])
    try:
        if request["do"] == "lint":
            from fettle.inputs.lints import lint

            answer: dict[str, Any] = {"lints": [vars(item) for item in lint(*pipeline(request["target"]))]}
        else:
            answer = measure(request)
    except UsageError as error:
        answer = {"usage": str(error)}
    except Exception as error:
        answer = {"error": first_line(error) if "Traceback" not in str(error) else _last_line(str(error))}
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)  # loader workers that hang must not keep the process


def _last_line(text: str) -> str:
    """Of a worker's traceback, which arrives as the text of an exception, the line that says what was wrong."""
    return [line for line in text.strip().splitlines() if line.strip()][-1].strip()


if __name__ == "__main__":
    main()
