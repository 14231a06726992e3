"""The whole forward pass recorded once as a CUDA graph, and launched with one call."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fettle.techniques._base import Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._exported import flatten


class Graphed:
    """A model recorded as CUDA graphs, one for each of the first sixteen kinds of input (shapes, and values of what is
    not on the GPU) at the first call with it. A graph holds memory, so further kinds, and those for which there is none
    left, are run as they are."""

    def __init__(self, model: Any) -> None:
        from threading import Lock

        self.model = model
        self.graphs: dict[Any, Any] = {}
        self.most = 16
        self.lock = Lock()  # all calls share the inputs of a graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils import _pytree as pytree

        leaves, spec = flatten((args, kwargs))
        key = (spec, *map(self.kind, leaves))
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda), -1)
        on: Any = torch.cuda.device  # work on another than the current device would not be recorded
        with self.lock, on(device):
            if key not in self.graphs and not self.add(key, leaves, spec):
                return self.model(*args, **kwargs)
            graph, inputs, outputs, out_spec = self.graphs[key]
            for own, given in zip(inputs, leaves, strict=True):
                if isinstance(own, torch.Tensor):
                    own.copy_(given, non_blocking=True)
            graph.replay()
            # copies, since the next replay writes into the same memory
            results = [item.clone() if isinstance(item, torch.Tensor) else item for item in outputs]
        return pytree.tree_unflatten(results, out_spec)

    def kind(self, leaf: Any) -> Any:
        """What of an argument is the same in each replay: of a tensor that is not on the GPU its values, too, which
        kernels are given as numbers."""
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        values = None if leaf.is_cuda else bytes(leaf.detach().reshape(-1).contiguous().view(torch.uint8).numpy())
        return leaf.shape, leaf.dtype, values

    def add(self, key: Any, leaves: list[Any], spec: Any) -> bool:
        """Record this kind of input, if another graph can be kept; whether it was."""
        import logging

        if len(self.graphs) == self.most:
            return False
        try:
            self.graphs[key] = self.record(leaves, spec)
            return True
        except torch.OutOfMemoryError:
            if not self.graphs:
                raise
            self.most = len(self.graphs)
        torch.cuda.empty_cache()  # only now: an error that is handled holds tensors
        logging.getLogger("optimized").info("no memory for more than %d CUDA graphs", self.most)
        return False

    def record(self, leaves: list[Any], spec: Any) -> Any:
        """Record one call on inputs like `leaves`, after three that let libraries and compilers settle."""
        from torch.utils import _pytree as pytree

        inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

        def call() -> Any:
            args, kwargs = pytree.tree_unflatten(inputs, spec)  # containers of its own: a model may add to them
            return self.model(*args, **kwargs)

        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        torch.clear_autocast_cache()  # or casts of weights that are cached would not be in the graph
        with torch.cuda.graph(graph):
            output = call()
        torch.clear_autocast_cache()
        return (graph, inputs, *flatten(output))


@register
class CudaGraphs(Technique):
    name = "cuda_graphs"
    order = 670
    title = "CUDA graphs"
    default = "off"
    of_module = True
    records = frozenset({"on"})
    needs: ClassVar[Mapping[str, str]] = {"grad": "inference_mode"}

    def levels(self, facts: Facts) -> list[Level]:
        why_not = ""
        if facts.device != "cuda":
            why_not = "the work is not on a CUDA device"
        elif facts.custom_call:
            why_not = "the workload has a call of its own, and a graph holds one forward"
        elif facts.changes_buffers:
            why_not = "the model changes its own buffers when it is called, and recording calls it several times"
        elif facts.shapes_vary:
            why_not = "each input calls it in other shapes, and a graph has one"
        else:
            why_not = facts.no_copies or facts.not_exported
        return [Level("off", "as given"), Level("on", "the forward pass is recorded and replayed", why_not)]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        compiled, runtime = recipe.levels.get("compile", "off"), recipe.levels.get("runtime", "torch")
        if compiled in ("reduce-overhead", "max-autotune"):
            return f"compile={compiled} records CUDA graphs itself"
        if runtime not in ("torch", "exported"):
            return f"runtime={runtime} launches its own kernels"
        if recipe.levels.get("grad", "grad") == "grad":
            return "a graph cannot be recorded with autograd: needs grad=inference_mode or no_grad"
        return ""

    def bundles(self, facts: Facts) -> list[Bundle]:
        return [Bundle(40, {"cuda_graphs": "on"})]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(helpers=(flatten, Graphed), prepare=("model = Graphed(model)",))
