"""The probe: everything that `Facts` says about a workload and the machine it runs on.

Runs in a worker process and costs one or two forward passes. Nothing about the workload may make it fail or be left
changed by it: what cannot be found out stays at its default.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.utils.parametrize import ParametrizationList

from fettle.generate import GenerationWorkload, brief
from fettle.machine import find_libraries, installed
from fettle.procs.limits import usable_cores
from fettle.techniques._attention_rewrite import count_manual_attention
from fettle.techniques._base import CATALOGUE
from fettle.techniques._exported import flatten
from fettle.techniques._facts import Facts, Padding
from fettle.techniques._generation import generation_facts
from fettle.techniques._host import cpu_flags, gpu
from fettle.techniques._linear import is_conv1d
from fettle.techniques._pipeline import looks_at
from fettle.techniques._ranks import forward_of_torch, repeated_blocks
from fettle.techniques._state_kept import buffers_of, is_same, put_modes_back, state_kept, to_eval
from fettle.techniques._tensor import tensor_plan
from fettle.techniques._tiled_attention import with_decomposed_bias
from fettle.techniques._transformers import has_window, hf_attention, is_transformers, quietly
from fettle.techniques.convolution import is_wide
from fettle.techniques.fused_linear import fed_alike
from fettle.techniques.ragged import padding_of
from fettle.techniques.skip_steps import denoiser_of
from fettle.techniques.step_cache import is_unet
from fettle.techniques.tiles import is_decoder
from fettle.workload import Workload, device_of, fresh, leaves, rows_of, spread, tensors


def probe_facts(workload: Workload, *, allow_batch: bool = False) -> Facts:
    """Look at a workload and at this machine. `allow_batch` is the user's word that the batch size may change."""
    if workload.parts:
        return _pipeline_facts(workload, allow_batch)
    return _facts(workload, allow_batch, _forward_facts(brief(workload)))


def _pipeline_facts(workload: Workload, allow_batch: bool) -> Facts:
    """Those of a pipeline, with each part's, which is looked at as a model of its own on what it is called with."""
    module, names, copies = workload.model, workload.parts, list[Any]()
    assert isinstance(module, torch.nn.Module)

    def ready(batch: Any) -> Callable[[], Any]:
        copies.append((_copy(batch), batch))
        torch.manual_seed(0)
        return partial(workload.run, module, copies[-1][0])

    with unchanged(workload, module):
        looks = looks_at(module, names, workload.inputs, ready)
    writes = any(not _equal(own, batch) for own, batch in copies)
    # The first look takes longer than later ones: it counts only where not every part is called in the second.
    counted = looks[1:] if all(looks[1].given.values()) else looks
    seconds = sum(one.seconds for one in counted) / len(counted)
    spent = {name: sum(one.costs[name].seconds for one in counted) / len(counted) for name in names}
    found = {}
    for name in sorted(names, key=lambda name: -spent[name]):
        given = [one.given[name] for one in looks if one.given[name]]
        part = Workload(module.get_submodule(name), given[0])
        called = any(one.given[name] for one in looks[: max(1, len(workload.calibration))])
        facts = _facts(part, False, _forward_facts(part))
        found[name] = replace(
            facts, part=name, calls=max(one.costs[name].calls for one in counted), seconds=spent[name],
            share=spent[name] / seconds, calibration_batches=len(workload.calibration),
            uncalled="" if called else "no input of the first half calls this part: put one that does first",
            uneven_steps=_uneven_steps(module.get_submodule(name), list(itertools.chain(*given))),
            shapes_vary=len(given) > 1 and {*map(_shapes, given[0])}.isdisjoint(map(_shapes, given[1])),
        )  # fmt: skip
    differs = any(one.train_mode_differs for one in found.values()) or any(
        child.training and _random_or_batch_dependent(child) for child in module.modules()
    )
    changes = any(one.changes_buffers for one in found.values())
    forward = {"train_mode_differs": differs, "changes_buffers": changes, "changes_inputs": writes}
    whole = _facts(workload, allow_batch, forward)
    return replace(whole, parts=found, seconds=seconds)


def _facts(workload: Workload, allow_batch: bool, forward: dict[str, Any]) -> Facts:
    """All facts, of which `forward` has those that calls of the model have shown."""
    model = workload.model
    module = model if isinstance(model, torch.nn.Module) else torch.nn.Module()
    given = tensors(workload.inputs[0])
    parameters = list(module.parameters())
    devices = [tensor.device.type for tensor in [*parameters, *module.buffers()]]
    generation = generation_facts(workload)
    device = statistics.mode(devices) if devices else device_of(model, workload.inputs[0])
    return Facts(
        is_module=isinstance(model, torch.nn.Module),
        is_scripted=isinstance(model, torch.jit.ScriptModule),
        forward_of_torch=forward_of_torch(module),
        training=bool(_in_train_mode(workload)),
        **forward,
        custom_call=workload.call is not None or bool(generation),
        **generation,
        calibration_batches=len(workload.calibration),
        dtype=dtype_of(module),
        not_in_16_bits=_not_in_16_bits(module),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        num_linear=_count(module, torch.nn.Linear) + sum(map(is_conv1d, module.modules())),
        uneven_steps=_uneven_steps(module, [*workload.inputs, *workload.check_inputs]),
        num_conv=_count(module, torch.nn.Conv2d) + _exported(module, "aten.conv2d."),
        num_other_conv=_count(module, torch.nn.modules.conv._ConvNd)
        - _count(module, torch.nn.Conv2d)
        + _exported(module, "aten.conv1d.", "aten.conv3d.", "aten.conv_transpose"),
        num_wide_conv=sum(map(is_wide, module.modules())),
        num_4d_inputs=sum(tensor.dim() == 4 and tensor.is_floating_point() for tensor in given),
        is_channels_last=any(map(_is_channels_last, [*given, *parameters])),
        num_input_shapes=len({_shapes(batch) for batch in [*workload.inputs, *workload.check_inputs]}),
        samples=workload.samples or rows_of(workload.inputs[0]) or 1,
        padding=None if generation else _padding(workload),
        block_classes=_block_classes(module),
        hf_attention=hf_attention(module, device),
        has_window=has_window(module)
        and any(max(tensor.shape, default=0) > 256 for batch in workload.inputs for tensor in tensors(batch)),
        decomposed_bias=len(with_decomposed_bias(module)),
        is_unet=is_unet(module),
        makes_pictures=is_decoder(module),
        tensor=tensor_plan(module),
        denoiser=denoiser_of(module),
        allow_batch=allow_batch,
        **_machine(device),
    )


def dtype_of(module: torch.nn.Module) -> str:
    """The commonest floating dtype among the parameters, without ``torch.``."""
    kinds = [str(one.dtype).removeprefix("torch.") for one in module.parameters() if one.is_floating_point()]
    return statistics.mode(kinds or ["float32"])


def _not_in_16_bits(module: torch.nn.Module) -> str:
    """Which weight is made of others by something that torch lacks in bfloat16, as an orthogonal one is."""

    def made(weight: ParametrizationList) -> Any:
        return copy.deepcopy(weight).bfloat16()()

    for name, child in module.named_modules():
        if isinstance(child, ParametrizationList) and quietly(partial(made, child), None) is None:
            how = type(child[0]).__name__.strip("_")
            return f"{name.replace('.parametrizations', '')} is computed by {how}, which torch has not in 16 bits"
    return ""


def _machine(device: str) -> dict[str, Any]:
    """What there is of this machine, as fields of `Facts`."""
    return {
        "device": device,
        "physical_cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "cpu_flags": cpu_flags(),
        "packages": installed(sorted({name for technique in CATALOGUE for name in technique.packages})),
        "libraries": find_libraries(),
        **gpu(device == "cuda"),
    }


def _padding(workload: Workload) -> Padding | None:
    module = workload.model
    if not isinstance(module, torch.nn.Module):
        return None

    def found() -> Padding | None:
        module.eval()  # an exported program refuses; no padding is looked for then
        batch = _copy(workload.inputs[0])
        return padding_of(module, lambda: workload.run(module, batch))

    with unchanged(workload, module), torch.no_grad():
        return quietly(found, None)


def machine_facts(mode: str = "inference") -> Facts:
    """What can be said of this machine without a workload: a catalogue for a plain float32 module on its device."""
    return Facts(
        mode=mode,
        optimizer_levels=("foreach", "fused"),
        loader_workers=0,
        samples=8,
        padding=Padding("attention_mask", (("attention_mask", 1),), share=0.5, longest=0.9),
        training=True,
        calibration_batches=1,
        num_linear=1,
        num_conv=1,
        num_wide_conv=1,
        num_4d_inputs=1,
        num_input_shapes=2,
        uses_sdpa=True,
        uneven_sdpa=1,
        manual_attention=1,
        fed_alike=(("blocks.*", "query", "key", "value"),),
        block_classes=("Block",),
        hf_attention=("eager", "sdpa"),
        allow_batch=True,
        **_machine("cuda" if torch.cuda.is_available() else "cpu"),
    )


_EXPORTED_SDPA = torch.ops.aten.scaled_dot_product_attention.default
"""What an exported program calls."""


_NOT_OPENVINO = ("fft_", "stft", "istft", "scatter_reduce", "grouped_mm")
_NOT_ONNXRUNTIME = ("grouped_mm",)
_NOT_IN_FLOAT64 = ("conv", "lstm", "gru", "group_norm", "erf")
"""How the names of functions begin that OpenVINO 2026.4 and ONNX Runtime 1.31, in all types and in float64, cannot
compute. The products of a mixture of experts are ``grouped_mm``."""


class _SeesCalls(torch.overrides.TorchFunctionMode):
    """Notes what of the like of scaled_dot_product_attention is called, and what other runtimes cannot compute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.uneven, self.adds_by_index = False, 0, False
        self.cannot_run: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.functional.scaled_dot_product_attention, _EXPORTED_SDPA):
            self.seen = True
            tokens = sorted(item.shape[-2] for item in args[:2] if isinstance(item, torch.Tensor) and item.dim() == 4)
            self.uneven += len(tokens) == 2 and 8 * tokens[0] <= tokens[1]
        name = getattr(func, "__name__", "").partition(".")[0].strip("_")
        self.adds_by_index = self.adds_by_index or name == "index_add"
        if name.startswith(_NOT_OPENVINO):
            self.cannot_run["openvino"] = f"OpenVINO cannot compute the model's {name}"
        if name.startswith(_NOT_ONNXRUNTIME):
            self.cannot_run["onnxruntime"] = f"ONNX Runtime cannot compute the model's {name}"
        if name.startswith(_NOT_IN_FLOAT64) and getattr(args[:1] and args[0], "dtype", None) == torch.float64:
            self.cannot_run["onnxruntime"] = f"ONNX Runtime has no {name} in float64 on a CPU"
        return func(*args, **(kwargs or {}))


def _forward_facts(workload: Workload) -> dict[str, Any]:
    """Those fields of `Facts` that calls of the model show."""
    module = workload.model if isinstance(workload.model, torch.nn.Module) else torch.nn.Module()
    training = _in_train_mode(workload)
    differs = any(_random_or_batch_dependent(child) for child in training)
    watch, manual, changes, writes, adds, odd = _SeesCalls(), 0, False, False, True, ""
    alike: list[tuple[str, ...]] = []
    kinds: dict[str, None] = {}
    try:
        with unchanged(workload, module) as model, torch.no_grad():

            def outputs() -> Any:
                nonlocal writes, adds
                torch.manual_seed(0)
                batch = _copy(workload.inputs[0])
                answer = workload.run(model, batch)
                kept, added = _left(batch, workload.inputs[0])
                writes = writes or bool(added) or not kept
                adds = adds and kept and {*map(id, added)} <= {*map(id, tensors(answer))}
                return answer

            before = buffers_of(module)
            # In train mode a call may change the next one's answers.
            as_found = state_kept if training else contextlib.nullcontext
            with watch, fed_alike(module) as alike, as_found(module):
                given = outputs()
            try:
                flatten((spread(workload.inputs[0]), given))
            except RuntimeError as error:
                odd = str(error)
            floating = (tensor.dtype for tensor in tensors(given) if tensor.is_floating_point())
            kinds = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in floating)
            if training and (before or not differs):  # the user's own layers may ask for `self.training`
                with state_kept(module):
                    noise = _distance(given, outputs())
                module.eval()
                before = buffers_of(module)
                differs = _distance(given, outputs()) > 4 * noise + 1e-6 or differs
            after = dict(module.named_buffers())
            changes = any(
                not is_same(value, after[name]) for name, value in before.items()
                if name in after and value.layout == torch.strided
            )  # fmt: skip
            # transformers' models have implementations to choose from
            if not (is_transformers(module) or isinstance(workload, GenerationWorkload)):
                manual = count_manual_attention(module.eval(), outputs)  # in train mode dropout would stand in the way
    except Exception:  # the baseline trial will say what is wrong with it
        pass
    return {
        "uses_sdpa": watch.seen, "uneven_sdpa": watch.uneven, "adds_by_index": watch.adds_by_index,
        "manual_attention": manual, "train_mode_differs": differs, "changes_buffers": changes, "changes_inputs": writes,
        "adds_to_inputs": writes and adds, "fed_alike": tuple(alike), "not_exported": odd,
        "output_types": tuple(kinds), "cannot_run": watch.cannot_run,
    }  # fmt: skip


def _in_train_mode(workload: Workload) -> list[torch.nn.Module]:
    """The modules in train mode; none of an exported program, whose mode cannot be changed."""
    module = workload.model
    if not isinstance(module, torch.nn.Module):
        return []
    training = [child for child in module.modules() if child.training]
    with unchanged(workload, module):
        return training if to_eval(module) else []


def _copy(batch: Any) -> Any:
    """A batch of its own. What was computed with gradients is no leaf, and torch copies leaves only."""
    try:
        return copy.deepcopy(batch)
    except RuntimeError:
        with torch.no_grad():
            return fresh(batch)


def _left(batch: Any, given: Any) -> tuple[bool, list[torch.Tensor]]:
    """What a call has left of its batch: whether all that was `given` is as it was, and tensors that came to it."""
    was, now = dict(leaves(given, caches=True)), dict(leaves(batch, caches=True))
    kept = _equal([now.get(path) for path in was], list(was.values()))
    return kept, tensors([leaf for path, leaf in now.items() if path not in was])


def _equal(one: Any, other: Any) -> bool:
    """Whether two trees hold the same dense tensors, NaN where NaN was."""
    mine, theirs = tensors(one), tensors(other)
    return len(mine) == len(theirs) and all(
        a.layout != torch.strided or torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(mine, theirs, strict=True)
    )


def _random_or_batch_dependent(layer: torch.nn.Module) -> bool:
    drops = isinstance(layer, torch.nn.modules.dropout._DropoutNd) and layer.p > 0
    return drops or isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)


@contextlib.contextmanager
def unchanged(workload: Workload, module: torch.nn.Module) -> Iterator[Any]:
    """The model, free to be run and switched: what it remembers, modes and the random state are put back at the end."""
    modes = [(child, child.training) for child in module.modules()]
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), state_kept(workload.model):
        try:
            yield workload.model
        finally:
            put_modes_back(modes)


def _distance(one: Any, other: Any) -> float:
    """Largest relative L2 distance of the floating leaves of two outputs; infinite where they do not match."""
    worst = 0.0
    for a, b in zip(tensors(one), tensors(other), strict=False):
        if a.shape != b.shape:
            return float("inf")
        if (a.is_floating_point() or a.is_complex()) and a.numel():
            wide = torch.complex128 if a.is_complex() else torch.float64
            scale = float(a.to(wide).norm()) or 1.0
            worst = max(worst, float((a.to(wide) - b.to(wide)).norm()) / scale)
    return worst


def _shapes(batch: Any) -> tuple[Any, ...]:
    every = leaves(batch, caches=True)
    return tuple((path, tuple(leaf.shape)) for path, leaf in every if isinstance(leaf, torch.Tensor))


def _uneven_steps(module: torch.nn.Module, batches: Sequence[Any]) -> bool:
    """Whether it has recurrent layers, and batches differ in more than their rows."""
    sizes = {tuple((path, shape[1:]) for path, shape in _shapes(batch)) for batch in batches}
    return len(sizes) > 1 and _count(module, torch.nn.RNNBase) > 0


def _count(module: torch.nn.Module, kind: type[torch.nn.Module]) -> int:
    return sum(isinstance(child, kind) for child in module.modules())


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """In that layout and no other: of one channel, or one place, a tensor is in both."""
    if tensor.dim() != 4 or not tensor.is_floating_point() or tensor.layout != torch.strided:
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _block_classes(module: torch.nn.Module) -> tuple[str, ...]:
    kinds = dict.fromkeys(type(block) for block in repeated_blocks(module))
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def _exported(module: Any, *operators: str) -> int:
    """Calls of operators that begin so in an exported program, which has no modules for them any more."""
    graph = getattr(module, "graph", None)
    nodes = graph.nodes if isinstance(graph, torch.fx.Graph) else ()
    return sum(str(node.target).startswith(operators) for node in nodes)
