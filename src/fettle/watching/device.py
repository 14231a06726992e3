"""How much of the time the device ran nothing."""

from __future__ import annotations

import statistics
import threading


class DeviceMeter:
    """NVML's utilisation, asked twice a second: the share of its last period in which a kernel ran."""

    def __init__(self, on_gpu: bool) -> None:
        self._busy: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fettle-nvml", daemon=True) if on_gpu else None

    def idle(self) -> float | None:
        """Share of the time without a kernel; None without NVML."""
        return 1 - statistics.fmean(self._busy) if self._busy else None

    def __enter__(self) -> DeviceMeter:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        import torch

        while not self._stop.wait(0.5):
            try:
                self._busy.append(torch.cuda.utilization() / 100)
            except Exception:  # no NVML, or no right to ask it: the rest of the account stands without
                return
