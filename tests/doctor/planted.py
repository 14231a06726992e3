# ruff: noqa: E501  (a case is a line or two)
"""Made-up machines: two healthy ones, and each with one fault. bench/doctor_cases.py runs the same list."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

from fettle.doctor import Environment, Files, Finding, Gpu, Loader, Model, Package, Program, shipped_advisories

SITE = "/venv/lib/python3.12/site-packages"
GIB = 1 << 30


class Planted(Files):
    """Files that are not on the disk."""

    def __init__(self, texts: Mapping[str, str], free: Mapping[str, int] | None = None, denied: str = "-",
                 programs: tuple[str, ...] = ("g++", "gcc")) -> None:  # fmt: skip
        self.texts, self.free, self.denied, self.programs = dict(texts), dict(free or {}), denied, programs

    def text(self, path: str) -> str:
        return self.texts.get(path, "")

    def sha256(self, path: str) -> str:
        return hashlib.sha256(self.texts[path].encode()).hexdigest() if path in self.texts else ""

    def size(self, path: str) -> int:
        return len(self.texts[path].encode()) if path in self.texts else -1

    def exists(self, path: str) -> bool:
        return any(name == path or name.startswith(path + "/") for name in self.texts)

    def matching(self, pattern: str) -> list[str]:
        return sorted(name for name in self.texts if fnmatch.fnmatchcase(name, pattern))

    def free_bytes(self, path: str) -> int:
        return self.free.get(path, 100 * GIB)

    def can_write(self, path: str) -> bool:
        return not path.startswith(self.denied)

    def program(self, name: str) -> str:
        return f"/usr/bin/{name}" if name in self.programs else ""

    def also(self, texts: Mapping[str, str]) -> Planted:
        return Planted({**self.texts, **texts}, self.free, self.denied, self.programs)


def package(name: str, version: str, *requires: str, **more: Any) -> Package:
    info = f"{SITE}/{name.replace('-', '_')}-{version}.dist-info"
    return Package(name, version, **{"folder": SITE, "info": info, "requires": requires, **more})


def record(name: str, content: str, size: int | None = None, other: str = "") -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256((other or content).encode()).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content) if size is None else size}\n"


TORCH = package("torch", "2.13.0+cu130", "filelock", "triton==3.6.0; platform_system == 'Linux'",
                "nvidia-cudnn-cu13==9.20.0.48; platform_system == 'Linux'", "nvidia-nccl-cu13==2.29.7",
                "opt-einsum>=3.3; extra == 'opt-einsum'", requires_python=">=3.10")  # fmt: skip
VISION = package("torchvision", "0.28.0+cu130", "torch==2.13.0", "numpy", requires_python=">=3.10")
OTHERS = (
    package("triton", "3.6.0"), package("nvidia-cudnn-cu13", "9.20.0.48"), package("nvidia-nccl-cu13", "2.29.7"),
    package("filelock", "3.20"), package("numpy", "2.4.6"), package("setuptools", "84.0"),
)  # fmt: skip
SHIM = "import os; var = 'SETUPTOOLS_USE_DISTUTILS'; __import__('_distutils_hack').add_shim();"
H100 = Gpu("NVIDIA H100", (9, 0), 600 << 20, 80 * GIB)
VERSION_PY = "__version__ = '2.13.0+{0}'\ncuda: Optional[str] = {1}\nhip: Optional[str] = {2}\n"
FILES = Planted({
    f"{SITE}/torch/version.py": VERSION_PY.format("cu130", "'13.0'", "None"),
    f"{SITE}/distutils-precedence.pth": SHIM,
    f"{SITE}/setuptools-84.0.dist-info/RECORD": record("distutils-precedence.pth", SHIM),
    f"{SITE}/_virtualenv.pth": "import _virtualenv",
    f"{SITE}/numpy-2.4.6.dist-info/RECORD": record("numpy/__init__.py", "one = 1\n")
    + "numpy/__pycache__/__init__.pyc,,\nnumpy-2.4.6.dist-info/RECORD,,\n",
    f"{SITE}/numpy/__init__.py": "one = 1\n",
    "/dev/shm/.keep": "",
    "/etc/pip.conf": "[global]\nindex-url = https://pypi.org/simple\nextra-index-url =\n    file:///srv/wheels\n",
    "/proc/self/mounts": "/dev/sda / ext4 rw,relatime 0 0\nnas:/data /data nfs4 rw 0 0\ntmpfs /ram tmpfs rw 0 0\n"
    "/dev/sdb /safe ext4 rw,noexec 0 0\n",
    "/proc/self/maps": "7f00-7f01 r-xp 0 08:01 1 /venv/lib/libgomp-a34b.so.1\n7f02-7f03 r-xp 0 08:01 1 /lib/libc.so.6\n",
    "/proc/cpuinfo": "flags : fpu avx2 avx512f avx512_bf16 amx_bf16\n",
    "/proc/meminfo": "MemTotal:       131072000 kB\nMemFree:        1000 kB\nMemAvailable:   99000000 kB\n",
    "/proc/pressure/cpu": "some avg10=1.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0 avg300=0 total=0\n",
    "/proc/loadavg": "3.10 1.00 1.00 2/300 4\n",
    "/proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "/sys/devices/system/node/node0/cpulist": "0-15\n",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "intel_pstate\n",
    "/sys/devices/system/cpu/intel_pstate/no_turbo": "0\n",
    "/sys/class/net/eth0": "", "/sys/class/net/lo": "",
    "/usr/include/python3.12/Python.h": "",
    **{f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n}\n" for n in range(16)},
})  # fmt: skip
HEALTHY = Environment(
    variables={"HOME": "/home/me", "USER": "me", "OMP_NUM_THREADS": "16", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
               "NCCL_DEBUG": "WARN", "PIP_INDEX_URL": "https://pypi.org/simple"},
    files=FILES, packages=(TORCH, VISION, *OTHERS), site_folders=(SITE,), python="3.12.4", headers="/usr/include/python3.12", cpus=16, cores=16,
    open_files=1024, locked_bytes=8 << 20, driver="580.95.05", gpus=(H100, H100),
    kernels=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    advisories=shipped_advisories(), today=date(2026, 6, 1),
    program=Program(
        sharing="file_descriptor", backends=("gloo", "nccl"),
        models=(Model("Net", "cuda", ("bfloat16",)),),
        loaders=(Loader("Pictures", 4, 2, 20 << 20, 2, "fork", folders=("/home/me/pictures",)),),
    ),
)  # fmt: skip
CPU_TORCH = package("torch", "2.13.0+cpu", "filelock", requires_python=">=3.10")
LAPTOP = replace(
    HEALTHY, variables={"HOME": "/home/me"}, packages=(CPU_TORCH, *OTHERS[3:]), gpus=(), driver="", kernels=(), cpus=8,
    cores=8, files=FILES.also({f"{SITE}/torch/version.py": VERSION_PY.format("cpu", "None", "None")}),
    program=Program(models=(Model("Net", "cpu", ("bfloat16",)),)),
)  # fmt: skip
QUOTA = replace(HEALTHY, quota=4.0, variables={"HOME": "/home/me", "OMP_NUM_THREADS": "4"})
ODD = replace(
    HEALTHY, python="3.13.0+", packages=(TORCH, VISION, package("triton", "built here"), *OTHERS[1:]),
    files=FILES.also({f"{SITE}/setuptools-84.0.dist-info/RECORD": record("distutils-precedence.pth", SHIM) + '"' + "x" * (1 << 18)}),
)  # fmt: skip
NO_TORCH = replace(LAPTOP, packages=OTHERS[3:], files=FILES, program=Program())
"""Works, and says so: see `CASES`."""
CLEAN = {"a machine with two GPUs": HEALTHY, "a laptop": LAPTOP, "a container with a quota": QUOTA,
         "a switch that only AMD's runtime knows": replace(HEALTHY, variables={"HIP_LAUNCH_BLOCKING": "1"}),
         "a preloaded OpenMP that takes the other's calls": replace(
             HEALTHY, variables={"LD_PRELOAD": "/b/libiomp5.so"},
             files=FILES.also({"/proc/self/maps": "/a/libgomp.so.1\n/b/libiomp5.so\n", "/b/libiomp5.so": ""}),
         ),
         "versions that are none, and a list of files that is cut": ODD}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One fault, who must say so, and which words must be in it."""

    name: str
    here: Environment
    check: str
    level: str
    words: tuple[str, ...]
    also: tuple[str, ...] = field(default=())
    """Checks that rightly speak too."""

    def fault(self, found: list[Finding]) -> str:
        """What is wrong with what was found; empty where nothing is."""
        own = [finding for finding in found if finding.check == self.check]
        right = [finding for finding in own if finding.level == self.level and all(
            word in f"{finding.seen} {finding.why} {finding.mend}" for word in self.words
        )]  # fmt: skip
        others = sorted({finding.check for finding in found} - {self.check, *self.also})
        if not right:
            return f"not said: {[(item.level, item.seen, item.mend) for item in own]}"
        return f"others spoke: {others}" if others else ""


def variables(base: Environment = HEALTHY, **given: str) -> Environment:
    return replace(base, variables={**base.variables, **given})


def files(texts: Mapping[str, str], base: Environment = HEALTHY) -> Environment:
    assert isinstance(base.files, Planted)
    return replace(base, files=base.files.also(texts))


def packages(*more: Package, base: Environment = HEALTHY, without: str = "") -> Environment:
    names = {one.name for one in more} | {without}
    return replace(base, packages=(*(one for one in base.packages if one.name not in names), *more))


def program(base: Environment = HEALTHY, **changes: Any) -> Environment:
    return replace(base, program=replace(base.program, **changes))


def loader(**changes: Any) -> Environment:
    return program(loaders=(replace(HEALTHY.program.loaders[0], **changes),))


def model(base: Environment = HEALTHY, **changes: Any) -> Environment:
    return program(base, models=(replace(base.program.models[0], **changes),))


def gpu(**changes: Any) -> Environment:
    return replace(HEALTHY, gpus=(replace(H100, **changes),), kernels=changes.pop("kernels", HEALTHY.kernels))


def conf(text: str, name: str = "PYTORCH_ALLOC_CONF") -> Environment:
    return variables(**{name: text})


def cached(folder: str, free: int = 100 * GIB, denied: str = "-", base: Environment = HEALTHY) -> Environment:
    assert isinstance(base.files, Planted)
    held = Planted(base.files.texts, {folder: free}, denied)
    return replace(variables(base, TORCHINDUCTOR_CACHE_DIR=folder), files=held)


def switch(name: str, value: str, check: str, level: str, *words: str, base: Environment = HEALTHY) -> Case:
    return Case(f"{name}={value}", variables(base, **{name: value}), check, level, (name, f"unset {name}", *words))


IN_CONTAINER = files({"/.dockerenv": "", "/proc/self/mounts": "overlay / overlay rw 0 0\n"})
DEBUG, COMPILER = "debug-variables", "compiler-variables"
CASES = [
    # versions
    Case("no torch", NO_TORCH, "no-torch", "error", ("torch is not installed", "pip install torch")),
    Case("triton of another torch", packages(package("triton", "3.4.0")), "requirements", "warning",
         ("needs triton==3.6.0", "triton 3.4.0", "pip install 'triton==3.6.0'")),
    Case("NCCL of another torch", packages(package("nvidia-nccl-cu13", "2.27.5")), "requirements", "warning",
         ("nvidia-nccl-cu13==2.29.7", "2.27.5")),
    Case("cuDNN of another torch", packages(package("nvidia-cudnn-cu13", "9.1.0.70")), "requirements", "warning",
         ("nvidia-cudnn-cu13==9.20.0.48", "9.1.0.70")),
    Case("cuDNN missing", packages(without="nvidia-cudnn-cu13"), "requirements", "error", ("not installed",)),
    Case("torchvision of another torch", packages(package("torchvision", "0.27.0+cu130", "torch==2.12.0")),
         "requirements", "error", ("torchvision 0.27.0", "torch==2.12.0", "operators")),
    Case("torchvision for the CPU", packages(package("torchvision", "0.28.0+cpu", "torch==2.13.0")), "mixed-builds",
         "error", ("cu130", "torchvision for cpu", "whl/cu130")),
    Case("two families of CUDA", packages(package("nvidia-cublas-cu12", "12.6.4.1")), "two-cudas", "warning",
         ("1 for CUDA 12, 2 for CUDA 13", "pip uninstall -y nvidia-cublas-cu12")),
    Case("a CPU build beside a GPU", replace(LAPTOP, gpus=(H100,), driver="580.95.05"), "cpu-build", "warning",
         ("build for cpu", "NVIDIA H100", "whl/cu130")),
    Case("the same with an older driver", replace(LAPTOP, gpus=(H100,), driver="550.54.15"), "cpu-build", "warning",
         ("whl/cu126",)),
    Case("a CUDA build beside an AMD GPU", files({"/dev/kfd": ""}, replace(HEALTHY, gpus=(), driver="")), "cpu-build",
         "warning", ("AMD", "rocm")),
    Case("a driver too old", replace(HEALTHY, driver="550.54.15"), "driver-too-old", "error",
         ("CUDA 13.0", "580.65", "550.54.15", "whl/cu126")),
    Case("the same with NVIDIA's library for that", files({"/usr/local/cuda-13.0/compat/libcuda.so.580.82": ""},
         replace(HEALTHY, driver="550.54.15")), "driver-too-old", "note", ("580.65", "compat/libcuda.so.580.82")),
    Case("a driver that was updated", replace(HEALTHY, gpus=(), driver_fault="Driver/library version mismatch"),
         "driver-does-not-answer", "error", ("mismatch", "reboot")),
    Case("a GPU without kernels", gpu(name="Tesla P100", capability=(6, 0)), "no-kernels", "error",
         ("Tesla P100", "6.0", "whl/cu126"), ("no-bfloat16",)),
    Case("the same, kernels unknown", replace(gpu(name="Tesla V100", capability=(7, 0)), kernels=()), "no-kernels",
         "error", ("7.0",), ("no-bfloat16",)),
    Case("a Python too old", replace(HEALTHY, python="3.9.18"), "python-version", "error", (">=3.10", "3.9.18")),
    Case("torch installed twice", replace(HEALTHY, packages=(*HEALTHY.packages, package("torch", "2.11.0"))),
         "installed-twice", "warning", ("2.13.0+cu130 and 2.11.0",)),
    Case("cuDNN on the loader's path",
         files({"/opt/cuda/lib64/libcudnn.so.8": ""}, variables(LD_LIBRARY_PATH="/usr/lib:/opt/cuda/lib64")),
         "other-cuda-first", "warning", ("libcudnn.so.8", "unset LD_LIBRARY_PATH")),
    Case("all GPUs hidden", variables(CUDA_VISIBLE_DEVICES=""), "hidden-gpus", "warning", ("hides 2 GPUs",)),
    Case("a GPU that is not there", variables(CUDA_VISIBLE_DEVICES="0,7"), "hidden-gpus", "warning", ("device 7",)),
    Case("NumPy 2 beside an old torch", packages(package("torch", "2.2.2"), without="torchvision"), "numpy-two", "error",
         ("NumPy 1", "numpy<2")),
    # allocator
    Case("a key misspelt", conf("max_splt_size_mb:128"), "allocator-settings", "error",
         ("did you mean max_split_size_mb", "export PYTORCH_ALLOC_CONF=max_split_size_mb:128")),
    Case("the same on a CPU build", variables(LAPTOP, PYTORCH_ALLOC_CONF="max_splt_size_mb:128"), "allocator-settings",
         "warning", ("did you mean", "ignored")),
    Case("= in place of a colon", conf("max_split_size_mb=128"), "allocator-settings", "error",
         ("colon", "PYTORCH_ALLOC_CONF=max_split_size_mb:128")),
    Case("true in small letters", conf("expandable_segments:true"), "allocator-settings", "error",
         ("exactly True or False", "expandable_segments:True")),
    Case("a share beyond 1", conf("garbage_collection_threshold:1.5"), "allocator-settings", "error",
         ("between 0 and 1",)),
    Case("a size too small", conf("max_split_size_mb:10,expandable_segments:True"), "allocator-settings", "error",
         ("from 20 on", "max_split_size_mb:128,expandable_segments:True")),
    Case("no power of two", conf("roundup_power2_divisions:[256:1,512:2,>:5]"), "allocator-settings", "error",
         ("power of two",)),
    Case("a backend that is none", conf("backend:async"), "allocator-settings", "error", ("cudaMallocAsync",)),
    Case("too many threads for pinning", conf("pinned_num_register_threads:500"), "allocator-settings", "error",
         ("pinned_num_register_threads",)),
    Case("two variables", variables(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128"), "allocator-set-twice", "warning",
         ("PYTORCH_CUDA_ALLOC_CONF counts", "unset PYTORCH_ALLOC_CONF")),
    Case("settings for AMD's", variables(PYTORCH_HIP_ALLOC_CONF="backend:none"), "allocator-set-twice", "warning",
         ("no build for AMD",)),
    Case("a key twice", conf("max_split_size_mb:64,max_split_size_mb:128"), "allocator-set-twice", "warning",
         ("max_split_size_mb 2 times",)),
    Case("settings that are ignored", conf("backend:cudaMallocAsync,expandable_segments:True"), "allocator-contradicts",
         "warning", ("ignores",)),
    Case("CUDA's own allocator", conf("backend:cudaMallocAsync"), "allocator-contradicts", "note", ("memory_stats",)),
    Case("segments under WSL", files({"/proc/sys/kernel/osrelease": "5.15.1-microsoft-standard-WSL2\n"}),
         "allocator-contradicts", "warning", ("WSL",)),
    Case("segments and an old kernel", files({"/proc/sys/kernel/osrelease": "5.4.0-200\n"}), "allocator-contradicts",
         "warning", ("5.4.0-200", "IPC")),
    Case("segments and IPC forbidden", variables(TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC="0"), "allocator-contradicts",
         "warning", ("forbids",)),
    Case("no caching", variables(PYTORCH_NO_CUDA_MEMORY_CACHING="1"), "no-memory-cache", "warning", ("unset",)),
    # debug switches
    switch("CUDA_LAUNCH_BLOCKING", "1", DEBUG, "warning", "waited for"),
    switch("NCCL_DEBUG", "INFO", DEBUG, "warning"),
    switch("TORCH_DISTRIBUTED_DEBUG", "DETAIL", DEBUG, "warning"),
    switch("TORCH_SHOW_CPP_STACKTRACES", "1", DEBUG, "note"),
    switch("TORCH_NCCL_BLOCKING_WAIT", "1", DEBUG, "warning"),
    switch("ONEDNN_VERBOSE", "1", DEBUG, "warning"),
    switch("MKL_VERBOSE", "1", DEBUG, "warning"),
    switch("CUDNN_LOGLEVEL_DBG", "3", DEBUG, "warning"),
    switch("CUBLAS_WORKSPACE_CONFIG", ":4096:8", DEBUG, "note", "same result"),
    switch("PYTHONMALLOC", "debug", DEBUG, "warning"),
    switch("PYTHONTRACEMALLOC", "10", DEBUG, "warning"),
    switch("PYTHONDEVMODE", "1", DEBUG, "warning"),
    switch("TORCH_COMPILE_DISABLE", "1", COMPILER, "warning", "eagerly"),
    switch("TORCHDYNAMO_DISABLE", "true", COMPILER, "warning", "eagerly"),
    switch("TORCHDYNAMO_SUPPRESS_ERRORS", "1", COMPILER, "warning"),
    switch("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1", COMPILER, "warning"),
    switch("TORCHINDUCTOR_FX_GRAPH_CACHE", "0", COMPILER, "warning"),
    switch("TRITON_INTERPRET", "1", COMPILER, "warning"),
    switch("TRITON_ALWAYS_COMPILE", "1", COMPILER, "warning"),
    switch("TORCH_LOGS", "+dynamo", COMPILER, "note"),
    switch("TORCH_COMPILE_DEBUG", "1", COMPILER, "warning"),
    *[Case(f"{name} in the program", program(switches=(name,)), "debug-switches", "warning", (word,)) for name, word in (
        ("anomaly", "set_detect_anomaly(False)"), ("deterministic", "use_deterministic_algorithms(False)"),
        ("sync-debug", "set_sync_debug_mode"), ("memory-history", "_record_memory_history(enabled=None)"),
        ("python-trace", "settrace(None)"), ("tracemalloc", "tracemalloc.stop()"),
        ("suppress-errors", "suppress_errors = False"),
    )],
    # processor
    Case("more threads than cores", variables(OMP_NUM_THREADS="64"), "threads-beyond-cores", "warning",
         ("OMP_NUM_THREADS=64", "16 cores", "export OMP_NUM_THREADS=16")),
    Case("threads times ranks", variables(LOCAL_WORLD_SIZE="2"), "threads-beyond-cores", "warning",
         ("in each of 2 processes", "OMP_NUM_THREADS=8")),
    Case("a quota that OpenMP does not see", replace(QUOTA, variables={"HOME": "/home/me"}), "threads-beyond-cores",
         "warning", ("grants 4 cores", "16 threads", "OMP_NUM_THREADS=4")),
    Case("fewer cores by affinity", replace(HEALTHY, cores=4), "threads-beyond-cores", "warning", ("4 cores",)),
    Case("one thread on many cores", variables(OMP_NUM_THREADS="1"), "threads-variable", "warning", ("idle",)),
    Case("one thread by torchrun", variables(OMP_NUM_THREADS="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2"),
         "threads-variable", "note", ("torchrun", "OMP_NUM_THREADS=8")),
    Case("no number of threads", variables(MKL_NUM_THREADS="all"), "threads-variable", "warning", ("'all'",)),
    Case("MKL otherwise", variables(MKL_NUM_THREADS="2"), "threads-variable", "note", ("unset MKL_NUM_THREADS",)),
    Case("two threads a core", files({f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n // 2}\n"
                                      for n in range(16)}), "sibling-threads", "note", ("8 physical cores",)),
    Case("two NUMA nodes", files({"/sys/devices/system/node/node1/cpulist": "8-15\n"}), "several-nodes", "note",
         ("numactl",)),
    Case("the lowest clock", files({"/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq\n"}),
         "slow-clock", "warning", ("powersave", "cpupower")),
    Case("no turbo", files({"/sys/devices/system/cpu/intel_pstate/no_turbo": "1\n"}), "slow-clock", "note", ("turbo",)),
    Case("duplicate OpenMP hidden", variables(KMP_DUPLICATE_LIB_OK="TRUE"), "two-openmps", "warning", ("unset KMP",)),
    Case("duplicate OpenMP", files({"/proc/self/maps": "/a/libgomp.so.1\n/b/libiomp5.so\n"}), "two-openmps", "warning",
         ("libgomp and libiomp5",)),
    Case("a preload that is missing", variables(LD_PRELOAD="/usr/lib/libtcmalloc.so.4"), "preloaded", "warning",
         ("does not exist",)),
    Case("two allocators", files({"/l/libjemalloc.so.2": "", "/l/libtcmalloc.so.4": ""}, variables(
        LD_PRELOAD="/l/libjemalloc.so.2:/l/libtcmalloc.so.4")), "preloaded", "warning", ("jemalloc, tcmalloc",)),
    Case("MALLOC_CONF without jemalloc", variables(MALLOC_CONF="narenas:1"), "malloc-settings", "warning",
         ("not preloaded",)),
    Case("MALLOC_CONF misspelt", variables(MALLOC_CONF="dirty_decay:-1", LD_PRELOAD="libjemalloc.so.2"),
         "malloc-settings", "warning", ("'dirty_decay:-1'",)),
    Case("an allocator left idle", replace(LAPTOP, allocators={"tcmalloc": "/lib/libtcmalloc.so.4"}), "idle-allocator",
         "note", ("export LD_PRELOAD=/lib/libtcmalloc.so.4",)),
    Case("no huge pages", files({"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"}),
         "huge-pages", "note", ("never given",)),
    Case("huge pages asked for in vain", files({"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
         variables(THP_MEM_ALLOC_ENABLE="1")), "huge-pages", "warning", ("THP_MEM_ALLOC_ENABLE",)),
    switch("ATEN_CPU_CAPABILITY", "default", "restricted-instructions", "warning"),
    switch("ONEDNN_MAX_CPU_ISA", "AVX2", "restricted-instructions", "warning"),
    Case("bfloat16 without instructions", files({"/proc/cpuinfo": "flags : fpu avx2\n"}, LAPTOP), "slow-type", "warning",
         ("bfloat16", "model.float()")),
    Case("float16 without instructions", model(LAPTOP, dtypes=("float16",)), "slow-type", "warning", ("float16",)),
    Case("denormal weights", model(LAPTOP, tiny=0.02), "denormals", "warning", ("2.00%", "set_flush_denormal(True)")),
    Case("a busy neighbour", files({"/proc/pressure/cpu": "some avg10=47.00 avg60=0.00\n"}), "busy-neighbour", "warning",
         ("47%",)),
    Case("a busy neighbour, by load", files({"/proc/pressure/cpu": "", "/proc/loadavg": "23.4 1 1 9/300 4\n"}),
         "busy-neighbour", "warning", ("23.4 tasks", "16 cores")),
    Case("a busy GPU", gpu(busy=0.9), "busy-neighbour", "warning", ("90% busy", "nvidia-smi")),
    Case("a hot GPU", gpu(slowed_by="heat"), "busy-neighbour", "warning", ("heat",)),
    Case("memory used up", files({"/proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 9000 kB\n"}), "memory-short",
         "warning", ("1% of memory",)),
    Case("a GPU's memory taken", gpu(used_bytes=79 * GIB), "memory-short", "warning", ("99% of the memory",)),
    Case("a core that is not there", variables(GOMP_CPU_AFFINITY="0-31"), "small-affinity", "error", ("core 31",)),
    Case("all threads on one core", variables(GOMP_CPU_AFFINITY="0"), "small-affinity", "warning", ("one core",)),
    # precision
    switch("NVIDIA_TF32_OVERRIDE", "0", "forced-tf32", "warning"),
    switch("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", "forced-tf32", "warning"),
    Case("TF32 by two names", program(tf32_mixed=True), "mixed-tf32", "error", ("allow_tf32", "fp32_precision")),
    Case("bfloat16 on Turing", gpu(name="Tesla T4", capability=(7, 5)), "no-bfloat16", "warning", ("Tesla T4", "half()")),
    Case("a side of 50257", model(odd=("lm_head (768 x 50257)",)), "odd-sides", "warning", ("lm_head (768 x 50257)",)),
    Case("float64 by default", program(switches=("float64",)), "double", "warning", ("set_default_dtype",)),
    Case("float64 in weights", model(dtypes=("float64",)), "double", "warning", ("model.float()",)),
    Case("two 16-bit types", model(dtypes=("bfloat16", "float16")), "double", "note", ("float16 and in bfloat16",)),
    # input
    Case("/dev/shm as Docker makes it", replace(HEALTHY, program=Program(), files=Planted(FILES.texts, {"/dev/shm": 64 << 20})),
         "small-shared-memory", "warning", ("64.0 MiB", "--shm-size")),
    Case("batches beyond /dev/shm", replace(HEALTHY, files=Planted(FILES.texts, {"/dev/shm": 100 << 20})),
         "small-shared-memory", "error", ("160 MiB", "4 workers x 2 batches x 20.0 MiB", "Bus error")),
    Case("few open files", replace(HEALTHY, open_files=256), "few-open-files", "warning", ("256 files", "ulimit -n")),
    Case("many tensors on their way", loader(tensors=200), "few-open-files", "warning", ("1600 tensors",)),
    Case("data over NFS", loader(folders=("/data/pictures",)), "remote-data", "warning", ("/data/pictures (nfs4)",)),
    Case("a cache over NFS", variables(HF_HOME="/data/hf"), "remote-data", "warning", ("HF_HOME", "nfs4")),
    Case("more workers than cores", loader(workers=32), "crowded-workers", "warning", ("32 workers", "16 cores")),
    Case("workers times ranks", variables(loader(workers=12), LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="8"),
         "crowded-workers", "warning", ("in each of 2 ranks",)),
    Case("fork after CUDA", program(used_cuda=True), "fork-after-cuda", "note", ("forkserver",)),
    Case("a large list", loader(lists=(("paths", 2_000_000),)), "large-lists", "warning",
         ("Pictures.paths holds 2,000,000", "numpy.array")),
    Case("shared by names", program(sharing="file_system"), "shared-by-files", "note", ("file_descriptor",)),
    # distributed
    switch("NCCL_P2P_DISABLE", "1", "paths-switched-off", "warning", "NVLink"),
    switch("NCCL_SHM_DISABLE", "1", "paths-switched-off", "warning"),
    switch("NCCL_ALGO", "Ring", "paths-switched-off", "note"),
    Case("InfiniBand switched off", files({"/sys/class/infiniband/mlx5_0": ""}, replace(variables(NCCL_IB_DISABLE="1"),
         locked_bytes=float("inf"))), "no-infiniband", "warning", ("mlx5_0", "unset NCCL_IB_DISABLE")),
    Case("InfiniBand without locked memory", files({"/sys/class/infiniband/mlx5_0": ""}), "no-infiniband", "warning",
         ("8192 KiB", "ulimit -l")),
    Case("an interface that is not there", variables(NCCL_SOCKET_IFNAME="ib0"), "interfaces", "error", ("ib0", "eth0")),
    Case("loopback between machines", variables(NCCL_SOCKET_IFNAME="lo", RANK="0", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2",
         OMP_NUM_THREADS="8"), "interfaces", "error", ("several machines",)),
    Case("half a rendezvous", variables(RANK="0"), "half-a-rendezvous", "error", ("WORLD_SIZE", "torchrun")),
    Case("a rank too high", variables(RANK="4", WORLD_SIZE="4"), "half-a-rendezvous", "error", ("RANK=4", "RANK=3")),
    Case("more ranks than GPUs", variables(LOCAL_WORLD_SIZE="4", OMP_NUM_THREADS="4"), "more-ranks-than-gpus", "error",
         ("2 GPUs", "Duplicate GPU")),
    Case("no NCCL", program(backends=("gloo",)), "no-backend", "warning", ("no NCCL",)),
    Case("an old name", variables(NCCL_BLOCKING_WAIT="1"), "renamed-variables", "note", ("TORCH_NCCL_BLOCKING_WAIT=1",)),
    # caches
    Case("a cache that cannot be written", cached("/root/cache", denied="/root"), "compile-caches", "warning",
         ("/root/cache", "cannot be written", "export TORCHINDUCTOR_CACHE_DIR=")),
    Case("a cache without execution", cached("/safe/cache"), "compile-caches", "error", ("noexec",)),
    Case("a cache over NFS", cached("/data/cache"), "compile-caches", "warning", ("network", "nfs4")),
    Case("a cache on a full disk", cached("/home/me/cache", free=5 << 20), "compile-caches", "warning", ("5.00 MiB",)),
    Case("a cache in memory", cached("/ram/cache"), "compile-caches", "note", ("tmpfs",)),
    Case("a cache inside a container", IN_CONTAINER, "compile-caches", "warning", ("docker run -v", "torchinductor_me")),
    Case("no bytecode, and none is kept", variables(PYTHONDONTWRITEBYTECODE="1"), "no-bytecode", "warning",
         ("PYTHONDONTWRITEBYTECODE", "compileall")),
    Case("no bytecode, in a folder of another user", replace(HEALTHY, files=Planted(FILES.texts, denied=SITE)), "no-bytecode",
         "warning", ("cannot be written",)),
    switch("CUDA_CACHE_DISABLE", "1", "cuda-caches", "warning"),
    switch("CUDA_MODULE_LOADING", "EAGER", "cuda-caches", "warning"),
    Case("no compiler", replace(HEALTHY, files=Planted(FILES.texts, programs=())), "no-compiler", "warning",
         ("apt-get install g++", "Triton")),
    Case("a compiler that is not there", variables(CXX="g++-99"), "no-compiler", "error", ("CXX=g++-99",)),
    Case("no headers of Python", replace(HEALTHY, headers="/usr/include/python3.13"), "no-python-headers", "warning",
         ("Python.h", "python3-dev")),
    Case("one thread to compile", variables(TORCHINDUCTOR_COMPILE_THREADS="1"), "few-compile-threads", "note", ("16",)),
    # supply chain
    Case("torchtriton of December 2022", packages(package("torchtriton", "3.0.0")), "compromised-release", "error",
         ("torchtriton 3.0.0", "2022-12-25", "rebuild"), ("ended-packages",)),
    *[Case(f"{name} {version}", packages(package(name, version)), "compromised-release", "error", (version, "replace every"))
      for name, versions in (("lightning", ("2.6.2", "2.6.3")), ("litellm", ("1.82.7", "1.82.8")), ("mistralai", ("2.4.6",)),
                             ("ultralytics", ("8.3.41", "8.3.42", "8.3.45", "8.3.46"))) for version in versions],
    Case("pytorch-lightning 2.6.3", packages(package("pytorch-lightning", "2.6.3")), "compromised-release", "warning",
         ("may be compromised",)),
    Case("litellm's file, after it is gone", files({f"{SITE}/litellm_init.pth": "import os; exec('...')"}),
         "compromise-marker", "error", ("litellm_init.pth", "1.82.8"), ("unowned-pth",)),
    Case("lightning's file", files({f"{SITE}/lightning/_runtime/router_runtime.js": "x"}), "compromise-marker", "error",
         ("router_runtime.js", "2.6.2, 2.6.3")),
    Case("ultralytics' miner", files({"/tmp/ultralytics_runner": "x"}), "compromise-marker", "error",
         ("/tmp/ultralytics_runner",)),
    Case("a .pth of nobody", files({f"{SITE}/helper.pth": "import os;exec(os.environ['X'])\x1b[2J"}), "unowned-pth",
         "warning", ("helper.pth", "belongs to no installed package")),
    Case("a .pth in a folder that reads as a pattern", replace(
        HEALTHY, site_folders=("/venv[1]/site",), files=FILES.also({"/venv[1]/site/helper.pth": "import socket"}),
    ), "unowned-pth", "warning", ("/venv[1]/site/helper.pth",)),
    Case("a known name, another content", files({f"{SITE}/_virtualenv.pth": "import _virtualenv, socket"}), "unowned-pth",
         "warning", ("_virtualenv.pth",)),
    Case("a module edited", files({f"{SITE}/numpy/__init__.py": "two = 2\n"}), "changed-files", "warning",
         ("1 file of numpy 2.4.6 differ", "numpy/__init__.py", "--force-reinstall")),
    Case("a library of another size", files({
        f"{SITE}/triton-3.6.0.dist-info/RECORD": record("triton/libtriton.so", "abc", 99), f"{SITE}/triton/libtriton.so": "abc",
    }), "changed-files", "warning", ("libtriton.so",)),
    Case("a file missing", files({
        f"{SITE}/triton-3.6.0.dist-info/RECORD": record("triton/a.py", "a") + record("triton/b.py", "b"),
        f"{SITE}/triton/a.py": "a",
    }), "changed-files", "warning", ("missing", "triton/b.py")),
    Case("an extra index by variable", variables(PIP_EXTRA_INDEX_URL="https://me:secret@download.pytorch.org/whl/cu130"),
         "shadowing-index", "warning", ("PIP_EXTRA_INDEX_URL", "***@download.pytorch.org", "unset PIP_EXTRA_INDEX_URL")),
    Case("a password that holds an at sign", variables(PIP_EXTRA_INDEX_URL="https://me:p@ss@packages.example.com/whl"),
         "shadowing-index", "warning", ("//***@packages.example.com",)),
    Case("an extra index by file", files({"/home/me/.config/pip/pip.conf": "[install]\nextra-index-url =\n"
         "    https://packages.example.com/simple\n"}), "shadowing-index", "warning", ("pip.conf", "example.com")),
    Case("an index without TLS", variables(PIP_INDEX_URL="http://packages.example.com/simple"), "shadowing-index",
         "warning", ("without TLS",)),
    Case("a host that is trusted", variables(PIP_TRUSTED_HOST="packages.example.com"), "shadowing-index", "warning",
         ("does not check",)),
    Case("uv takes the best of all", variables(UV_INDEX_STRATEGY="unsafe-best-match"), "shadowing-index", "warning",
         ("unset UV_INDEX_STRATEGY",)),
    Case("an old list", replace(HEALTHY, today=date(2028, 1, 1)), "old-advisories", "note", ("2026-05-12", "599 days")),
    # what has ended
    Case("IPEX", packages(package("intel-extension-for-pytorch", "2.8.0")), "ended-packages", "warning",
         ("pip uninstall -y intel-extension-for-pytorch",)),
    Case("torchtriton's name", packages(package("torchtriton", "0.0.1")), "ended-packages", "warning", ("pip install triton",)),
    Case("TorchServe", packages(package("torchserve", "0.12.0")), "ended-packages", "warning", ("security fixes",)),
    Case("TorchScript", model(deprecated=("ScriptModule",)), "ended-classes", "warning", ("TorchScript", "torch.export")),
    Case("FSDP1", model(deprecated=("FullyShardedDataParallel",)), "ended-classes", "warning", ("FSDP1", "fully_shard")),
    Case("a cache by its old name", variables(TRANSFORMERS_CACHE="/home/me/hf"), "ended-variables", "note", ("HF_HOME",)),
]  # fmt: skip
