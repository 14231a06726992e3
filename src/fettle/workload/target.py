"""Where a workload comes from: the target that a user names, and how a fresh process builds it again."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import symtable
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fettle.errors import UsageError, first_line, refusing
from fettle.procs.child import importing
from fettle.procs.limits import affinity_cores, physical_cores
from fettle.workload.model import Workload, workload_from

MODES = ("inference", "training")
AUTO = "auto"
"""The mode of a target whose factory has not been called yet: what it returns decides."""


@dataclass(frozen=True)
class Target:
    """Where a workload comes from. Data only: building it is `load`, which runs the user's code."""

    reference: str
    """``/absolute/file.py:factory``, ``package.module:factory``, or ``/absolute/workload.pkl`` for live objects."""

    name: str = ""
    search_path: tuple[str, ...] = field(default=(), repr=False)
    """``sys.path`` of the process that named the target, so that a worker finds the same modules."""
    mode: str = AUTO
    """``inference`` for a `Workload`, ``training`` for a `fettle.TrainingWorkload`, ``auto`` for what the factory
    returns."""
    arguments: Mapping[str, bool | int | float | str | None] = field(default_factory=dict, hash=False)
    """What the factory is called with, by name."""
    folder: str = field(default="", repr=False)
    """Where its process works; empty for where we are."""
    instead_of: str = field(default="", repr=False)
    """For another revision, the working tree, from which nothing may be imported."""
    checkout: str = field(default="", repr=False)
    """For another revision, the root of its own files, which may lie in the working tree."""

    def __post_init__(self) -> None:
        for path in (self.reference, *self.search_path):
            try:
                path.encode()
            except UnicodeEncodeError:
                raise UsageError(f"{path!r} is not a name in UTF-8, and no worker can be told it: rename it") from None

    @property
    def is_live(self) -> bool:
        """Whether the workload was handed over as live objects."""
        return self.reference.endswith(".pkl")

    def load(self, made: object = None) -> Workload:
        """Build the workload, or take what the factory has `made`. Raises `UsageError` with one line where the user can
        fix it."""
        workload = workload_from(self.make() if made is None else made, self.reference)
        return workload if workload.name else dataclasses.replace(workload, name=self.name)

    def make(self, seed: int = 0) -> object:
        """What the factory returns, unchecked. A factory with a parameter ``seed`` is given it."""
        self._enter()
        if self.is_live:
            return _load_live(Path(self.reference))
        factory = _find_factory(self.reference)
        for name in self.arguments:
            if not _takes(factory, name):
                raise UsageError(f"the factory {self.reference} has no parameter {name!r}")
        arguments = {"seed": seed, **self.arguments} if _takes(factory, "seed") else self.arguments
        with refusing(f"the factory {self.reference} raised", (Exception, SystemExit)):  # a script may leave
            built = factory(**arguments)
            if self.instead_of:
                self._check_imports()
            return built

    def function(self) -> Callable[..., object]:
        """The function itself, not called. Its file is imported under the file's own name where that is free: a loader
        that starts workers instead of forking them has them import it by that."""
        self._enter()
        return _find_factory(self.reference, under_its_name=True)

    def _enter(self) -> None:
        if self.folder:
            os.chdir(self.folder)
        for entry in reversed(self.search_path):
            if entry not in sys.path:
                sys.path.insert(0, entry)

    def _check_imports(self) -> None:
        """Raise `UsageError` where a module came from the working tree: it would be measured in place of its other
        revision."""
        ours = str(Path(__file__).parents[1])
        folders = (self.checkout, ours, sys.prefix, sys.base_prefix, os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
        allowed = tuple(os.path.abspath(folder) + os.sep for folder in folders if folder)
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            in_tree = file.startswith(self.instead_of + os.sep) and not file.startswith(allowed)
            if in_tree and not re.search(r"/(site|dist)-packages/", file):
                raise UsageError(
                    f"{name} was imported from the working tree ({file}), not from the other revision: an editable "
                    "install that names its modules one by one; run fettle with PYTHONPATH set to the source folder"
                )


def check_mode(mode: str) -> None:
    """Raise `UsageError` for anything but ``inference``, ``training`` and ``auto``."""
    if mode not in (*MODES, AUTO):
        raise UsageError(f"unknown mode {mode!r}: there are {', '.join((*MODES, AUTO))}")


def find_target(text: str) -> Target:
    """The target that a user named, checked as far as that goes without running it.

    Raises `UsageError` for a file that does not exist or plainly has no such factory, or a text of another form.
    """
    here = str(Path.cwd())
    # without a factory the text may still have a colon: it is in the path
    bare = ":" not in text or text.endswith(".py")
    location, _, factory = (text, "", "workload") if bare else text.rpartition(":")
    is_file = location.endswith(".py") or "/" in location
    if not (factory.isidentifier() and (is_file or all(part.isidentifier() for part in location.split(".")))):
        raise UsageError(f"{text!r} is not a target: write path/to/file.py:factory or package.module:factory")
    stem, search_path = location.rpartition(".")[2], [here]
    if is_file:
        path = Path(os.path.realpath(os.path.expanduser(location)))  # neither raises, as Path does for a link to itself
        if not path.is_file():
            raise UsageError(f"no such file: {location}")
        if path.suffix != ".py":
            raise UsageError(f"{location} is not a Python file: write path/to/file.py:factory")
        _check_defined(path, factory)
        location, stem, search_path = str(path), path.stem, [str(path.parent), here]
    return Target(f"{location}:{factory}", stem if factory == "workload" else f"{stem}-{factory}", tuple(search_path))


def target_from_objects(workload: Any, folder: Path) -> Target:
    """Write a `Workload` or a `fettle.TrainingWorkload` to ``folder/workload.pkl`` with cloudpickle, and return the
    target that reads it.

    Raises `UsageError` when something in them cannot be pickled or would get lost on the way, with the factory form
    that always works.
    """
    import cloudpickle

    _check_travels(workload)
    try:
        data = cloudpickle.dumps((switches(), workload))
    except Exception as error:
        raise UsageError(
            f"the model or its inputs cannot be handed to a worker process ({first_line(error)}): write a factory "
            "instead, def workload(): return model, [batch], and pass 'file.py:workload'"
        ) from error
    path = (folder / "workload.pkl").resolve()
    with refusing(f"cannot write {path}:", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    name = workload.name or type(workload.model).__name__
    return Target(str(path), name, tuple(entry or str(Path.cwd()) for entry in sys.path if isinstance(entry, str)))


def switches() -> list[tuple[str, list[Any], dict[str, Any]]]:
    """What this program has set for all of torch, as the calls that set it: the default type, and what is not as torch
    chooses it."""
    import torch

    calls: list[tuple[str, list[Any], dict[str, Any]]] = [("set_default_dtype", [torch.get_default_dtype()], {})]
    variables = [os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
    chosen = [int(text) for text in variables if text.isdigit()] or [physical_cores(), affinity_cores()]
    if torch.get_num_threads() not in chosen:
        calls += [("set_num_threads", [torch.get_num_threads()], {})]
    if torch.get_default_device().type != "cpu":
        calls += [("set_default_device", [torch.get_default_device()], {})]
    if torch.are_deterministic_algorithms_enabled():
        warns = {"warn_only": torch.is_deterministic_algorithms_warn_only_enabled()}
        calls += [("use_deterministic_algorithms", [True], warns)]
    with contextlib.suppress(RuntimeError):  # it raises where the newer setting was used
        if torch.get_float32_matmul_precision() != "highest":
            calls += [("set_float32_matmul_precision", [torch.get_float32_matmul_precision()], {})]
    return calls


def _check_travels(workload: Any) -> None:
    """Raise `UsageError` for what a pickle leaves out: what `Module.compile` has compiled."""
    import torch

    modules = workload.model.named_modules() if isinstance(workload.model, torch.nn.Module) else ()
    for name, module in modules:
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise UsageError(
                f"the model was compiled in place{f' (its {name})' if name else ''}, which gets lost on the way to a "
                "worker process: give it as it was before `compile()`, or write a factory that compiles it and pass "
                "'file.py:workload'"
            )


def _takes(factory: Callable[..., object], name: str) -> bool:
    """Whether it can be called with an argument of that name."""
    try:
        parameters = inspect.signature(factory).parameters
        return name in parameters or (
            name != "seed" and any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        )
    except (TypeError, ValueError):  # a built-in, or something else without a signature
        return False


def _find_factory(reference: str, *, under_its_name: bool = False) -> Callable[..., object]:
    location, _, name = reference.rpartition(":")
    leaves = f"importing {location} ends the program, which belongs under if __name__ == '__main__':"
    with refusing(f"importing {location} failed:"), refusing(leaves, SystemExit), importing(location):
        is_file = location.endswith(".py")
        module = _executed(location, under_its_name) if is_file else importlib.import_module(location)
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise _missing(location, name, known)
    return factory  # type: ignore[no-any-return]


def _executed(file: str, under_its_name: bool) -> types.ModuleType:
    stem = Path(file).stem
    name = stem if under_its_name and stem not in sys.modules else f"_fettle_target_{stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"cannot read {file} as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling inside the file look it up there
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        folder, names = Path(file).parent, [Path(file).stem]
        while len(names) == 1 or (folder / "__init__.py").is_file():
            folder, names = folder.parent, [folder.name, *names]
        raise UsageError(
            f"{file} imports relative to its package: name it as a module, {'.'.join(names)}:factory, and start fettle "
            f"in {folder}"
        ) from error
    return module


def _check_defined(file: Path, name: str) -> None:
    """Raise `UsageError` where a file plainly gives nothing that name. Where names may come about in other ways, or the
    file cannot be read, running it tells."""
    try:
        source = file.read_bytes()
        symbols = symtable.symtable(source.decode(), str(file), "exec").get_symbols()
    except (OSError, ValueError, SyntaxError):
        return
    if re.search(rb"import\s*\*|\bglobals?\b|\b__getattr__\b|\bexec\b|\bsetattr\b", source):
        return
    if not any(one.get_name() == name and (one.is_assigned() or one.is_imported()) for one in symbols):
        known = [one.get_name() for one in symbols if one.is_namespace() and not one.get_name().startswith("_")]
        raise _missing(str(file), name, known)


def _missing(location: str, name: str, known: Sequence[str]) -> UsageError:
    hint = f" (it has {', '.join(known[:8])})" if known else ""
    return UsageError(f"{location} has no factory named {name!r}{hint}")


def _load_live(path: Path) -> object:
    import pickle

    import torch

    try:
        calls, built = pickle.loads(path.read_bytes())  # written by this user's own process a moment ago
        for name, arguments, options in calls:  # as there: the model may make tensors of the default type
            getattr(torch, name)(*arguments, **options)
    except Exception as error:
        raise UsageError(
            f"the model or its inputs cannot be rebuilt in a worker process ({first_line(error)}): write a factory "
            "instead, def workload(): return model, [batch], and pass 'file.py:workload'"
        ) from error
    return built
