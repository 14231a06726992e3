"""OpenVINO's core, one a process."""

from typing import Any


def openvino_core() -> Any:
    """The runtime: one for the process, never let go.

    On a CPU with AMX its plugin gives the thread a signal stack, and unmaps that stack when the last runtime goes, also
    where that happens in another thread. The next signal with a handler (a DataLoader's worker ends) then kills.
    """
    import openvino

    if not hasattr(openvino, "process_core"):
        openvino.process_core = openvino.Core()
    return openvino.process_core
