"""How much of the time the device ran nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def utilisation(on_gpu: bool) -> Iterator[list[float]]:
    """NVML's utilisation, asked twice a second: shares of its last period in which a kernel ran; none without NVML."""
    shares: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        import torch

        with contextlib.suppress(Exception):  # no NVML, or no right to ask it: the rest of the account stands without
            while not stop.wait(0.5):
                shares.append(torch.cuda.utilization() / 100)

    if not on_gpu:
        yield shares
        return
    thread = threading.Thread(target=ask, name="fettle-nvml", daemon=True)
    thread.start()
    try:
        yield shares
    finally:
        stop.set()
        thread.join()
