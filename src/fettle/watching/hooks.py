"""Where loops over loaders, and waiting for the device, pass through Python: taken note of for the time being."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from fettle.patches import replaced
from fettle.watching.account import Steps

# What makes the host wait for the device when its tensor is there. `.to` and operators that wait inside are not among
# them: they are called too often, or cannot be told from those that do not wait.
_WAITING_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")


@contextlib.contextmanager
def patched(steps: Steps) -> Iterator[None]:
    """Take note where loops over loaders and waiting for the device pass through Python."""
    with contextlib.ExitStack() as stack:
        gc.callbacks.append(steps._collected)
        stack.callback(gc.callbacks.remove, steps._collected)
        torch = sys.modules.get("torch")  # a loop that has not imported it has neither loader nor tensors
        if torch is not None:
            from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

            # Between epochs the loader starts its workers anew: that is waiting for data too.
            stack.enter_context(replaced(DataLoader, "__iter__", functools.partial(_loader_iter, steps)))
            stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", functools.partial(_loader_next, steps)))
            if torch.cuda.is_available():
                steps._on_gpu = True
                for name in _WAITING_METHODS:
                    stack.enter_context(replaced(torch.Tensor, name, functools.partial(_waits, steps, True)))
                for owner in (torch.cuda.Event, torch.cuda.Stream):
                    stack.enter_context(replaced(owner, "synchronize", functools.partial(_waits, steps, False)))
                stack.enter_context(replaced(torch.cuda, "synchronize", functools.partial(_waits, steps, False)))
        yield


def _loader_iter(steps: Steps, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        with steps.waiting("data"):
            iterator = original(self)
        with contextlib.suppress(AttributeError):  # a loader of the user's own may return anything that iterates
            iterator._fettle_asked = None  # one with workers that persist has been through an epoch
        return iterator

    return iterate


def _loader_next(steps: Steps, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def next_batch(self: Any) -> Any:
        if steps._in is not None or threading.get_ident() != steps._thread:
            return original(self)
        started = time.perf_counter_ns()
        if not steps._said:
            if getattr(self, "_fettle_asked", None) == steps._count:  # for the second time in this step, which ends
                steps._end(started)
            elif steps._count == 0 and (steps._first is None or steps._first() in (None, self)):
                steps._begin_again(started)  # what ran before the loop is not a step of it
                steps._first = weakref.ref(self)
        self._fettle_asked = steps._count
        steps._in, collecting = "data", steps._gc
        try:
            return original(self)
        finally:
            steps._in = None
            steps._data += time.perf_counter_ns() - started - (steps._gc - collecting)

    return next_batch


def _waits(steps: Steps, of_tensor: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        if of_tensor and not args[0].is_cuda:
            return original(*args, **kwargs)
        if threading.get_ident() == steps._thread and steps._in is None:
            steps._syncs += 1
        with steps.waiting("sync"):
            return original(*args, **kwargs)

    return waiting
