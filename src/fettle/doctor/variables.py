"""Variables that merely have to be set to cost speed, and switches that a program has left on."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from fettle.doctor._check import CHECKS, Check, Finding, Level, check, warning
from fettle.doctor.environment import Environment

_TABLES: dict[str, dict[str, tuple[str, Level, str]]] = {
    "debug-variables": {  # Variables that make every call slower
        "CUDA_LAUNCH_BLOCKING": ("on", "warning", "Every kernel is waited for: the host cannot run ahead of the GPU."),
        "HIP_LAUNCH_BLOCKING": ("on", "warning", "Every kernel is waited for: the host cannot run ahead of the GPU."),
        "NCCL_DEBUG": ("info|trace", "warning", "NCCL writes a line for what it does, at every start and call."),
        "TORCH_DISTRIBUTED_DEBUG": ("detail", "warning", "Every collective is checked across all ranks first."),
        "TORCH_NCCL_BLOCKING_WAIT": ("on", "warning", "Collectives block the host: nothing overlaps with them."),
        "TORCH_NCCL_DESYNC_DEBUG": ("on", "warning", "Every collective is logged to a store that all ranks share."),
        "TORCH_SHOW_CPP_STACKTRACES": ("on", "note", "Every exception, also one that is caught, collects a C++ stack."),
        "TORCH_CPP_LOG_LEVEL": ("info", "note", "Torch's C++ code logs as it runs."),
        "ONEDNN_VERBOSE": ("1|2|all|profile|profile_exec", "warning", "oneDNN prints a line for every primitive."),
        "DNNL_VERBOSE": ("1|2|all|profile|profile_exec", "warning", "oneDNN prints a line for every primitive."),
        "MKL_VERBOSE": ("on|2", "warning", "MKL prints a line for every call, and times it."),
        "CUDNN_LOGLEVEL_DBG": ("1|2|3", "warning", "cuDNN logs its calls."),
        "CUBLAS_LOGINFO_DBG": ("on", "warning", "cuBLAS logs its calls."),
        "CUBLAS_WORKSPACE_CONFIG": (":16:8|:4096:8", "note", "cuBLAS is held to workspaces that give the same result "
                                                             "each time, and are slower."),
        "PYTHONMALLOC": ("debug|malloc_debug|pymalloc_debug", "warning", "Python checks every allocation."),
        "PYTHONTRACEMALLOC": ("*", "warning", "Python keeps the stack of every allocation."),
        "PYTHONDEVMODE": ("*", "warning", "Python's development mode checks every allocation and more."),
        "PYTHONASYNCIODEBUG": ("*", "note", "asyncio measures every callback."),
        "ASAN_OPTIONS": ("*", "note", "A build with the address sanitiser runs half as fast."),
    },
    "compiler-variables": {  # Variables that switch torch.compile off, or make it work again and again
        "TORCH_COMPILE_DISABLE": ("on", "warning", "torch.compile does nothing: the model runs eagerly."),
        "TORCHDYNAMO_DISABLE": ("on", "warning", "torch.compile does nothing: the model runs eagerly."),
        "TORCHDYNAMO_SUPPRESS_ERRORS": ("on", "warning", "A part that does not compile runs eagerly without a word."),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": ("on", "warning", "Every process compiles everything again."),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": ("0", "warning", "Every process compiles its graphs again."),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": ("0", "warning", "Every process traces its backward graphs again."),
        "TRITON_ALWAYS_COMPILE": ("on", "warning", "Triton compiles every kernel again in every process."),
        "TRITON_INTERPRET": ("on", "warning", "Triton's kernels run as Python, thousands of times slower."),
        "TRITON_DEBUG": ("on", "warning", "Triton's kernels check their assertions."),
        "TORCH_COMPILE_DEBUG": ("on", "warning", "The compiler writes every stage of every graph to disk."),
        "TORCH_LOGS": ("*", "note", "The compiler logs as it works."),
        "TORCH_TRACE": ("*", "note", "The compiler writes a trace of its work to disk."),
        "TORCHINDUCTOR_MAX_AUTOTUNE": ("on", "note", "Every compilation tries many kernels, and takes minutes."),
        "TORCHINDUCTOR_EMULATE_PRECISION_CASTS": ("on", "warning", "Compiled code rounds after every operation."),
    },
    "restricted-instructions": {  # Variables that take instructions away from libraries
        "ATEN_CPU_CAPABILITY": ("default|avx2", "warning", "torch's own kernels do without AVX-512, or any vectors."),
        "ONEDNN_MAX_CPU_ISA": ("*", "warning", "oneDNN does without the newest instructions."),
        "DNNL_MAX_CPU_ISA": ("*", "warning", "oneDNN does without the newest instructions."),
        "MKL_ENABLE_INSTRUCTIONS": ("*", "warning", "MKL does without the newest instructions."),
    },
    "forced-tf32": {  # Variables that decide about TF32 behind the program's back
        "NVIDIA_TF32_OVERRIDE": ("0|1", "warning", "It stands above what the program says: TF32 is off or on "
                                                   "everywhere."),
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": ("*", "warning", "It stands above what the program says of TF32."),
    },
    "paths-switched-off": {  # Ways between GPUs that a variable forbids
        "NCCL_P2P_DISABLE": ("on", "warning", "GPUs do not talk over NVLink or PCIe, but through the host's memory."),
        "NCCL_SHM_DISABLE": ("on", "warning", "Processes of one machine talk over the network."),
        "NCCL_NET_GDR_DISABLE": ("on", "warning", "The network card does not read the GPU's memory, but the host's."),
        "NCCL_P2P_LEVEL": ("loc|0", "warning", "GPUs do not talk over NVLink or PCIe, but through the host's memory."),
        "NCCL_ALGO": ("*", "note", "NCCL cannot choose by the size of a message."),
        "NCCL_PROTO": ("*", "note", "NCCL cannot choose by the size of a message."),
        "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "note", "Kernels and copies of all streams wait in one queue: meant for "
                                                    "tensor parallelism before Blackwell, a loss elsewhere."),
    },
    "cuda-caches": {  # Variables of CUDA that make every start slower
        "CUDA_CACHE_DISABLE": ("on", "warning", "Kernels that are shipped as PTX are compiled again in every process."),
        "CUDA_MODULE_LOADING": ("eager", "warning", "Every process loads all kernels of all libraries when it starts."),
        "CUDA_FORCE_PTX_JIT": ("on", "warning", "The machine code that was shipped is not used, PTX is compiled "
                                                "instead."),
    },
}  # fmt: skip
"""By check and variable: values with bars between them (``on``: all that mean yes, ``*``: any), level, and why."""
_SWITCHES = {
    "anomaly": ("Anomaly detection is on.", "Every operation of the backward pass is checked for NaN, and its forward "
                "stack kept.", "torch.autograd.set_detect_anomaly(False)"),
    "deterministic": ("Deterministic algorithms are on.", "Faster kernels that add in any order are not used, and new "
                      "memory is filled.", "torch.use_deterministic_algorithms(False)"),
    "sync-debug": ("The CUDA sync debug mode is on.", "Every synchronisation warns or raises.",
                   "torch.cuda.set_sync_debug_mode('default')"),
    "memory-history": ("The history of CUDA memory is recorded.", "Every allocation keeps its stack, without an end "
                       "where no max_entries was given.", "torch.cuda.memory._record_memory_history(enabled=None)"),
    "python-trace": ("A trace or profile function of Python is set (a debugger, coverage, a profiler).", "It is called "
                     "for every line or call.", "sys.settrace(None); sys.setprofile(None)"),
    "tracemalloc": ("tracemalloc is on.", "Python keeps the stack of every allocation.", "tracemalloc.stop()"),
    "suppress-errors": ("torch._dynamo.config.suppress_errors is on.", "A part that does not compile runs eagerly "
                        "without a word.", "torch._dynamo.config.suppress_errors = False"),
}  # fmt: skip


def _set(rows: Mapping[str, tuple[str, Level, str]], here: Environment) -> Iterator[Finding]:
    """A finding for each variable that has a value which its row names."""
    for name, (values, level, why) in rows.items():
        value = here.variables.get(name, "").strip()
        if not value or (name.startswith("HIP_") and here.torch_built_for() != "rocm"):  # others do not read it
            continue
        words = values.lower().split("|")
        if "*" in words or value.lower() in words or ("on" in words and here.is_on(name)):
            yield Finding("", level, f"{name}={value[:60]} is set.", why, f"unset {name}")


CHECKS.update({name: Check(name, functools.partial(_set, rows), is_quick=True) for name, rows in _TABLES.items()})


@check()
def debug_switches(here: Environment) -> Iterator[Finding]:
    """What the program itself has switched on."""
    for name, (seen, why, mend) in _SWITCHES.items():
        if name in here.program.switches:
            yield warning(seen, why, mend)
