"""Versions that do not fit: torch and its companions, CUDA, the driver, the device, Python; parts that have ended."""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fettle.doctor._check import Finding, Level, check, error, note, warning
from fettle.doctor.environment import Environment, Package
from fettle.units import count_text

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

_FAMILY = ("torch", "torchvision", "torchaudio", "torchao", "triton", "torch-fettle")
"""Packages whose requirements must hold."""
_BUILT_TOGETHER = ("torchvision", "torchaudio")
_LEAST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
"""Least driver by major version of CUDA: NVIDIA's *CUDA Compatibility*, "Minor Version Compatibility"."""
_NEWER_DRIVER = ("/usr/local/cuda*/compat/libcuda.so*", "/usr/local/cuda*/compat/lib*/libcuda.so*")
"""The libraries of NVIDIA's package for forward compatibility, which let an older driver of a data centre's device run
a newer CUDA."""
_INDEX = "pip install --force-reinstall --index-url https://download.pytorch.org/whl/{} {}"


@check()
def no_torch(here: Environment) -> Iterator[Finding]:
    """There is nothing to check the rest against."""
    if here.torch is None:
        yield error("torch is not installed in this environment.",
                    "No model runs here; what depends on torch was not looked at.", "pip install torch")  # fmt: skip


@check()
def requirements(here: Environment) -> Iterator[Finding]:
    """What torch and its companions say that they need, against what is installed."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for owner in filter(None, map(here.package, _FAMILY)):
        for text in owner.requires:
            try:
                needs = Requirement(text)
                if needs.marker is not None and not needs.marker.evaluate({"extra": ""}):
                    continue
            except InvalidRequirement:
                continue
            package = here.package(canonicalize_name(needs.name))
            wanted = f"{needs.name}{needs.specifier}"
            if package is None:
                yield error(f"{owner.name} {owner.version} needs {wanted}, which is not installed.",
                            "It fails when it is imported, or when that part of it is used.",
                            f"pip install '{wanted}'")  # fmt: skip
            elif not _allows(needs.specifier, package.version):
                make = error if package.name == "torch" else warning
                why = ("Built for another torch, its operators are missing or crash." if package.name == "torch"
                       else "That pair was never tested together: kernels may be missing, slow or wrong.")  # fmt: skip
                here_is = f"{package.name} {package.version} is there"
                yield make(f"{owner.name} {owner.version} needs {wanted}, and {here_is}.",
                           why, f"pip install '{wanted}'")  # fmt: skip


@check()
def mixed_builds(here: Environment) -> Iterator[Finding]:
    """``torch 2.13.0+cu130`` beside ``torchvision 0.28.0+cpu``."""
    torch = here.torch
    if torch is None or "+" not in torch.version:
        return
    build = torch.version.partition("+")[2]
    for other in filter(None, map(here.package, _BUILT_TOGETHER)):
        theirs = other.version.partition("+")[2]
        if theirs and theirs != build:
            yield error(f"torch is built for {build}, {other.name} for {theirs}.",
                        "Its compiled operators do not load: 'operator torchvision::nms does not exist'.",
                        _INDEX.format(build, f"torch {other.name}"))  # fmt: skip


@check()
def two_cudas(here: Environment) -> Iterator[Finding]:
    """NVIDIA's libraries of two major versions of CUDA in one environment."""
    families: dict[str, list[str]] = defaultdict(list)
    for package in here.packages:
        match = re.fullmatch(r"nvidia-.+-cu(1[0-9])", package.name)
        if match:
            families[match[1]].append(package.name)
    if len(families) > 1:
        built = here.torch_built_for().partition(".")[0]
        extra = [name for family, names in families.items() for name in names if family != built]
        listed = ", ".join(f"{len(names)} for CUDA {family}" for family, names in sorted(families.items()))
        yield warning(f"NVIDIA's libraries of several CUDA versions are installed: {listed}.",
                      "Which one is loaded depends on the order of imports; mixed, they crash or give wrong results.",
                      "pip uninstall -y " + " ".join(sorted(extra)))  # fmt: skip


@check()
def cpu_build(here: Environment) -> Iterator[Finding]:
    """A GPU that torch was not built for."""
    built = here.torch_built_for()
    amd = here.files.exists("/dev/kfd")
    if here.gpus and built in ("cpu", "rocm"):
        build = _build_for(here)
        mend = _INDEX.format(build, "torch") if build != "cpu" else "update NVIDIA's driver, which is too old for any"
        yield warning(f"torch is a build for {built}, and this machine has {here.gpus[0].name}.",
                      "The GPU is never used.", mend)  # fmt: skip
    elif amd and not here.gpus and built and built != "rocm":
        yield warning(f"torch is built for {'the CPU' if built == 'cpu' else 'CUDA'}, and this machine has an AMD GPU.",
                      "The GPU is never used.", _INDEX.format("rocm7.2", "torch"))  # fmt: skip


@check()
def driver_too_old(here: Environment) -> Iterator[Finding]:
    """A driver below what torch's CUDA needs."""
    built = here.torch_built_for()
    least = _LEAST_DRIVER.get(int(built.partition(".")[0])) if built[:1].isdigit() else None
    if least and here.driver and _numbers(here.driver) < _numbers(least):
        newer = [path for pattern in _NEWER_DRIVER for path in here.files.matching(pattern)]
        make = note if newer else error
        why = "CUDA does not start: 'The NVIDIA driver on your system is too old'."
        build = _build_for(here)
        other = f", or {_INDEX.format(build, 'torch')}" if build != "cu130" else ""
        yield make(f"torch is built for CUDA {built}, which needs driver {least} or later, and {here.driver} is "
                   "installed.", f"{why} Unless it loads {newer[0]}, which some devices may." if newer else why,
                   f"update NVIDIA's driver{other}")  # fmt: skip


@check()
def driver_does_not_answer(here: Environment) -> Iterator[Finding]:
    """A driver that was updated without a restart, or whose library a container lacks."""
    if here.driver_fault:
        yield error(f"NVIDIA's driver {here.driver} is loaded, but does not answer: {here.driver_fault[:150]}.",
                    "CUDA does not start. Mostly the driver was updated while it was in use, or the container was "
                    "started without its libraries.", "sudo reboot (a container: docker run --gpus all)")  # fmt: skip


@check()
def no_kernels(here: Environment) -> Iterator[Finding]:
    """A device that torch has no kernels for."""
    built = here.torch_built_for()
    for gpu in here.gpus:
        has = f"{gpu.capability[0]}.{gpu.capability[1]}"
        if gpu.capability == (0, 0) or not built[:1].isdigit():
            continue
        if here.kernels:
            missing = not any(_runs(kernel, gpu.capability) for kernel in here.kernels)
        else:  # wheels for CUDA 13 begin with Turing
            missing = int(built.partition(".")[0]) >= 13 and gpu.capability < (7, 5)
        if missing:
            listed = f" ({', '.join(here.kernels)})" if here.kernels else ""
            yield error(f"{gpu.name} has compute capability {has}, and this torch has no kernels for it{listed}.",
                        "The first operation fails: 'no kernel image is available for execution on the device'.",
                        _INDEX.format(_build_for(here), "torch"))  # fmt: skip


@check()
def python_version(here: Environment) -> Iterator[Finding]:
    """A Python that torch does not name."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    for package in filter(None, map(here.package, _FAMILY)):
        try:
            allowed = SpecifierSet(package.requires_python)
        except InvalidSpecifier:
            continue
        if here.python and not _allows(allowed, here.python):
            yield error(f"{package.name} {package.version} needs Python {allowed}, and this is {here.python}.",
                        "Compiled parts do not load, or torch.compile refuses to work.",
                        f"python3.12 -m venv new && new/bin/pip install {package.name}")  # fmt: skip


@check()
def installed_twice(here: Environment) -> Iterator[Finding]:
    """Two versions of one package in the same folder: what a broken upgrade leaves."""
    counted: dict[tuple[str, str], Package] = {}
    for package in here.packages:
        first = counted.setdefault((package.folder, package.name), package)
        if first is not package and package.name in _FAMILY and first.info != package.info:
            yield warning(f"{package.name} is installed twice in {package.folder}: {first.version} and "
                          f"{package.version}.", "Files of both are mixed: what runs is neither.",
                          f"rm -r {first.info} {package.info} && pip install --force-reinstall "
                          f"{package.name}")  # fmt: skip


@check()
def other_cuda_first(here: Environment) -> Iterator[Finding]:
    """Libraries of another CUDA on the loader's path, before those that came with torch."""
    if not here.torch_built_for()[:1].isdigit():
        return
    for folder in here.variables.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        libraries = [os.path.basename(path) for name in ("libcudnn", "libcublas", "libnccl", "libcudart")
                     for path in here.files.matching(f"{glob.escape(folder)}/{name}.so*") if folder]  # fmt: skip
        if libraries:
            yield warning(f"LD_LIBRARY_PATH names {folder}, which has {', '.join(libraries[:3])}.",
                          "They are loaded in place of those that torch was built and tested with.",
                          "unset LD_LIBRARY_PATH")  # fmt: skip


@check()
def hidden_gpus(here: Environment) -> Iterator[Finding]:
    """Devices that a variable hides, or a number that no device has."""
    value = here.variables.get("CUDA_VISIBLE_DEVICES")
    if not here.gpus or value is None:
        return
    numbers = [word.strip() for word in value.split(",")]
    if value.strip() in ("", "-1", "none", "NoDevFiles"):
        yield warning(f"CUDA_VISIBLE_DEVICES={value!r} hides {count_text(len(here.gpus), 'GPU')}.",
                      "The model runs on the CPU.", "unset CUDA_VISIBLE_DEVICES")  # fmt: skip
    elif beyond := [number for number in numbers if number.isdecimal() and int(number) >= len(here.gpus)]:
        yield warning(f"CUDA_VISIBLE_DEVICES={value} names device {beyond[0]}, and there are {len(here.gpus)}.",
                      "CUDA ignores that device and all that are named after it.",
                      "unset CUDA_VISIBLE_DEVICES")  # fmt: skip


@check()
def numpy_two(here: Environment) -> Iterator[Finding]:
    """A torch that was compiled with NumPy 1 beside NumPy 2."""
    torch, numpy = here.torch, here.package("numpy")
    if torch and numpy and _numbers(numpy.version) >= (2,) and _numbers(torch.version) < (2, 3):
        yield error(f"torch {torch.version} was compiled for NumPy 1, and NumPy {numpy.version} is installed.",
                    "Tensors cannot be made of arrays: 'Numpy is not available'.", "pip install 'numpy<2'")  # fmt: skip


def _build_for(here: Environment) -> str:
    """The newest build of torch that driver and devices can run; where only a newer driver could, that for this one."""
    driver = _numbers(here.driver) or _numbers(_LEAST_DRIVER[13])
    capabilities = [gpu.capability for gpu in here.gpus if gpu.capability > (0, 0)]
    if any(capability >= (10, 0) for capability in capabilities):
        return "cu130"
    if driver < _numbers(_LEAST_DRIVER[12]):
        return "cpu"
    old = any(capability < (7, 5) for capability in capabilities)
    return "cu126" if old or driver < _numbers(_LEAST_DRIVER[13]) else "cu130"


def _allows(allowed: SpecifierSet, version: str) -> bool:
    """Whether a version is one of those. What is none by the rules (``3.13.0+``, built from source) may be any."""
    from packaging.version import InvalidVersion, Version

    try:
        return allowed.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]{1,9}", version.partition("+")[0]))


def _runs(kernel: str, capability: tuple[int, int]) -> bool:
    """Whether ``sm_86`` or ``compute_90`` serves a device: machine code up to its own minor version, PTX upwards."""
    match = re.fullmatch(r"(sm|compute)_([0-9]+)([0-9])([af]?)", kernel)
    if match is None:
        return True  # a form that is not known says nothing
    has = (int(match[2]), int(match[3]))
    if match[4] == "a":
        return has == capability
    return has[0] == capability[0] and has <= capability if match[1] == "sm" else has <= capability


_ENDED: dict[str, tuple[Level, str, str]] = {
    "intel-extension-for-pytorch": ("warning", "It has ended, and what it did is in torch itself; it loads only with "
                                    "the torch that it was built for.", ""),
    "torchtriton": ("warning", "The name is a placeholder since December 2022, when a stranger's package had it: "
                    "Triton is called triton.", "triton"),
    "torchtext": ("warning", "It has ended with torch 2.3, and does not load with later ones.", ""),
    "torchserve": ("warning", "It has ended in 2025, and gets no security fixes.", ""),
    "torch-model-archiver": ("note", "It has ended with TorchServe.", ""),
    "fairscale": ("note", "It has ended: sharding and checkpointing are in torch.", ""),
    "functorch": ("note", "It is torch.func since torch 2.0.", ""),
    "apex": ("note", "Its mixed precision and its parallel wrapper are in torch (amp, DistributedDataParallel).", ""),
    "pynvml": ("note", "The name is deprecated for nvidia-ml-py, and both install one module.", "nvidia-ml-py"),
    "pytorch-quantization": ("note", "It has ended: NVIDIA goes on with nvidia-modelopt.", "nvidia-modelopt"),
}  # fmt: skip
_CLASSES = {
    "ScriptModule": ("TorchScript", "It is deprecated since torch 2.10; torch.compile and torch.export take its place.",
                     "torch.export.export(model, inputs)"),
    "FullyShardedDataParallel": ("FSDP1", "It is deprecated for fully_shard (FSDP2), which compiles and shards by "
                                 "parameter.", "torch.distributed.fsdp.fully_shard(model)"),
}  # fmt: skip
_VARIABLES = {"TRANSFORMERS_CACHE": "HF_HOME", "PYTORCH_TRANSFORMERS_CACHE": "HF_HOME"}


@check()
def ended_packages(here: Environment) -> Iterator[Finding]:
    """Packages that nobody maintains, or that are called otherwise now."""
    for name, (level, why, instead) in _ENDED.items():
        package = here.package(name)
        if package is not None:
            more = f" && pip install {instead}" if instead else ""
            yield Finding("", level, f"{name} {package.version} is installed.", why, f"pip uninstall -y {name}{more}")


@check()
def ended_classes(here: Environment) -> Iterator[Finding]:
    """Classes inside the model."""
    for model in here.program.models:
        for name in model.deprecated:
            title, why, mend = _CLASSES[name]
            yield warning(f"{model.name} is made with {title}.", why, mend)


@check()
def ended_variables(here: Environment) -> Iterator[Finding]:
    """Variables that are called otherwise now."""
    for old, new in _VARIABLES.items():
        if old in here.variables:
            yield note(f"{old} is set.", f"It is deprecated for {new}, and will be ignored.",
                       f"export {new}={here.variables[old]}; unset {old}")  # fmt: skip
