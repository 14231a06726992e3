"""What a recipe's lines made of a model, kept for the next process: OpenVINO's model, AOTInductor's library, ONNX,
TensorRT's engine.

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
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fettle.errors import first_line, type_text
from fettle.files import cache_folder
from fettle.kept_files import MOST_BYTES, SUMS, is_sound, keep
from fettle.machine import cpu_name, installed
from fettle.patches import replaced
from fettle.techniques._exported import openvino_core
from fettle.techniques._host import cpu_flags
from fettle.techniques._state_kept import Attributes

FOLDER = "converted"
_GRAPH, _SAID = "model.xml", "said.json"
_PACKAGES = ("torch", "openvino", "nncf", "onnx", "onnxscript", "onnxruntime", "torch-tensorrt", "tensorrt",
             "transformers", "torch-fettle")  # fmt: skip
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

tally = {"read": 0, "converted": 0}
"""How many models of this process were kept before, and how many were not."""

log = logging.getLogger(__name__)
_OPTIMIZED = logging.getLogger("optimized")


def keep_converted(
    optimize: Callable[..., Any], label: str = "", later: list[Callable[[], None]] | None = None
) -> Callable[..., Any]:
    """Let the function of a recipe's source read what was converted before, and keep what it converts.

    With `label` only what was kept with the same one is read. Where there is a list `later`, what is to be kept is
    written when its functions are called: writing is no part of the time that is measured until then.
    """
    keepers: dict[str, Callable[..., Any]] = dict.fromkeys(("aoti_files", "onnx_files", "tensorrt_files"), _files)
    keepers |= {"openvino_converted": _openvino_model, "openvino_text_model": _text_model}
    names = optimize.__globals__
    for name in keepers.keys() & names.keys():
        names[name] = functools.partial(keepers[name], names[name], label, later)
    return optimize


def _openvino_model(
    convert: Callable[..., Any], label: str, later: list[Callable[[], None]] | None, flat: torch.nn.Module,
    tensors: Sequence[torch.Tensor], samples: Sequence[Sequence[torch.Tensor]], level: str, free: Any, part: Any,
) -> Any:  # fmt: skip
    """As `openvino_converted`: read where it was kept."""
    make = functools.partial(convert, flat, tensors, samples, level, free, part)
    return _kept_graph((flat, tensors, samples, [label, level, free, part]), make, part, later)


class _Scores(torch.nn.Module):
    """A language model as tensors in, tensors out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.model(input_ids=tokens, use_cache=False).logits,)


def _text_model(
    convert: Callable[..., Any], label: str, later: list[Callable[[], None]] | None, model: torch.nn.Module, bits: int
) -> Any:
    """As `openvino_text_model`: read where it was kept."""
    make, tokens = functools.partial(convert, model, bits), torch.ones(2, 3, dtype=torch.long)
    return _kept_graph((_Scores(model), [tokens], (), [label, bits]), make, None, later)


def _kept_graph(
    about: tuple[Any, ...], convert: Callable[[], Any], part: Any, later: list[Callable[[], None]] | None
) -> Any:
    """OpenVINO's model that belongs to `about`, read or converted."""
    notes = Notes()

    def make() -> Any:
        with notes:
            return convert()

    def read(folder: Path) -> Any:
        model = openvino_core().read_model(str(folder / _GRAPH))
        _repeat_notes(folder / _SAID, part)
        return model

    def write(model: Any, folder: Path) -> None:
        import openvino

        openvino.save_model(model, str(folder / _GRAPH), compress_to_fp16=False)
        (folder / _SAID).write_text(json.dumps({"lines": notes.lines, "learned": notes.learned, "part": part}))

    return _kept(about, make, read, write, later)


def _files(
    fill: Callable[..., None], label: str, later: list[Callable[[], None]] | None, flat: torch.nn.Module,
    tensors: Sequence[torch.Tensor], free: Any, options: Any, folder: str,
) -> None:  # fmt: skip
    """As `aoti_files`, `onnx_files` or `tensorrt_files`: copied where they were kept."""

    def make() -> list[IO[bytes]]:
        fill(flat, tensors, free, options, folder)
        return [path.open("rb") for path in Path(folder).iterdir()]  # the folder goes before they are copied

    def read(kept: Path) -> None:
        for path in kept.iterdir():
            if path.name != SUMS:
                shutil.copyfile(path, Path(folder) / path.name)

    def write(made: list[IO[bytes]], place: Path) -> None:
        for file in made:
            with file, (place / Path(file.name).name).open("wb") as copy:
                shutil.copyfileobj(file, copy)

    _kept((flat, tensors, (), [label, fill.__name__, options, free]), make, read, write, later)


def _kept(
    about: tuple[Any, ...], make: Callable[[], Any], read: Callable[[Path], Any], write: Callable[[Any, Path], None],
    later: list[Callable[[], None]] | None,
) -> Any:  # fmt: skip
    """What `read` finds in the folder that belongs to `about` (see `_key`), or what `make` makes, which `write` keeps
    there."""
    began = time.perf_counter()
    try:
        key, size = _key(*about)
    except Exception as error:  # such as code that depends on values: exporting says why
        log.info("what is converted cannot be kept: %s", first_line(error))
        return make()
    folder = cache_folder(FOLDER) / key
    if is_sound(folder):
        try:
            found = read(folder)
        except Exception as error:
            log.info("what was converted before cannot be read (%s): converting again", first_line(error))
        else:
            tally["read"] += 1
            log.info("converted before: read in %.2g s", time.perf_counter() - began)
            return found
    found = make()
    tally["converted"] += 1
    took_s = time.perf_counter() - began

    def keep_it() -> None:
        try:
            keep(folder, functools.partial(write, found), size)
            log.info("converted in %.3g s, kept for the next start", took_s)
        except Exception as error:  # a full disk, or what OpenVINO cannot write
            log.info("converted in %.3g s, which could not be kept: %s", took_s, first_line(error))

    if later is None:
        keep_it()
    else:
        later.append(keep_it)
    return found


class Notes(logging.Handler):
    """What a recipe's lines say of themselves (the logger ``optimized``) while this context lasts, and what they
    learned."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.learned: dict[str, Any] = {}

    def __enter__(self) -> Notes:
        self._usual = _OPTIMIZED.level
        _OPTIMIZED.setLevel(logging.INFO)
        _OPTIMIZED.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        _OPTIMIZED.removeHandler(self)
        _OPTIMIZED.setLevel(self._usual)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.learned |= getattr(record, "learned", {})


def _repeat_notes(path: Path, part: Any) -> None:
    """Say what was said when the model was converted, and put the layers that were chosen into `part`."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    for line in kept["lines"]:
        _OPTIMIZED.info("%s", line, extra={"learned": kept["learned"]})
    if part is not None:
        part.update(kept["part"])


def _key(
    flat: torch.nn.Module, tensors: Sequence[torch.Tensor], samples: Sequence[Sequence[torch.Tensor]], said: list[Any]
) -> tuple[str, int]:
    """What must be equal for a converted model to fit, and the bytes of its weights. Raises where the model's operators
    depend on values."""
    digest = hashlib.sha256()
    machine: list[Any] = [
        cpu_name(),
        sorted(cpu_flags()),
        torch.get_num_threads(),
        # Not `get_float32_matmul_precision`: it raises where a program has used these settings.
        torch.backends.fp32_precision,  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
    ]
    if any(tensor.is_cuda for tensor in tensors):
        machine += [torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.version.cuda]
    digest.update(json.dumps([*said, installed(_PACKAGES), machine], sort_keys=True).encode())
    for name in ("_openvino", "_openvino_int8", "_openvino_text", "_tensorrt", "runtime"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())  # the code that converts
    used = _add_operators(flat, tensors, digest)
    size = sum(tensor.nbytes for tensor in used)
    if 2 * size > MOST_BYTES:
        raise ValueError("it is larger than what may be kept")
    for tensor in itertools.chain(used, *samples):
        _add_values(tensor, digest)
    return digest.hexdigest()[:40], size


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
        raise TypeError(f"an operator is given {type_text(value)}")

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
        digest.update(f"{tensor.shape}{tensor.dtype}{tensor.stride()}{tensor.device}{operators.meet(tensor)}".encode())
    # Code that torch is to compile and meets beside such a mode it would run eagerly ever after.
    with torch.compiler.set_stance("force_eager"), _unchanged(flat), _as_if_exporting(), mode, operators:
        results = flat(*given)
    digest.update(str([operators.tell(result) for result in results]).encode())
    return operators.with_data


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Put every attribute of every module back afterwards, parameters and buffers too: what a model remembers of this
    call has no data."""
    met = set[int]()
    before = [Attributes(module, met, values=False) for module in model.modules()]
    try:
        yield
    finally:
        for attributes in before:
            attributes.put_back()


@contextmanager
def _as_if_exporting() -> Iterator[None]:
    """Models that look whether they are exported remember nothing of the call then."""
    with ExitStack() as flags:
        for name in ("_is_compiling_flag", "_is_exporting_flag"):
            if hasattr(torch.compiler, name):
                flags.enter_context(replaced(torch.compiler, name, lambda _: True))
        yield


def _add_values(tensor: torch.Tensor, digest: Any) -> None:
    digest.update(f"{tensor.shape}{tensor.dtype}{tensor.stride()}".encode())
    plain = tensor.detach().contiguous().reshape(-1)
    digest.update(plain.view(torch.uint8).cpu().numpy().data if plain.numel() else b"")
