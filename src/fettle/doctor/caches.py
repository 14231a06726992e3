"""Compiled code: where it is kept, and whether anything can be compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fettle.doctor._check import Finding, check, error, note, warning
from fettle.doctor.environment import Environment
from fettle.doctor.input import REMOTE
from fettle.units import size_text

_LEAST_BYTES = 1 << 30


def _folders(here: Environment) -> dict[str, tuple[str, str]]:
    """Caches by name, with the variable that moves them and the folder."""
    user = re.sub(r"[\\/:*?\"<>|]", "_", here.variables.get("USER") or here.variables.get("LOGNAME") or "root")
    home = here.variables.get("HOME", "/root")
    temporary = here.variables.get("TMPDIR", "/tmp").rstrip("/")
    defaults = {
        "torch.compile's": ("TORCHINDUCTOR_CACHE_DIR", f"{temporary}/torchinductor_{user}"),
        "Triton's": ("TRITON_CACHE_DIR", f"{here.variables.get('TRITON_HOME', home)}/.triton/cache"),
    }
    return {name: (variable, here.variables.get(variable) or folder) for name, (variable, folder) in defaults.items()}


@check()
def compile_caches(here: Environment) -> Iterator[Finding]:
    """Folders for compiled code that cannot be written, or run from, or that do not last."""
    for name, (variable, folder) in _folders(here).items():
        if name == "Triton's" and not here.gpus:
            continue
        kind, options = here.mount(folder)
        free = here.files.free_bytes(folder)
        mend = f"export {variable}=$HOME/.cache/{variable.partition('_')[0].lower()}"
        seen = f"{name} cache is {folder}"
        if not here.files.can_write(folder):
            yield warning(
                f"{seen}, which cannot be written.", "Compiling fails, or is done again by every process.", mend
            )
        elif "noexec" in options.split(","):
            yield error(f"{seen}, from where nothing may be run (noexec).",
                        "Compiled code does not load: 'failed to map segment from shared object'.", mend)  # fmt: skip
        elif kind in REMOTE:
            yield warning(f"{seen}, on a network file system ({kind}).",
                          "Thousands of small files and locks: a warm cache is slower than none.", mend)  # fmt: skip
        elif 0 <= free < _LEAST_BYTES:
            yield warning(f"{seen}, where {size_text(free)} are left.", "Compiling fails in the middle.", mend)
        elif here.in_container and kind in ("overlay", "tmpfs", "aufs"):
            yield warning(f"{seen}, inside the container ({kind}).",
                          "It is gone with the container: every start compiles everything again.",
                          f"docker run -v compiled:{folder} ...")  # fmt: skip
        elif kind == "tmpfs":
            yield note(f"{seen}, in memory (tmpfs).", "It takes memory, and is gone after a restart.", mend)


@check()
def no_bytecode(here: Environment) -> Iterator[Finding]:
    """Installed modules that Python compiles in every process anew."""
    if here.torch is None or here.variables.get("PYTHONPYCACHEPREFIX"):
        return
    folder = f"{here.torch.folder}/torch"
    if here.files.matching(f"{folder}/__pycache__/__init__.cpython-{''.join(here.python.split('.')[:2])}*.pyc"):
        return
    why = "PYTHONDONTWRITEBYTECODE is set" if here.variables.get("PYTHONDONTWRITEBYTECODE") else ""
    if why := why or ("" if here.files.can_write(folder) else f"{folder} cannot be written"):
        yield warning(f"torch was installed without bytecode, as uv and pip --no-compile do, and {why}.",
                      "Every process compiles torch's sources again, for seconds of each start.",
                      f"python -m compileall -q {here.torch.folder}")  # fmt: skip


@check()
def no_compiler(here: Environment) -> Iterator[Finding]:
    """No compiler for what torch.compile and Triton write."""
    if here.torch is None:
        return
    for name in ("CXX", "CC"):
        value = here.variables.get(name, "").split()
        if value and not here.files.program(value[0]):
            yield error(f"{name}={value[0]}, which is not there.", "torch.compile fails on the CPU, Triton on a GPU.",
                        f"unset {name}")  # fmt: skip
    if not here.variables.get("CXX") and not any(here.files.program(name) for name in ("g++", "clang++", "cl")):
        yield warning("No C++ compiler is installed.",
                      "torch.compile makes no code for the CPU" + (", Triton no launchers." if here.gpus else "."),
                      "apt-get install g++")  # fmt: skip


@check()
def no_python_headers(here: Environment) -> Iterator[Finding]:
    """Python without its headers, which Triton's launchers and inductor's wrappers include."""
    if here.gpus and here.torch and here.headers and not here.files.exists(f"{here.headers}/Python.h"):
        yield warning("Python's headers are not installed.", "Triton cannot build the launcher of its first kernel: "
                      "'fatal error: Python.h: No such file'.", "apt-get install python3-dev")  # fmt: skip


@check()
def few_compile_threads(here: Environment) -> Iterator[Finding]:
    """A single process that compiles, on a machine of many cores."""
    if here.number("TORCHINDUCTOR_COMPILE_THREADS") == 1 and here.granted >= 4:
        yield note(f"TORCHINDUCTOR_COMPILE_THREADS=1, and {here.granted} cores are granted.",
                   "Kernels are compiled one after the other.", "unset TORCHINDUCTOR_COMPILE_THREADS")  # fmt: skip
