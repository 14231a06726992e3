"""What a plan runs on: ranks that only pretend to communicate, and a model whose tensors have no memory."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from fettle.errors import UsageError, first_line
from fettle.parallel.timeline import Timeline
from fettle.patches import replaced
from fettle.workload import map_tensors


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """A process group of `world_size` ranks that pretends to communicate; this process is rank 0."""
    from torch.distributed._tools import fake_collectives  # noqa: F401 (registers collectives for fake tensors)
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError("a process group exists already: plan in a process of its own, outside torchrun")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        with (
            replaced(_fsdp_param, "_chunk_with_empty", lambda _: _first_chunk),
            replaced(DeviceMesh, "_concatenate", _with_values),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _with_values(original: Callable[..., Any]) -> Any:
    """FSDP2 joins its mesh with that of tensor parallelism, and looks for its rank in it: in a real tensor."""

    def joined(meshes: Any) -> Any:
        with unset_fake_temporarily():
            return original(meshes)

    return staticmethod(joined)


@contextmanager
def unpacked() -> Iterator[None]:
    """transformers reads off position ids that no row holds several texts. Of fake ones it cannot, and would build a
    mask, because of which grouped keys and values are repeated for all heads."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "find_packed_sequence_indices"):
        yield
        return
    with replaced(masking, "find_packed_sequence_indices", lambda _: lambda position_ids: None):
        yield


@contextmanager
def converting() -> Iterator[None]:
    """Lets a factory convert its model (`.to`, `.half`, `.cuda`): fake weights torch would swap, and cannot."""
    converted: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}  # by the old one's id: shared stay shared

    def convert(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        children: Any = self.children() if recurse else ()
        for child in children:
            child._apply(fn)
        for name, old in self._parameters.items():
            if old is not None and id(old) not in converted:
                with torch.no_grad():
                    converted[id(old)] = old, torch.nn.Parameter(fn(old), old.requires_grad)
            if old is not None:
                self._parameters[name] = converted[id(old)][1]
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    with replaced(torch.nn.Module, "_apply", lambda _: convert):
        yield


def _first_chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """FSDP2 cuts every parameter into the shards of all ranks and takes its own: rank 0's, the first and largest.

    With 64 ranks a fifth of a plan's time went into making the other 63.
    """
    return [tensor.narrow(dim, 0, -(-tensor.shape[dim] // num_chunks))]


@contextmanager
def fsdp_marks(timeline: Timeline) -> Iterator[None]:
    """Let the timeline know what FSDP2 allocates for communication, gathered parameters and its flat buffers, and what
    it frees by shrinking a storage, which the dispatcher does not see."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def marked(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            with timeline.communicating():
                return original(self, *args, **kwargs)

        return method

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.UntypedStorage, "resize_", timeline.resizing))
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            stack.enter_context(replaced(FSDPParamGroup, name, marked))
        yield


def fake_model(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model with fake weights on the CPU; shared weights stay shared."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = torch.nn.Parameter(fake_tensors(parameter.detach()), parameter.requires_grad)
        memo[id(parameter)] = fake
    for buffer in model.buffers():
        memo[id(buffer)] = fake_tensors(buffer)
    try:
        copied: torch.nn.Module = copy.deepcopy(model, memo)
    except Exception as error:
        raise UsageError(f"the model cannot be copied ({first_line(error)}): give a factory that builds it") from error
    return copied


def fake_tensors(tree: Any) -> Any:
    """The same shapes, strides and types under the mode that is active, on the CPU."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    return map_tensors(fake, tree)
