"""The settings of torch's caching allocator: as torch reads them, which is to the letter."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from fettle.doctor._check import Finding, check, error, note, warning
from fettle.doctor.environment import Environment

_AMD = "PYTORCH_HIP_ALLOC_CONF"
"""Only a build for AMD's GPUs reads it."""
_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", _AMD, "PYTORCH_ALLOC_CONF")
"""The first that is set counts."""
_TRUTHS = (
    "expandable_segments", "pinned_use_background_threads", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
    "pinned_use_cuda_host_register", "pinned_use_hip_host_register", "pinned_free_catch_all",
    "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
)  # fmt: skip
_COUNTS = {
    "max_split_size_mb": (20, 1 << 40), "max_non_split_rounding_mb": (20, 1 << 40),
    "large_segment_size_mb": (11, 1 << 40), "pinned_max_cached_size_mb": (0, 1 << 40),
    "pinned_max_round_threshold_mb": (0, 1 << 40),
    "pinned_num_register_threads": (1, 128), "pinned_reserve_segment_size_mb": (0, 1 << 40),
}  # fmt: skip
_SHARES = ("garbage_collection_threshold", "per_process_memory_fraction")
_KEYS = (*_TRUTHS, *_COUNTS, *_SHARES, "roundup_power2_divisions", "backend")
_NATIVE = ("expandable_segments", "max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions")
"""What only torch's own allocator does."""
_RAISES = "torch raises when the settings are first read, or reads something else."


def _set(here: Environment) -> dict[str, str]:
    """The variables that this torch reads, and what they say. The first counts."""
    names = (name for name in _NAMES if name != _AMD or here.torch_built_for() == "rocm")
    return {name: here.variables[name] for name in names if here.variables.get(name, "").strip()}


def _settings(here: Environment) -> tuple[str, str]:
    """The variable that counts, and what it says."""
    return next(iter(_set(here).items()), ("", ""))


def _pairs(text: str) -> list[tuple[str, str]]:
    """Keys and values; a value in brackets is one. What has no colon has no value."""
    items = re.findall(r"[^,\[\]]+(?:\[[^\]]*\]?)?", "".join(text.split()))
    return [(key, value) for key, _, value in (item.partition(":") for item in items)]


@check(quick=True)
def allocator_settings(here: Environment) -> Iterator[Finding]:
    """Every key and value that torch would not take, or would not know."""
    name, text = _settings(here)
    for key, value in _pairs(text):
        fault, better = _fault(key, value)
        if fault:
            mended = "".join(text.split()).replace(f"{key}:{value}" if value else key, better).strip(",")
            mend = f"export {name}={mended}" if mended else f"unset {name}"
            # Without a device nobody looks whether a key is known.
            make = warning if key not in _KEYS and value and here.torch_built_for() == "cpu" else error
            yield make(f"{name}: {fault}", _RAISES if make is error else "The setting is ignored.", mend)


def _fault(key: str, value: str) -> tuple[str, str]:
    """What is wrong with one pair, and what it should be; empty where nothing is."""
    close = difflib.get_close_matches(key.partition("=")[0].lower(), _KEYS, 1)
    if not value:
        right = key.replace("=", ":", 1) if "=" in key and close else ""
        return f"{key!r} has no value: keys and values are parted by a colon.", right
    if key not in _KEYS:
        return (f"{key!r} is not a key" + (f"; did you mean {close[0]}?" if close else "."),
                f"{close[0]}:{value}" if close else "")  # fmt: skip
    if key in _TRUTHS and value not in ("True", "False"):
        right = {"true": "True", "1": "True", "yes": "True", "on": "True"}.get(value.lower(), "False")
        return f"{key} is {value!r}, and must be exactly True or False.", f"{key}:{right}"
    if key in _COUNTS:
        least, most = _COUNTS[key]
        if not value.isdecimal() or not least <= int(value[:15]) <= most:
            return f"{key} is {value!r}, and must be a whole number from {least} on.", f"{key}:{max(least, 128)}"
    if key in _SHARES:
        share = float(value) if re.fullmatch(r"[0-9]*\.?[0-9]+", value) else 0.0
        if not (0 < share < 1 or (share == 1 and key == "per_process_memory_fraction")):
            return f"{key} is {value!r}, and must lie between 0 and 1.", f"{key}:0.8"
    if key == "backend" and value not in ("native", "cudaMallocAsync", "hipMallocAsync"):
        return f"backend is {value!r}, and there are native and cudaMallocAsync.", "backend:native"
    if key == "roundup_power2_divisions":
        numbers = [int(number[:9]) for number in re.findall("[0-9]+", value)]
        if not numbers or any(number & (number - 1) for number in numbers) or value == "0":
            return f"{key} is {value!r}, and every number in it must be a power of two.", f"{key}:4"
    return "", ""


@check(quick=True)
def allocator_set_twice(here: Environment) -> Iterator[Finding]:
    """Several variables, of which one counts; one that only another build reads; or a key twice."""
    set_values = {name: value.strip() for name, value in _set(here).items()}
    if here.torch_built_for() not in ("", "rocm") and _AMD in here.variables:
        yield warning(f"{_AMD} is set, and torch is no build for AMD's GPUs.", "It is ignored.", f"unset {_AMD}")
    if len(set(set_values.values())) > 1:
        first, *others = set_values
        yield warning(f"{first} and {' and '.join(others)} are set, and differ.",
                      f"{first} counts, the other is ignored.", f"unset {' '.join(others)}")  # fmt: skip
    keys = [key for key, _ in _pairs(_settings(here)[1])]
    for key in dict.fromkeys(key for key in keys if keys.count(key) > 1):
        yield warning(f"{_settings(here)[0]} names {key} {keys.count(key)} times.", "The last one counts.",
                      f"export {_settings(here)[0]}=...  # with {key} once")  # fmt: skip


@check(quick=True)
def allocator_contradicts(here: Environment) -> Iterator[Finding]:
    """Settings that cancel one another, or that do not go with this system."""
    name, text = _settings(here)
    pairs = dict(_pairs(text))
    ignored = [key for key in _NATIVE if key in pairs and pairs[key] != "False"]
    if pairs.get("backend") == "cudaMallocAsync":
        if ignored:
            yield warning(f"{name} sets {', '.join(ignored)} beside backend:cudaMallocAsync.",
                          "CUDA's own allocator ignores them.", f"export {name}=backend:cudaMallocAsync")  # fmt: skip
        yield note(f"{name} selects CUDA's own allocator.",
                   "torch.cuda.memory_stats() has zeros for most of it, and snapshots are empty.",
                   f"export {name}=backend:native  # while memory is analysed")  # fmt: skip
    if pairs.get("expandable_segments") != "True":
        return
    release = here.files.text("/proc/sys/kernel/osrelease").strip()
    if "microsoft" in release.lower():
        yield warning(f"{name} asks for expandable segments under WSL ({release}).",
                      "They are not supported there, and ignored.", f"unset {name}")  # fmt: skip
    numbers = [int(number) for number in re.findall(r"[0-9]{1,6}", release)[:2]]
    sharing = here.variables.get("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "")
    if (numbers and numbers < [5, 6]) or sharing == "0":
        yield warning(f"{name} asks for expandable segments, and "
                      + (f"Linux {release} cannot share them between processes." if sharing != "0" else
                         "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=0 forbids to share them between processes."),
                      "CUDA tensors that are sent to another process (IPC, custom all-reduce kernels) fail.",
                      f"unset {name}  # where tensors are shared")  # fmt: skip


@check(quick=True)
def no_memory_cache(here: Environment) -> Iterator[Finding]:
    """The switch for memory checkers."""
    for name in ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"):
        if name in here.variables:  # torch looks whether it is set, not to what
            yield warning(f"{name}={here.variables[name]} is set.",
                          "Every tensor is allocated and freed by the driver, which waits for the device.",
                          f"unset {name}")  # fmt: skip
