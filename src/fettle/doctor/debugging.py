"""Switches for debugging that were left on."""

from __future__ import annotations

from collections.abc import Iterator

from fettle.doctor._check import Finding, Level, check, settings, warning
from fettle.doctor.environment import Environment

_SLOW: dict[str, tuple[str, Level, str]] = {
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
    "CUBLAS_WORKSPACE_CONFIG": (":16:8|:4096:8", "note", "cuBLAS is held to workspaces that give the same result each "
                                                         "time, and are slower."),
    "PYTHONMALLOC": ("debug|malloc_debug|pymalloc_debug", "warning", "Python checks every allocation."),
    "PYTHONTRACEMALLOC": ("*", "warning", "Python keeps the stack of every allocation."),
    "PYTHONDEVMODE": ("*", "warning", "Python's development mode checks every allocation and more."),
    "PYTHONASYNCIODEBUG": ("*", "note", "asyncio measures every callback."),
    "ASAN_OPTIONS": ("*", "note", "A build with the address sanitiser runs half as fast."),
}  # fmt: skip
_COMPILER: dict[str, tuple[str, Level, str]] = {
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
}
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


@check(quick=True)
def debug_variables(here: Environment) -> Iterator[Finding]:
    """Variables that make every call slower."""
    return settings(here, _SLOW)


@check(quick=True)
def compiler_variables(here: Environment) -> Iterator[Finding]:
    """Variables that switch torch.compile off, or make it work again and again."""
    return settings(here, _COMPILER)


@check()
def debug_switches(here: Environment) -> Iterator[Finding]:
    """What the program itself has switched on."""
    for name, (seen, why, mend) in _SWITCHES.items():
        if name in here.program.switches:
            yield warning(seen, why, mend)
