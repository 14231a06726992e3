"""Several processes: rendezvous, NCCL and what it may use, interfaces."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fettle.doctor._check import Finding, check, error, note, warning
from fettle.doctor.environment import Environment
from fettle.units import count_text

_RENAMED = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}  # fmt: skip
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@check()
def no_infiniband(here: Environment) -> Iterator[Finding]:
    """InfiniBand that is there and not used, or that may not lock memory."""
    cards = here.files.matching("/sys/class/infiniband/*")
    if not cards:
        return
    names = ", ".join(card.rpartition("/")[2] for card in cards[:4])
    if here.is_on("NCCL_IB_DISABLE"):
        yield warning(f"NCCL_IB_DISABLE is on, and there is InfiniBand ({names}).",
                      "Machines talk over TCP, at a tenth of the speed.", "unset NCCL_IB_DISABLE")  # fmt: skip
    elif math.isfinite(here.locked_bytes):
        yield warning(f"A process may lock {here.locked_bytes / 1024:.0f} KiB, and there is InfiniBand ({names}).",
                      "NCCL cannot register its buffers: 'Call to ibv_reg_mr failed'.",
                      "ulimit -l unlimited  # a container: --ulimit memlock=-1")  # fmt: skip


@check(quick=True)
def interfaces(here: Environment) -> Iterator[Finding]:
    """Interfaces by name that are not there."""
    there = {path.rpartition("/")[2] for path in here.files.matching("/sys/class/net/*")}
    for name in _INTERFACES:
        value = here.variables.get(name, "").strip()
        if not value or value[0] == "^" or not there:
            continue
        for wanted in value.lstrip("=").split(","):
            exact = value[0] == "=" or not name.startswith("NCCL")
            if not any(card == wanted if exact else card.startswith(wanted) for card in there):
                yield error(f"{name}={value} names {wanted}, and there are {', '.join(sorted(there)[:6])}.",
                            "No connection is made: the job waits in vain.", f"unset {name}")  # fmt: skip
    nodes = (here.number("WORLD_SIZE") or 1) > (here.number("LOCAL_WORLD_SIZE") or here.number("WORLD_SIZE") or 1)
    if nodes and here.variables.get("NCCL_SOCKET_IFNAME", "").strip("=") == "lo":
        yield error("NCCL_SOCKET_IFNAME=lo, and the job has several machines.", "They cannot reach one another.",
                    "unset NCCL_SOCKET_IFNAME")  # fmt: skip


@check()
def half_a_rendezvous(here: Environment) -> Iterator[Finding]:
    """Some of the variables of a distributed job, or a rank that cannot be."""
    present = [name for name in _RENDEZVOUS if here.variables.get(name)]
    missing = [name for name in _RENDEZVOUS if name not in present]
    rank, size = here.number("RANK"), here.number("WORLD_SIZE")
    if ("RANK" in present and "WORLD_SIZE" in missing) or ("MASTER_ADDR" in present and "MASTER_PORT" in missing):
        yield error(f"{', '.join(present)} {'is' if len(present) == 1 else 'are'} set, {', '.join(missing)} not.",
                    "init_process_group fails, or waits for ranks that never come.",
                    f"unset {' '.join(present)}  # or start with torchrun")  # fmt: skip
    elif rank is not None and size is not None and rank >= size:
        yield error(f"RANK={rank}, and WORLD_SIZE={size}.", "Ranks go from 0 to WORLD_SIZE - 1: the job never begins.",
                    f"export RANK={size - 1}")  # fmt: skip


@check()
def more_ranks_than_gpus(here: Environment) -> Iterator[Finding]:
    """Ranks that share a device."""
    ranks = here.number("LOCAL_WORLD_SIZE") or 1
    if here.gpus and ranks > len(here.gpus):
        yield error(f"LOCAL_WORLD_SIZE={ranks}, and the machine has {count_text(len(here.gpus), 'GPU')}.",
                    "NCCL refuses two ranks on one device: 'Duplicate GPU detected'.",
                    f"torchrun --nproc-per-node={len(here.gpus)} ...")  # fmt: skip


@check()
def no_backend(here: Environment) -> Iterator[Finding]:
    """torch without the backend that its devices want."""
    backends = here.program.backends
    if backends is None:
        return
    ranks = here.number("WORLD_SIZE") or 1
    if len(here.gpus) > 1 and "nccl" not in backends and here.torch_built_for() != "cpu":
        yield warning(f"This torch has no NCCL, and there are {len(here.gpus)} GPUs.",
                      "Gradients go through the host's memory.", "pip install --force-reinstall torch")  # fmt: skip
    elif ranks > 1 and not backends:
        yield error(f"WORLD_SIZE={ranks}, and this torch has no backend to talk by.", "init_process_group fails.",
                    "pip install --force-reinstall torch")  # fmt: skip


@check(quick=True)
def renamed_variables(here: Environment) -> Iterator[Finding]:
    """Names of torch's own variables as they were before 2.2."""
    for old, new in _RENAMED.items():
        if old in here.variables:
            yield note(f"{old} is now called {new}.", "The old name will be ignored one day.",
                       f"export {new}={here.variables[old]}; unset {old}")  # fmt: skip
