"""Helpers shared by the techniques that export a model: any pytree in, plain tensors through, the same pytree out."""

from typing import Any

import torch

from fettle.workload import spread


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of a tree. Dataclasses that torch does not know yet, and what is a dict in all but its type,
    such as what transformers' tokenizers return, are made known."""
    import dataclasses
    from collections import UserDict
    from enum import Enum

    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten(tree)
    plain = (torch.Tensor, int, float, bool, str, Enum, type(None), torch.dtype, torch.device)
    others = [leaf for leaf in leaves if not isinstance(leaf, plain)]
    for kind in {*map(type, others)}:
        if dataclasses.is_dataclass(kind):
            torch.export.register_dataclass(kind)
            return flatten(tree)
        if issubclass(kind, UserDict):

            def unflatten(values: Any, names: Any, kind: Any = kind) -> Any:
                return kind(dict(zip(names, values, strict=True)))

            pytree.register_pytree_node(kind, lambda given: (list(given.values()), tuple(given)), unflatten)
            return flatten(tree)
    if others:
        name = type(others[0]).__name__
        instead = ": call the model with use_cache=False" if name.endswith("Cache") else ""
        raise RuntimeError(f"values of type {name} among inputs or outputs cannot be exported{instead}")
    return leaves, spec


def loads_cuda_libraries() -> bool:
    """Whether torch can load what AOTInductor has compiled for CUDA: 2.11 ends with a segmentation fault."""
    return not torch.__version__.startswith("2.11.")


def openvino_core() -> Any:
    """The runtime: one for the process, never let go.

    On a CPU with AMX its plugin gives the thread a signal stack, and unmaps that stack when the last runtime goes, also
    where that happens in another thread. The next signal with a handler (a DataLoader's worker ends) then kills.
    """
    import openvino

    if not hasattr(openvino, "process_core"):
        openvino.process_core = openvino.Core()
    return openvino.process_core


def exported_program(flat: torch.nn.Module, tensors: Any, free: Any = ()) -> Any:
    """The model as one graph. `free` has for each tensor the dimensions that may have any size; none: all are fixed.

    Where that cannot be, the error says first that it was this.
    """
    sizes = {"tensors": tuple(dict.fromkeys(dims, torch.export.Dim.AUTO) for dims in free)} if any(free) else None
    try:
        program = torch.export.export(flat, tuple(tensors), dynamic_shapes=sizes)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if "inference tensor" in why.lower():
            why = "it holds tensors made in torch.inference_mode(): build it, and call `optimize`, outside of that"
        raise RuntimeError(f"torch.export cannot take this model: {why}") from error
    given = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    for name, dims in zip(program.graph_signature.user_inputs, free, strict=False):
        fixed = [dim for dim in dims if not isinstance(given[name].shape[dim], torch.SymInt)]
        if fixed:
            raise RuntimeError(f"dimension {fixed[0]} of an input can have one size only in this model")
    return program


class Exported:
    """A model run by another runtime, in engines that are built when they are first needed.

    `build(flat, tensors, samples, free)` returns an engine, a function from a list of tensors to a list of tensors;
    `flat` is the model as a module from tensors to a tuple of tensors. `samples` are the flat tensors of those
    `batches` that the engine is for. `free` has for each tensor the dimensions that may have any size.

    The first few shapes, `own`, have an engine each, for that is the fastest. All others share one, in which those
    dimensions are free in which shapes have differed so far; its first answer for each shape is held against the
    model's. Where the model or the runtime allows no such engine, or it is wrong, a shape has its own, `MOST` at a
    time; where one cannot be built, after others could, the model itself answers.
    """

    from threading import RLock

    MOST = 64
    BUILDING = RLock()
    """One engine is built at a time, whichever threads call."""

    def __init__(self, model: torch.nn.Module, build: Any, batches: Any = (), own: int = 4) -> None:
        self.model = model
        self.build = build
        self.own = own
        self.names: dict[Any, Any] = {}  # of keyword arguments, in the order in which they first came
        self.samples = [self.given(*spread(batch)) for batch in batches]
        self.engines: dict[Any, Any] = {}  # by a call's `key`
        self.shared: dict[Any, Any] = {}  # by `kind`: free dimensions and their engine, or None
        self.right: set[Any] = set()  # keys for which the shared engine was checked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils import _pytree as pytree

        leaves, spec = self.given(args, kwargs)
        key = self.key(leaves, spec)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        on: Any = torch.cuda.device  # engines are loaded and launched on the current device
        with on(next((tensor.device for tensor in tensors if tensor.is_cuda), -1)):
            found = self.engines.get(key)
            if found is None:
                with self.BUILDING:
                    found = self.engines.get(key) or self.find(leaves, spec, key)
                    while len(self.engines) >= self.MOST:
                        del self.engines[next(iter(self.engines))]
                    self.engines[key] = found
            engine, parts, out_spec = found
            if engine is None:
                return self.model(*args, **kwargs)
            results = engine(tensors)
        return pytree.tree_unflatten([results[part] if isinstance(part, int) else part[0] for part in parts], out_spec)

    def given(self, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """Leaves and structure of the arguments, the same in whatever order keywords are written."""
        names = self.names.setdefault(frozenset(kwargs), tuple(kwargs))
        return flatten((args, {name: kwargs[name] for name in names}))

    @staticmethod
    def key(leaves: list[Any], spec: Any) -> Any:
        """The structure, the shapes and types of the tensors, and the other values, which `repr` tells apart: 1, 1.0
        and True are equal."""
        parts = [
            (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in leaves
        ]
        return (spec, *parts)

    @staticmethod
    def kind(key: Any) -> Any:
        """A key without the sizes."""
        return tuple((len(item[0]), *item[1:]) if isinstance(item, tuple) else item for item in key)

    @staticmethod
    def differing(keys: Any) -> list[list[int]]:
        """For each tensor the dimensions in which keys of one kind differ."""
        sizes = zip(*([item[0] for item in key if isinstance(item, tuple)] for key in keys), strict=True)
        return [[dim for dim, each in enumerate(zip(*shapes, strict=True)) if len({*each}) > 1] for shapes in sizes]

    def find(self, leaves: list[Any], spec: Any, key: Any) -> Any:
        """The engine for inputs like `leaves`, with the structure of its output."""
        kind = self.kind(key)
        keys = [(self.key(*sample), sample[0]) for sample in self.samples]
        alike = [leaves, *(sample for other, sample in keys if self.kind(other) == kind)]
        known = {key, *(other for other in [*self.engines, *(other for other, _ in keys)] if self.kind(other) == kind)}
        free = self.differing(known)
        like_it = [sample for other, sample in keys if other == key]
        if any(free) and (len(known) > self.own or (self.samples and not like_it)):
            shared = self.shared.get(kind, ([[]] * len(free), None))
            if shared and any({*new} - {*old} for new, old in zip(free, shared[0], strict=True)):
                shared = self.shared[kind] = self.free_engine(alike, spec, free)
                self.right.clear()
            elif shared and key not in self.right and not self.is_right(shared[1], leaves, spec):
                shared = None
            if shared:
                self.right.add(key)
                return shared[1]
        try:
            return self.make(leaves, spec, like_it, [])
        except Exception as error:
            if not self.engines:
                raise
            self.say("inputs of other sizes are left to the model itself", error)
            return None, (), spec

    def is_right(self, made: Any, leaves: list[Any], spec: Any) -> bool:
        """Whether the shared engine answers inputs of a size that is new as the model does: a model may do something
        else from some size on, and an engine has the one way that its example took."""
        try:
            self.check(made, leaves, spec)
        except Exception as error:
            self.say("this size has an engine of its own", error)
            return False
        return True

    @staticmethod
    def say(what: str, why: Any) -> None:
        """A line for whoever listens to the logger ``optimized``."""
        import logging

        logging.getLogger("optimized").info("%s: %s", what, str(why).partition("\n")[0])

    def free_engine(self, alike: list[Any], spec: Any, free: list[list[int]]) -> Any:
        """`free` and an engine for any sizes of those dimensions; None where there can be none."""

        def tensors(leaves: list[Any]) -> list[torch.Tensor]:
            return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def free_sizes(leaves: list[Any]) -> list[int]:
            return [tensor.shape[dim] for tensor, dims in zip(tensors(leaves), free, strict=True) for dim in dims]

        # The exporter takes a size of 1 for a constant: the example is the one with the largest smallest size.
        example = max(alike, key=lambda leaves: min(free_sizes(leaves)))
        try:
            engine = self.make(example, spec, alike[1:], free)
            self.check(engine, alike[0], spec)
        except Exception as error:
            self.say("each shape has an engine of its own", error)
            return None
        self.say("one engine for any size of these dimensions of the inputs", free)
        return free, engine

    def check(self, made: Any, leaves: list[Any], spec: Any) -> None:
        """Raise where an engine answers these inputs otherwise than the model, by more than few bits explain."""
        from torch.utils import _pytree as pytree

        engine, parts, _ = made
        if any(isinstance(part, tuple) and isinstance(part[0], (int, float, str)) for part in parts):
            raise RuntimeError("the model returns numbers or texts, which may depend on the sizes")
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        with torch.no_grad():
            wanted = [item for item in flatten(self.model(*args, **kwargs))[0] if isinstance(item, torch.Tensor)]
        results = engine([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        for one, other in zip(wanted, [results[part] for part in parts if isinstance(part, int)], strict=True):
            off = (other.double() - one.double()).norm() if one.shape == other.shape else torch.inf
            if not off <= 0.1 * one.double().norm() + 1e-6:
                raise RuntimeError(f"for other sizes its answer {list(other.shape)} would be wrong")

    def make(self, leaves: list[Any], spec: Any, samples: list[Any], free: list[Any]) -> Any:
        """Build an engine for inputs like `leaves`, and note the structure of the output: of each of its leaves which
        of the engine's results it is, or a tuple of what it is otherwise."""
        from torch.utils import _pytree as pytree

        model, seen = self.model, {}

        class Flat(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                self.training = model.training  # not train(): an exported module takes none

            def forward(self, *tensors: torch.Tensor) -> Any:
                given = iter(tensors)
                mixed = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
                args, kwargs = pytree.tree_unflatten(mixed, spec)
                results, seen["spec"] = flatten(self.model(*args, **kwargs))
                given_ids = {id(tensor) for tensor in tensors}
                places: dict[int, int] = {}
                seen["parts"] = [
                    places.setdefault(id(item), len(places)) if isinstance(item, torch.Tensor) else (item,)
                    for item in results
                ]
                # OpenVINO cannot give two tensors one name: what is returned twice is one result, an input is cloned.
                found = {id(item): item for item in results if isinstance(item, torch.Tensor)}
                return tuple(item.clone() if number in given_ids else item for number, item in found.items())

        def plain(values: list[Any]) -> list[torch.Tensor]:
            return [value.detach().clone() for value in values if isinstance(value, torch.Tensor)]

        # Tensors made in inference mode cannot be traced: leave that mode, and clone them.
        with torch.inference_mode(False), torch.no_grad():
            engine = self.build(Flat(), plain(leaves), [plain(sample) for sample in samples], free)
        return engine, seen["parts"], seen["spec"]
