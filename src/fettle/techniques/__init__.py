"""The catalogue of techniques: one file each, found in this folder.

A file whose name does not begin with an underscore is a technique, or a few that belong together. What it holds joins
the catalogue by the decorator `register`; where it stands in the order of application is its own `order`.
"""

from __future__ import annotations

import importlib
import pkgutil

from fettle.techniques._base import CATALOGUE, Bundle, Code, Facts, Learned, Level, Technique, register
from fettle.techniques._catalogue import (
    PYTHON,
    batch_factor,
    bundles,
    canonical,
    changed,
    check_names,
    conflict,
    environment,
    factors,
    find,
    for_parts,
    handed_on,
    idle,
    imports_of,
    is_calibrated,
    keeps_memory,
    kind_of,
    known_levels,
    learned_types,
    needs_of,
    only_saving,
    preconditions,
    respelled,
    run_by,
    uses_ranks,
)
from fettle.techniques._exported import exported_program, loads_cuda_libraries, openvino_core
from fettle.techniques._facts import parts_lines, parts_sentence
from fettle.techniques._host import cpu_flags
from fettle.techniques._kept import Notes, keep_converted, tally
from fettle.techniques._openvino import OpenvinoRequest, openvino_model
from fettle.techniques._openvino_int8 import openvino_saturates
from fettle.techniques._probe import dtype_of, machine_facts, probe_facts, unchanged
from fettle.techniques._ranks import modules_by_size, repeated_blocks, shard, split_over
from fettle.techniques._source import load, source
from fettle.techniques._state_kept import put_modes_back, state_kept, to_eval
from fettle.techniques._tensor import split_bytes, tensor_plan
from fettle.techniques._transformers import hf_attention, is_transformers
from fettle.techniques.batch import LARGEST, enlarged
from fettle.techniques.precision import DTYPES
from fettle.techniques.quantize import quantize_exported
from fettle.techniques.runtime import int8_part, openvino_precision

for _file in pkgutil.iter_modules(__path__):
    if not _file.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_file.name}")

__all__ = [
    "CATALOGUE", "DTYPES", "LARGEST", "PYTHON", "Bundle", "Code", "Facts", "Learned", "Level", "Notes",
    "OpenvinoRequest", "Technique", "batch_factor", "bundles", "canonical", "changed", "check_names", "conflict",
    "cpu_flags", "dtype_of", "enlarged", "environment", "exported_program", "factors", "find", "for_parts", "handed_on",
    "hf_attention", "idle", "imports_of", "int8_part", "is_calibrated", "is_transformers", "keep_converted",
    "keeps_memory",
    "kind_of", "known_levels", "learned_types", "load", "loads_cuda_libraries", "machine_facts", "modules_by_size",
    "needs_of", "only_saving", "openvino_core", "openvino_model", "openvino_precision", "openvino_saturates",
    "parts_lines", "parts_sentence", "preconditions", "probe_facts", "put_modes_back", "quantize_exported", "register",
    "repeated_blocks", "respelled", "run_by", "shard", "source", "split_bytes", "split_over", "state_kept", "tally",
    "tensor_plan", "to_eval", "unchanged", "uses_ranks",
]  # fmt: skip
