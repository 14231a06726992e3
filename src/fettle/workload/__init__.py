"""The workload: what is to be made fast, and where it comes from.

A *workload* is a model, sample batches, how the model is called and, optionally, the user's metric. A *target* says
how to build it, so that a fresh process can build it again: ``path/to/file.py:factory``, ``package.module:factory``,
or live objects, which travel as a cloudpickle file.
"""

from fettle.workload.model import Workload, fingerprint, register_kind, workload_from
from fettle.workload.target import AUTO, Target, check_mode, find_target, switches, target_from_objects
from fettle.workload.trees import (
    Batch,
    again,
    device_of,
    fresh,
    is_numbers,
    is_shared,
    leaves,
    map_tensors,
    rows_of,
    size_bytes,
    spread,
    stored,
    tensors,
    wait_for,
)

__all__ = [
    "AUTO", "Batch", "Target", "Workload", "again", "check_mode", "device_of", "find_target", "fingerprint",
    "fresh", "is_numbers", "is_shared", "leaves", "map_tensors", "register_kind", "rows_of", "size_bytes", "spread",
    "stored", "switches", "target_from_objects", "tensors", "wait_for", "workload_from",
]  # fmt: skip
