"""The processor: cores against threads, allocators, huge pages, clocks, neighbours."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from fettle.doctor._check import Finding, check, error, note, warning
from fettle.doctor.environment import Environment
from fettle.units import count_text

_NODES = "/sys/devices/system/node/node[0-9]*/cpulist"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_BUSY = 20.0
"""Percent of the last ten seconds in which some task waited for a core."""
_MALLOC_KEYS = (
    "abort abort_conf background_thread confirm_conf dirty_decay_ms lg_extent_max_active_fit lg_tcache_max "
    "max_background_threads metadata_thp muzzy_decay_ms narenas oversize_threshold percpu_arena prof prof_active "
    "prof_final prof_leak prof_prefix retain stats_print tcache tcache_max thp trust_madvise xmalloc zero junk dss "
    "cache_oblivious lg_prof_interval lg_prof_sample"
)


@check(quick=True)
def threads_beyond_cores(here: Environment) -> Iterator[Finding]:
    """More threads than cores that are granted, by a variable, or by a quota that OpenMP does not know."""
    ranks = max(1, here.number("LOCAL_WORLD_SIZE") or 1)
    granted = here.granted
    for name in _THREADS[:2]:
        threads = here.number(name)
        if threads and threads * ranks > granted:
            each = max(1, granted // ranks)
            times = f" in each of {ranks} processes" if ranks > 1 else ""
            yield warning(f"{name}={threads}{times}, and this process is granted {count_text(granted, 'core')}.",
                          "Threads wait for one another at the end of every operation; too many are slower than one.",
                          f"export {name}={each}")  # fmt: skip
    if here.quota < here.cores and here.number("OMP_NUM_THREADS") is None:
        yield warning(f"The control group grants {count_text(here.quota, 'core')}; OpenMP starts {here.cores} threads.",
                      "They use up the quota together, and all are stopped until the next period.",
                      f"export OMP_NUM_THREADS={max(1, math.floor(here.quota))}")  # fmt: skip


@check(quick=True)
def threads_variable(here: Environment) -> Iterator[Finding]:
    """A number of threads that is not a number, leaves cores idle, or that differs from library to library."""
    for name in _THREADS:
        text = here.variables.get(name, "").strip()
        if text and not here.number(name):
            yield warning(f"{name}={text[:40]!r} is not a number of threads.", "It is ignored, or ends the program.",
                          f"export {name}={here.granted}")  # fmt: skip
    omp, mkl = here.number("OMP_NUM_THREADS"), here.number("MKL_NUM_THREADS")
    by_torchrun = "TORCHELASTIC_RUN_ID" in here.variables or "LOCAL_RANK" in here.variables
    ranks = max(1, here.number("LOCAL_WORLD_SIZE") or 1)
    if omp == 1 and here.granted // ranks > 1:
        make = note if by_torchrun else warning
        yield make("OMP_NUM_THREADS=1" + (", as torchrun sets it" if by_torchrun else "")
                   + f", and {here.granted} cores are granted{f' to {ranks} processes' if ranks > 1 else ''}.",
                   "Work on the CPU has one core, the others are idle.",
                   f"export OMP_NUM_THREADS={here.granted // ranks}")  # fmt: skip
    if omp and mkl and omp != mkl:
        yield note(f"OMP_NUM_THREADS={omp} and MKL_NUM_THREADS={mkl}.",
                   "Matrix products run on another number of threads.", "unset MKL_NUM_THREADS")  # fmt: skip


@check(quick=True)
def sibling_threads(here: Environment) -> Iterator[Finding]:
    """Two threads of one operation on one physical core."""
    threads = here.number("OMP_NUM_THREADS")
    pattern = "/sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list"
    siblings = {here.files.text(path).strip() for path in here.files.matching(pattern)} - {""}
    if threads and siblings and here.cores == here.cpus and len(siblings) < threads <= here.cpus:
        yield note(f"OMP_NUM_THREADS={threads}, and the machine has {count_text(len(siblings), 'physical core')}.",
                   "Two threads share the vector units of one core: rarely faster, often slower.",
                   f"export OMP_NUM_THREADS={len(siblings)}")  # fmt: skip


@check()
def several_nodes(here: Environment) -> Iterator[Finding]:
    """Threads spread over NUMA nodes without being bound."""
    bound = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
    nodes = [path for path in here.files.matching(_NODES) if here.files.text(path).strip()]
    if len(nodes) > 1 and here.cores == here.cpus and not any(name in here.variables for name in bound):
        yield note(f"The process may run on all of {len(nodes)} NUMA nodes, and its threads are not bound.",
                   "A thread that reads memory of another node waits about twice as long.",
                   "numactl --cpunodebind=0 --membind=0 python ...")  # fmt: skip


@check(quick=True)
def slow_clock(here: Environment) -> Iterator[Finding]:
    """A governor that keeps the clock low, or a turbo that is off."""
    base = "/sys/devices/system/cpu"
    governor = here.files.text(f"{base}/cpu0/cpufreq/scaling_governor").strip()
    driver = here.files.text(f"{base}/cpu0/cpufreq/scaling_driver").strip()
    if governor == "powersave" and driver not in ("intel_pstate", "amd-pstate-epp"):  # there it means: as needed
        yield warning(f"The clock's governor is {governor}.", "The cores stay at their lowest clock.",
                      "sudo cpupower frequency-set -g performance")  # fmt: skip
    if (here.files.text(f"{base}/intel_pstate/no_turbo").strip() == "1"
            or here.files.text(f"{base}/cpufreq/boost").strip() == "0"):  # fmt: skip
        yield note("The turbo clock is off.", "Steadier times, and slower ones.",
                   f"echo 0 | sudo tee {base}/intel_pstate/no_turbo  # AMD: 1 to {base}/cpufreq/boost")  # fmt: skip


@check()
def two_openmps(here: Environment) -> Iterator[Finding]:
    """Two OpenMP runtimes in one process."""
    if here.is_on("KMP_DUPLICATE_LIB_OK") and "KMP_INIT_AT_FORK" not in here.variables:  # scikit-learn sets both
        yield warning("KMP_DUPLICATE_LIB_OK hides that two OpenMP runtimes are loaded.",
                      "Each has threads of its own, which take the cores from one another, and results may be wrong.",
                      "unset KMP_DUPLICATE_LIB_OK  # and install torch and NumPy from one source")  # fmt: skip
    runtimes = set(re.findall(r"/(libgomp|libiomp5|libomp)\b[^/\s]*\.so", here.files.text("/proc/self/maps")))
    takes_all = re.search(r"\blib(iomp5|omp)\b", here.variables.get("LD_PRELOAD", ""))  # GCC's calls go there, too
    if len(runtimes) > 1 and not takes_all:
        yield warning(f"Two OpenMP runtimes are loaded: {' and '.join(sorted(runtimes))}.",
                      "Each has threads of its own, which take the cores from one another.",
                      "export LD_PRELOAD=/path/to/libiomp5.so  # the one for all")  # fmt: skip


@check(quick=True)
def preloaded(here: Environment) -> Iterator[Finding]:
    """A library to preload that is not there, or two allocators."""
    entries = [entry for entry in re.split(r"[:\s]+", here.variables.get("LD_PRELOAD", "")) if entry]
    for entry in entries:
        if "/" in entry and "$" not in entry and not here.files.exists(entry):
            yield warning(f"LD_PRELOAD names {entry}, which does not exist.",
                          "The loader goes on without it: the allocator that was meant is not used.",
                          "ldconfig -p | grep -E 'jemalloc|tcmalloc'")  # fmt: skip
    names = sorted({name for name in ("jemalloc", "tcmalloc", "mimalloc") for entry in entries if name in entry})
    if len(names) > 1:
        yield warning(f"LD_PRELOAD names {len(names)} allocators: {', '.join(names)}.",
                      "One of them is used, the others' settings are ignored.",
                      f"export LD_PRELOAD={next(entry for entry in entries if names[0] in entry)}")  # fmt: skip


@check(quick=True)
def malloc_settings(here: Environment) -> Iterator[Finding]:
    """Settings of jemalloc without it, or with words that it does not know."""
    text = here.variables.get("MALLOC_CONF", "")
    if not text:
        return
    if "jemalloc" not in here.variables.get("LD_PRELOAD", ""):
        yield warning("MALLOC_CONF is set, and jemalloc is not preloaded.", "Nobody reads it.",
                      "export LD_PRELOAD=/path/to/libjemalloc.so.2")  # fmt: skip
        return
    for item in text.split(","):
        key, colon, value = item.strip().partition(":")
        if not colon or not value or key not in _MALLOC_KEYS.split():
            yield warning(f"MALLOC_CONF: {item.strip()[:60]!r} is nothing that jemalloc knows.",
                          "It prints 'Invalid conf pair', and goes on without the rest.",
                          "export MALLOC_CONF=background_thread:true,dirty_decay_ms:-1,muzzy_decay_ms:-1")  # fmt: skip


@check()
def idle_allocator(here: Environment) -> Iterator[Finding]:
    """An allocator that keeps memory, installed and not used, where models run on the CPU."""
    if here.allocators and not here.gpus and not any(
        name in here.variables.get("LD_PRELOAD", "") for name in here.allocators
    ):  # fmt: skip
        name, path = next(iter(here.allocators.items()))
        yield note(f"{name} is installed, and not preloaded.",
                   "Training loops and large batches on a CPU fetch their memory anew in each step without it.",
                   f"export LD_PRELOAD={path}  # fettle tune tries it")  # fmt: skip


@check()
def huge_pages(here: Environment) -> Iterator[Finding]:
    """Transparent huge pages that are never given."""
    setting = re.search(r"\[(\w+)\]", here.files.text("/sys/kernel/mm/transparent_hugepage/enabled"))
    if setting is None or setting[1] != "never":
        return
    asks = here.is_on("THP_MEM_ALLOC_ENABLE")
    make = warning if asks else note
    yield make("Transparent huge pages are never given" + (", and THP_MEM_ALLOC_ENABLE asks for it." if asks else "."),
               "Large weights and batches need 512 times as many entries of the page table.",
               "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled")  # fmt: skip


@check()
def slow_type(here: Environment) -> Iterator[Finding]:
    """A 16-bit model on a processor that has no instructions for it."""
    flags = set(here.files.text("/proc/cpuinfo").split())
    has = {
        "bfloat16": {"avx512_bf16", "amx_bf16", "bf16", "svebf16"},
        "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
    }
    for model in here.program.models:
        for name in sorted(has.keys() & set(model.dtypes)):
            if model.device == "cpu" and flags and not has[name] & flags:
                yield warning(f"{model.name} has weights in {name}, for which this CPU has no instructions.",
                              "Every value is converted to float32 and back: slower than float32 itself.",
                              "model.float()")  # fmt: skip


@check()
def denormals(here: Environment) -> Iterator[Finding]:
    """Weights so small that the processor computes with them in microcode."""
    for model in here.program.models:
        if model.tiny > 1e-4:
            yield warning(f"{model.tiny:.2%} of the weights of {model.name} are denormal numbers.",
                          "Each costs the CPU about a hundred times a normal one.",
                          "torch.set_flush_denormal(True)")  # fmt: skip


@check()
def busy_neighbour(here: Environment) -> Iterator[Finding]:
    """Others who keep cores or devices busy right now."""
    pressure = re.search(r"some avg10=([0-9.]+)", here.files.text("/proc/pressure/cpu"))
    load = re.match(r"([0-9.]+)", here.files.text("/proc/loadavg"))
    if pressure and float(pressure[1]) > _BUSY:
        finding = f"Tasks waited for a core in {float(pressure[1]):.0f}% of the last 10 seconds."
    elif not pressure and load and float(load[1]) > here.cpus + 1:
        finding = f"{float(load[1]):.1f} tasks want to run on {count_text(here.cpus, 'core')}."
    else:
        finding = ""
    if finding:
        yield warning(finding, "What is measured now is the neighbour's too; code in several threads suffers most.",
                      "top -o %CPU")  # fmt: skip
    for number, gpu in enumerate(here.gpus):
        if gpu.busy > 0.1:
            yield warning(f"{gpu.name} (GPU {number}) is {gpu.busy:.0%} busy already.",
                          "Its kernels take turns with those of another process.", "nvidia-smi")  # fmt: skip
        if gpu.slowed_by:
            make = warning if gpu.slowed_by == "heat" else note
            yield make(f"The clock of {gpu.name} (GPU {number}) is held down by {gpu.slowed_by}.",
                       "Kernels take longer than they could.", "nvidia-smi -q -d PERFORMANCE")  # fmt: skip


@check()
def memory_short(here: Environment) -> Iterator[Finding]:
    """Memory that is almost used up."""
    sizes = {name: int(size) for name, size in re.findall(
        r"^(Mem\w+|Swap\w+): +([0-9]+) kB", here.files.text("/proc/meminfo"), re.MULTILINE
    )}  # fmt: skip
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    if total and free < 0.05 * total:
        yield warning(f"{free / total:.0%} of memory is free ({free >> 10} MiB).",
                      "The next large tensor is swapped, or ends the process.", "ps aux --sort -rss")  # fmt: skip
    for number, gpu in enumerate(here.gpus):
        if gpu.total_bytes and gpu.used_bytes > 0.9 * gpu.total_bytes:
            yield warning(f"{gpu.used_bytes / gpu.total_bytes:.0%} of the memory of {gpu.name} (GPU {number}) is used.",
                          "A model of any size runs out of memory.", "nvidia-smi")  # fmt: skip


@check(quick=True)
def small_affinity(here: Environment) -> Iterator[Finding]:
    """Libraries that were bound to cores that this process may not use."""
    text = here.variables.get("GOMP_CPU_AFFINITY", "")
    named = {number for first, last in re.findall(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
             for number in range(int(first), min(int(last or first), 65535) + 1)}  # fmt: skip
    if named and max(named) >= here.cpus:
        yield error(f"GOMP_CPU_AFFINITY={text[:60]} names core {max(named)}, and there are {here.cpus}.",
                    "Several threads share a core, the rest are idle.",
                    f"export GOMP_CPU_AFFINITY=0-{here.cpus - 1}")  # fmt: skip
    elif named and len(named) == 1 and here.granted > 1:
        yield warning(f"GOMP_CPU_AFFINITY={text[:60]} binds all threads to one core.",
                      "They take turns, and the other cores are idle.", "unset GOMP_CPU_AFFINITY")  # fmt: skip
