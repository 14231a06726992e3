"""Parts that have ended, or will."""

from __future__ import annotations

from collections.abc import Iterator

from fettle.doctor._check import Finding, Level, check, note, warning
from fettle.doctor.environment import Environment

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
