"""What the checks look at: plain facts, which a test makes up and `this_environment` reads from the machine."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import math
import os
import platform
import re
import shutil
import site
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from importlib import metadata

from fettle.doctor.advisories import Advisories, Advisory, shipped_advisories
from fettle.doctor.program import Program
from fettle.procs.limits import affinity_cores, quota_cores

_MOST_BYTES = 64 << 20
"""The largest file that is read or hashed: the list of torch's files has 2 MB, the largest module of Python a few."""


class Files:
    """The files of this machine, as far as checks look at them. Nothing raises: what cannot be read is not there."""

    def text(self, path: str) -> str:
        """What a file holds; empty where it cannot be read."""
        return self._content(path).decode("utf-8", "replace")

    def sha256(self, path: str) -> str:
        """Hash of a regular file, in hexadecimal; empty where it cannot be read."""
        content = self._content(path)
        return hashlib.sha256(content).hexdigest() if content or self.size(path) == 0 else ""

    def size(self, path: str) -> int:
        """Size of a regular file in bytes; -1 where there is none."""
        try:
            about = os.stat(path)
        except (OSError, ValueError):
            return -1
        return about.st_size if stat.S_ISREG(about.st_mode) else -1

    def exists(self, path: str) -> bool:
        """Whether a file, folder or device is there."""
        return os.path.exists(path)

    def matching(self, pattern: str) -> list[str]:
        """Paths that a shell pattern names, in order."""
        return sorted(glob.glob(pattern))

    def free_bytes(self, path: str) -> int:
        """What may still be written where a path is, or will be; -1 where that is not known."""
        try:
            return shutil.disk_usage(self._nearest(path)).free
        except OSError:
            return -1

    def can_write(self, path: str) -> bool:
        """Whether a folder can be written to, or made."""
        return os.access(self._nearest(path), os.W_OK | os.X_OK)

    def program(self, name: str) -> str:
        """Path of a program; empty where it is not found."""
        return shutil.which(name) or ""

    def _nearest(self, path: str) -> str:
        """The path, or the innermost folder above it that is there."""
        path = os.path.abspath(path)
        while not os.path.exists(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path)
        return path

    def _content(self, path: str) -> bytes:
        try:  # a pipe would wait for a writer
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return b""
                content = file.read(_MOST_BYTES + 1)
        except (OSError, ValueError):
            return b""
        return content if len(content) <= _MOST_BYTES else b""


@dataclass(frozen=True)
class Package:
    """An installed distribution, of which nothing was imported."""

    name: str
    """Normalised: small letters, one hyphen for what parts its words."""
    version: str
    folder: str = "/site"
    """Where its modules lie."""
    info: str = ""
    """Its folder of metadata."""
    requires: tuple[str, ...] = ()
    requires_python: str = ""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA device, as its driver reports it."""

    name: str
    capability: tuple[int, int] = (0, 0)
    used_bytes: int = 0
    total_bytes: int = 0
    busy: float = 0.0
    """Share of the last moments in which a kernel ran."""
    slowed_by: str = ""
    """What holds its clock down: heat or power."""


@dataclass(frozen=True)
class Environment:
    """Everything that checks may look at. What is not known has the value of its default, which counts as healthy."""

    variables: Mapping[str, str] = field(default_factory=dict)
    files: Files = field(default_factory=Files)
    packages: tuple[Package, ...] = ()
    """In the order of `sys.path`: of two with one name the first counts."""
    site_folders: tuple[str, ...] = ()
    """Folders whose ``.pth`` files Python runs when it starts."""
    python: str = ""
    headers: str = ""
    """Where Python's own C headers belong."""
    cpus: int = 1
    """Logical cores of the machine."""
    cores: int = 1
    """Cores that this process may run on."""
    quota: float = math.inf
    """Cores whose time the control groups grant."""
    open_files: float = math.inf
    """Files that a process may have open."""
    locked_bytes: float = math.inf
    """Memory that a process may lock."""
    allocators: Mapping[str, str] = field(default_factory=dict)
    """Allocators that can be preloaded, and where they lie."""
    driver: str = ""
    """Version of NVIDIA's driver."""
    driver_fault: str = ""
    """Why the driver's library does not answer though the driver is loaded."""
    gpus: tuple[Gpu, ...] = ()
    kernels: tuple[str, ...] = ()
    """What torch has kernels for, such as ``sm_90``; empty where it was not asked."""
    program: Program = field(default_factory=Program)
    """What the user's own program has set and built."""
    advisories: Advisories = field(default_factory=Advisories)
    today: date = date.min

    def package(self, name: str) -> Package | None:
        """The distribution that an import would find."""
        return next((package for package in self.packages if package.name == name), None)

    def compromised(self) -> Iterator[tuple[Advisory, Package]]:
        """Installed releases that the advisories name."""
        by_name: dict[str, list[Advisory]] = {}
        for advisory in self.advisories.advisory:
            by_name.setdefault(advisory.package, []).append(advisory)
        for package in self.packages:
            for advisory in by_name.get(package.name, ()):
                if package.version.partition("+")[0] in advisory.versions:
                    yield advisory, package

    def is_on(self, name: str) -> bool:
        """Whether a variable is set to what libraries take for yes."""
        return self.variables.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on")

    def number(self, name: str) -> int | None:
        """A variable's whole number; of a list (``4,2``) the first; None where it is not set, or not a number."""
        text = self.variables.get(name, "").split(",")[0].strip()
        return int(text) if text.isdecimal() and len(text) < 10 else None

    @property
    def granted(self) -> int:
        """Cores that threads can really use."""
        return max(1, min(self.cores, math.ceil(self.quota) if math.isfinite(self.quota) else self.cores))

    @property
    def torch(self) -> Package | None:
        return self.package("torch")

    def torch_built_for(self) -> str:
        """``13.0`` for CUDA, ``rocm`` for AMD, ``cpu``; empty where torch's ``version.py`` does not say."""
        if self.torch is None:
            return ""
        text = self.files.text(f"{self.torch.folder}/torch/version.py")
        values = dict(re.findall(r"^(\w+)\s*(?::[^=\n]*)?=\s*['\"]?([^'\"\s]*)", text, re.MULTILINE))
        if values.get("hip", "None") != "None":
            return "rocm"
        version = values.get("cuda", "")
        return "cpu" if version == "None" else version

    def mount(self, path: str) -> tuple[str, str]:
        """File system and options of the mount that holds a path: ``("ext4", "rw,noexec")``."""
        best, mounted, path = -1, ("", ""), os.path.realpath(path)
        for line in self.files.text("/proc/self/mounts").splitlines():
            words = line.split()
            if len(words) < 4:
                continue
            place = words[1].replace("\\040", " ")
            if (path == place or path.startswith(place.rstrip("/") + "/")) and len(place) >= best:
                best, mounted = len(place), (words[2], words[3])
        return mounted

    @property
    def in_container(self) -> bool:
        """Whether what is not on a volume is gone with the container."""
        return any(self.files.exists(path) for path in ("/.dockerenv", "/run/.containerenv"))


def this_environment(
    advisories: Advisories | None = None, program: Program | None = None, *, quick: bool = False
) -> Environment:
    """The facts of this machine and process: the one place that reads them. `quick` leaves out packages, devices and
    what needs another process."""
    environment = Environment(
        variables=dict(os.environ), python=platform.python_version(), cpus=os.cpu_count() or 1, cores=affinity_cores(),
        quota=quota_cores(), open_files=_limit("RLIMIT_NOFILE"), locked_bytes=_limit("RLIMIT_MEMLOCK"),
        program=program or Program(), today=date.today(),
    )  # fmt: skip
    if quick:
        return environment
    from fettle.machine import find_libraries

    driver, fault, gpus = _nvidia(environment.files)
    environment = replace(
        environment, packages=_packages(), site_folders=_site_folders(), advisories=advisories or shipped_advisories(),
        driver=driver, driver_fault=fault, gpus=gpus, headers=sysconfig.get_path("include") or "",
        allocators={name: path for name, path in find_libraries().items() if name != "glibc"},
    )  # fmt: skip
    return replace(environment, kernels=_kernels(environment))


def _limit(name: str) -> float:
    try:
        import resource

        soft, _ = resource.getrlimit(getattr(resource, name))
    except (ImportError, AttributeError):  # Windows
        return math.inf
    return math.inf if soft == resource.RLIM_INFINITY else soft


def _packages() -> tuple[Package, ...]:
    from packaging.utils import canonicalize_name

    packages = []
    for one in metadata.distributions():
        with contextlib.suppress(Exception):  # metadata that are damaged, or half removed
            facts = one.metadata
            info = getattr(one, "_path", None)
            packages.append(Package(
                canonicalize_name(facts["Name"]), facts["Version"] or "", str(one.locate_file("")), str(info or ""),
                tuple(facts.get_all("Requires-Dist") or ()), (facts.get_all("Requires-Python") or [""])[0],
            ))  # fmt: skip
    return tuple(packages)


def _site_folders() -> tuple[str, ...]:
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return tuple(dict.fromkeys([*site.getsitepackages(), *own]))


def _nvidia(files: Files) -> tuple[str, str, tuple[Gpu, ...]]:
    """The driver's version, why it does not answer, and its devices."""
    loaded = files.text("/proc/driver/nvidia/version")
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        devices = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        return _text(nvml.nvmlSystemGetDriverVersion()), "", tuple(_gpu(nvml, device) for device in devices)
    except Exception as error:  # NVML raises its own types, and may be absent altogether
        words = loaded.partition("Kernel Module")[2].split()
        return (words[0] if words else ""), (str(error) if loaded else ""), ()


def _gpu(nvml: object, device: object) -> Gpu:
    def ask(name: str) -> object:
        with contextlib.suppress(Exception):  # not every device reports everything
            return getattr(nvml, name)(device)
        return None

    memory, use = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    bits = reasons if isinstance(reasons, int) else 0
    return Gpu(
        name=_text(ask("nvmlDeviceGetName")),
        capability=ask("nvmlDeviceGetCudaComputeCapability") or (0, 0),  # type: ignore[arg-type]
        used_bytes=int(getattr(memory, "used", 0)), total_bytes=int(getattr(memory, "total", 0)),
        busy=getattr(use, "gpu", 0) / 100,
        slowed_by="heat" if bits & 0x60 else "a power limit" if bits & 0x84 else "",
    )  # fmt: skip


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def _kernels(environment: Environment) -> tuple[str, ...]:
    """What torch has kernels for, asked in a process of its own where there are GPUs, and only where no release that
    is known to be compromised is installed: importing torch may import others."""
    if not environment.gpus or environment.torch is None or any(environment.compromised()):
        return ()
    code = "import torch; print(torch._C._cuda_getArchFlags() if hasattr(torch._C, '_cuda_getArchFlags') else '')"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60,
            env={**environment.variables, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.split())
