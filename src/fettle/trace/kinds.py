"""What an event is, decided by its category and never by its stream number.

Profiler categories changed their spelling over the years (`Kernel` became `kernel`, `Operator` became `cpu_op`) and
every vendor adds its own runtime. All of them end up as one of the few kinds below; names matter only where the
category is silent: to tell a collective from other kernels, and a blocking call from other calls.
"""

from __future__ import annotations

import re
from enum import IntEnum


class Kind(IntEnum):
    """What one complete event of a trace stands for."""

    OTHER = 0
    OPERATOR = 1
    ANNOTATION = 2
    RUNTIME = 3
    PYTHON = 4
    KERNEL = 5
    MEMCPY = 6
    MEMSET = 7
    DEVICE_ANNOTATION = 8
    SYNC = 9
    OVERHEAD = 10
    COUNTER_RANGE = 11


HOST_KINDS = (Kind.OPERATOR, Kind.ANNOTATION, Kind.RUNTIME, Kind.PYTHON, Kind.OVERHEAD)
DEVICE_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)

_KIND_OF_CATEGORY = {
    "cpu_op": Kind.OPERATOR,
    "operator": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "python_function": Kind.PYTHON,
    "kernel": Kind.KERNEL,
    "concurrent_kernel": Kind.KERNEL,
    "mtia_ccp_events": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY,
    "memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "memset": Kind.MEMSET,
    "gpu_user_annotation": Kind.DEVICE_ANNOTATION,
    "cuda_sync": Kind.SYNC,
    "xpu_sync": Kind.SYNC,
    "overhead": Kind.OVERHEAD,
    "cuda_profiler_range": Kind.COUNTER_RANGE,
    "runtime": Kind.RUNTIME,
}


def kind_of_category(category: str) -> Kind:
    """The kind of an event category, in its old or new spelling; OTHER for unknown ones."""
    lower = category.lower()
    if lower in _KIND_OF_CATEGORY:
        return _KIND_OF_CATEGORY[lower]
    # Every accelerator back end adds a pair of these: cuda_, hip_, xpu_, mtia_, privateuse1_, glow_.
    if lower.endswith(("_runtime", "_driver")):
        return Kind.RUNTIME
    return Kind.OTHER


_COLLECTIVE = re.compile(
    r"nccl|rccl|hccl|oneccl|mscclpp|msccl|cross_device_reduce|nvshmem|deep_?ep\b|multimem_|symm_mem|"
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|one_shot_|two_shot_|userbuffers_",
    re.IGNORECASE,
)
# Inductor names kernels after the operators around them: `triton_poi_fused_all_reduce_0` copies what is to be reduced.
_NOT_COLLECTIVE = re.compile(r"^(memcpy|memset)|^triton_[a-z]+_fused_|check_?nan", re.IGNORECASE)


def is_collective_name(name: str) -> bool:
    """Whether a kernel's name is one of the known collectives: NCCL, RCCL, HCCL, oneCCL, MSCCL, NVSHMEM, DeepEP,
    custom ones.

    Only the function's own name is looked at: template arguments and parameters of a compute kernel may mention
    anything.
    """
    return bool(_COLLECTIVE.search(short_kernel_name(name))) and not _NOT_COLLECTIVE.search(name)


_BLOCKING = re.compile(
    r"^(cuda|hip|cu)(Device|Stream|Event|Ctx)Synchronize|^(cuda|hip)Memcpy(_ptsz|_ptds)?$|^(cuda|hip)Memcpy(2D|3D|HtoD|DtoH|DtoD)?$|"
    r"^cuMemcpy(HtoD|DtoH|DtoD)(_v2)?$|^(cuda|hip)MemcpyWithStream|^(cuda|hip)MemcpyToSymbol$|"
    r"^(ze|ur|mtia|musa|acl).*(Synchronize|HostSynchronize|Finish)|^urQueueFinish|^urEventWait"
)
_ALLOCATOR = re.compile(
    r"^(cuda|hip)(Malloc|Free|HostAlloc|HostFree|MallocHost|FreeHost|HostRegister|HostUnregister|HostMalloc|MallocManaged|"
    r"MallocAsync|FreeAsync|MemPool)|^(cu|hip)Mem(Create|Map|Unmap|Release|SetAccess|AddressReserve|AddressFree|Alloc|Free)"
)
# Of Python functions only those that compile: their modules also hold wrappers that run at every call of compiled code.
_LOADING = re.compile(
    r"^(cu|cuda|hip)(Module|Library)(Load|Unload|Get)|"
    r"^(Lazy Function Loading|Runtime Triggered Module Loading|Driver Compiler)$|"  # CUPTI has them among its overhead
    r": (_?compile_fx\w*|_?compile_inner|fx_codegen_and_compile|_?convert_frame\w*|precompile)$|"
    r": make_(ttir|ttgir|llir|ptx|cubin)$|async_compile\.py\(\d+\): |codecache\.py\(\d+\): (load|compile|write)|"
    r"triton/compiler/compiler\.py\(\d+\): compile|"
    r": (autotune_to_one_config|benchmark_all_configs)$|nvrtc|cudnnFind|"
    r" \(dynamo_timed\)$",  # the compiler's own ranges, which are operators to the profiler
    re.IGNORECASE,
)
_DATA = re.compile(
    r"dataloader|data_loader|torch/utils/data|fetch\.py\(\d+\): fetch|enumerate\(DataLoader|pin_memory\.py"
)
# Host time of a collective is waiting for the others when the host itself carries it out (gloo, MPI), and in barriers.
_OTHER_RANK = re.compile(
    r"^(gloo|mpi|ucc):|^c10d::(barrier|monitored_barrier_)$|distributed_c10d\.py\(\d+\): (monitored_)?barrier$|"
    r"<built-in method wait of .*Work\b"
)
_PROFILER = re.compile(r"torch/(profiler|autograd)/profiler\.py|^PyTorch Profiler|profiler::", re.IGNORECASE)
_GARBAGE = re.compile(r"<built-in (function|method) collect|gc\.collect|^gc\b|^Python GC$")
_LAUNCH = re.compile(
    r"LaunchKernel|LaunchCooperative|ModuleLaunch|GraphLaunch|^runFunction|LaunchByPtr|^(cu|hip|cuda)Launch|KernelLaunch|"
    r"EnqueueKernel|AppendLaunch"
)


def is_launch_call(name: str) -> bool:
    """Whether a runtime call launches kernels: cudaLaunchKernel(ExC), cuLaunchKernel(Ex), hip*, cooperative, graphs."""
    return bool(_LAUNCH.search(name))


def is_graph_launch(name: str) -> bool:
    """Whether a runtime call launches a whole captured graph: one call, many kernels."""
    return "GraphLaunch" in name


def host_cause(name: str, kind: Kind) -> str:
    """Which idle cause a host event stands for while it is the innermost one on its thread.

    Returns one of `fettle.trace.CAUSES_OF_HOST`. Data loading is inherited by everything inside it, see there.
    """
    if kind == Kind.OPERATOR and name.startswith("aten::"):
        return "operator"  # most names of a trace: none of what follows is looked for in them
    if kind == Kind.OVERHEAD:
        return "compile_or_load" if _LOADING.search(name) else "profiler"
    if _PROFILER.search(name):
        return "profiler"
    if kind == Kind.RUNTIME:
        if _BLOCKING.search(name):
            return "blocking_call"
        if _ALLOCATOR.search(name):
            return "allocator"
        if _LOADING.search(name):
            return "compile_or_load"
        return "launch_call" if is_launch_call(name) else "runtime_call"
    if _DATA.search(name):
        return "data_loading"
    if _GARBAGE.search(name):
        return "garbage_collection"
    if _OTHER_RANK.search(name):
        return "other_rank"
    if _LOADING.search(name):
        return "compile_or_load"
    if kind == Kind.OPERATOR:
        return "operator"
    if kind == Kind.PYTHON:
        return "python"
    return "host_untraced"


ADDRESS = r" (object )?at 0x[0-9a-fA-F]+"


def without_address(name: str) -> str:
    """A Python function's name without the address of the object it was called on, which differs from call to call."""
    return re.sub(ADDRESS, "", name)


def short_kernel_name(name: str) -> str:
    """A kernel's own function name: without return type, namespaces' template arguments and parameters.

    `void at::native::vectorized_elementwise_kernel<4, F>(int, F)` becomes `at::native::vectorized_elementwise_kernel`.
    """
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"(?<=.)[<(]", text, maxsplit=1)[0].strip() or name


_BYTES_OF_TYPES = {
    1: "char, signed char, unsigned char, int8, byte, uint8, bool, "
    "float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz",
    2: "half, float16, bfloat16, short, short int, int16",
    4: "float, float32, int, int32",
    8: "double, float64, long, long int, int64, complexfloat, complex<float>",
    16: "complexdouble, complex<double>",
}
_WIDTH = {name: width for width, names in _BYTES_OF_TYPES.items() for name in names.split(", ")}


def dtype_bytes(name: str) -> int | None:
    """Bytes of an element, by its type as profilers write it (`c10::BFloat16`, `signed char`); None for no dtype."""
    return _WIDTH.get(name.lower().removeprefix("c10::"))
