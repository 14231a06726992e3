"""What a recipe's lines converted a model to, kept for the next process: OpenVINO's model, as its own two files.

Exporting and converting takes seconds to minutes, reading what came of it a fraction of a second. A file fits where the
same operators would run on the same numbers: the model is called once with tensors that have no data, and the key of a
file is a hash of all operators with their arguments, of the values of all weights, of the level with its calibration
batches, and of the machine and the versions. What is not there, does not fit or was changed is converted again.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fettle.errors import first_line
from fettle.files import cache_folder
from fettle.kept_files import is_sound, keep
from fettle.machine import cpu_name
from fettle.techniques import _openvino, _openvino_int8
from fettle.techniques._host import cpu_flags, installed
from fettle.techniques._openvino_core import openvino_core

FOLDER = "converted"
_CONVERTS = "openvino_converted"
_GRAPH, _SAID = "model.xml", "said.json"
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

tally = {"read": 0, "converted": 0}
"""How many models of this process were kept before, and how many were not."""

log = logging.getLogger(__name__)


def keep_converted(
    optimize: Callable[..., Any], label: str = "", later: list[Callable[[], None]] | None = None
) -> Callable[..., Any]:
    """Let the function of a recipe's source read what was converted before, and keep what it converts.

    With `label` only what was kept with the same one is read. Where there is a list `later`, what is to be kept is
    written when its functions are called: writing is no part of the time that is measured until then.
    """
    names = optimize.__globals__
    if _CONVERTS in names:
        names[_CONVERTS] = functools.partial(_converted, names[_CONVERTS], label, later)
    return optimize


def _converted(
    convert: Callable[..., Any], label: str, later: list[Callable[[], None]] | None, flat: torch.nn.Module,
    tensors: Sequence[torch.Tensor], samples: Sequence[Sequence[torch.Tensor]], level: str, part: Any = None,
) -> Any:  # fmt: skip
    """As `openvino_converted`: read where it was kept."""
    began = time.perf_counter()
    try:
        key = _key(flat, tensors, samples, [label, level, part])
    except Exception as error:  # it asks for values, say: exporting tells what that means
        log.info("what is converted cannot be kept: %s", first_line(error))
        return convert(flat, tensors, samples, level, part)
    folder = cache_folder(FOLDER) / key
    if is_sound(folder):
        try:
            model = openvino_core().read_model(str(folder / _GRAPH))
            _say_again(folder / _SAID, part)
        except Exception as error:
            log.info("what was converted before cannot be read (%s): converting again", first_line(error))
        else:
            tally["read"] += 1
            log.info("converted before: read in %.2g s", time.perf_counter() - began)
            return model
    with _listening() as said:
        model = convert(flat, tensors, samples, level, part)
    tally["converted"] += 1
    took_s = time.perf_counter() - began

    def write(place: Path) -> None:
        import openvino

        openvino.save_model(model, str(place / _GRAPH), compress_to_fp16=False)
        (place / _SAID).write_text(json.dumps({"said": said, "part": part}), encoding="utf-8")

    def keep_it() -> None:
        try:
            keep(folder, write)
            log.info("converted in %.3g s, kept for the next start", took_s)
        except Exception as error:  # a full disk, or what OpenVINO cannot write
            log.info("converted in %.3g s, which could not be kept: %s", took_s, first_line(error))

    if later is None:
        keep_it()
    else:
        later.append(keep_it)
    return model


@contextmanager
def _listening() -> Iterator[list[dict[str, Any]]]:
    """What the lines say of themselves meanwhile, and what they learned."""
    said: list[dict[str, Any]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append({"text": record.getMessage(), "learned": getattr(record, "learned", None)})

    handler, logger = Listener(), logging.getLogger("optimized")
    level, logger.level = logger.level, logging.INFO
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _say_again(path: Path, part: Any) -> None:
    """Say what was said when the model was converted, and put the layers that were chosen into `part`."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    for one in kept["said"]:
        extra = {"learned": one["learned"]} if one["learned"] else None
        logging.getLogger("optimized").info("%s", one["text"], extra=extra)
    if part is not None:
        part.update(kept["part"])


def _key(
    flat: torch.nn.Module, tensors: Sequence[torch.Tensor], samples: Sequence[Sequence[torch.Tensor]], said: list[Any]
) -> str:
    """What must be equal for a converted model to fit. Raises where the model's operators depend on values."""
    digest = hashlib.sha256()
    versions = installed(("torch", "openvino", "nncf", "torch-fettle"))
    digest.update(json.dumps([*said, versions, cpu_name(), sorted(cpu_flags())], sort_keys=True).encode())
    for module in (_openvino, _openvino_int8):  # how it is converted
        digest.update(Path(str(module.__file__)).read_bytes())
    used = _add_operators(flat, tensors, digest)
    for tensor in itertools.chain(used, *samples):
        _add_values(tensor, digest)
    return digest.hexdigest()[:40]


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hashes the operators that run, each tensor by when it was met; gathers those that have data."""

    def __init__(self, digest: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.digest = digest
        self.met: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []
        self.with_data: list[torch.Tensor] = []

    def meet(self, tensor: torch.Tensor) -> int:
        """The number of a tensor. All are held, so that no two have one address."""
        if id(tensor) not in self.met:
            self.met[id(tensor)] = len(self.alive)
            self.alive.append(tensor)
        return self.met[id(tensor)]

    def tell(self, value: Any) -> str:
        """An argument as text."""
        if isinstance(value, torch.Tensor):
            from torch._subclasses.fake_tensor import FakeTensor

            if id(value) not in self.met and not isinstance(value, FakeTensor):
                self.with_data.append(value)
            return f"tensor {self.meet(value)}"
        if isinstance(value, _PLAIN):
            return repr(value)
        raise TypeError(f"an operator is given a {type(value).__name__}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        self.digest.update(f"{func}{spec}{[self.tell(leaf) for leaf in leaves]}".encode())
        results = func(*args, **(kwargs or {}))
        for result in pytree.tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self.meet(result)
        return results


def _add_operators(flat: torch.nn.Module, tensors: Sequence[torch.Tensor], digest: Any) -> list[torch.Tensor]:
    """Hash the operators of a call, made without data; the tensors in them that have data: weights, mostly."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode, operators = FakeTensorMode(allow_non_fake_inputs=True), _Operators(digest)
    given = [mode.from_tensor(tensor) for tensor in tensors]
    for tensor in given:
        digest.update(f"{tensor.shape}{tensor.dtype}{tensor.stride()}{operators.meet(tensor)}".encode())
    with _unchanged(flat), _as_if_exporting(), mode, operators:
        results = flat(*given)
    digest.update(str([operators.tell(result) for result in results]).encode())
    return operators.with_data


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Put every attribute of every module back afterwards: what a model remembers of this call has no data."""
    before = [(vars(module), {**vars(module)}, {**module._buffers}) for module in model.modules()]
    try:
        yield
    finally:
        for now, then, buffers in before:
            now.clear()
            now.update(then)
            now["_buffers"].clear()
            now["_buffers"].update(buffers)


@contextmanager
def _as_if_exporting() -> Iterator[None]:
    """Models that look whether they are exported remember nothing of the call then."""
    flags = [name for name in ("_is_compiling_flag", "_is_exporting_flag") if hasattr(torch.compiler, name)]
    before = {name: getattr(torch.compiler, name) for name in flags}
    try:
        for name in flags:
            setattr(torch.compiler, name, True)
        yield
    finally:
        for name, value in before.items():
            setattr(torch.compiler, name, value)


def _add_values(tensor: torch.Tensor, digest: Any) -> None:
    digest.update(f"{tensor.shape}{tensor.dtype}{tensor.stride()}".encode())
    plain = tensor.detach().contiguous().reshape(-1)
    digest.update(plain.view(torch.uint8).numpy().data if plain.numel() else b"")
