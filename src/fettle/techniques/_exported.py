"""Helpers shared by the techniques that export a model: any pytree in, plain tensors through, the same pytree out."""

from typing import Any

import torch


def spread(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one batch."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return batch, {}
    if type(batch) is dict:
        return (), batch
    return (batch,), {}


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of a tree. Dataclasses that torch does not know yet are made known."""
    import dataclasses

    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten(tree)
    unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
    for kind in unknown:
        torch.export.register_dataclass(kind)
    if unknown:
        return flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, int, float, bool, str, type(None), torch.dtype, torch.device)):
            raise RuntimeError(f"a {type(leaf).__name__} among inputs or outputs cannot be exported")
    return leaves, spec


def exported_program(flat: torch.nn.Module, tensors: Any) -> Any:
    """The model as one graph. Where that cannot be, the error says first that it was this."""
    try:
        return torch.export.export(flat, tuple(tensors))
    except Exception as error:
        raise RuntimeError(f"torch.export cannot take this model: {type(error).__name__}: {error}") from error


class Exported:
    """A model run by another runtime, with one engine for each shape of its input, built at the first call.

    `build(flat, tensors, samples)` returns the engine, a function from a list of tensors to a list of tensors; `flat`
    is the model as a module from tensors to a tuple of tensors. `samples` are the flat tensors of those `batches`
    that have the same shape.
    """

    def __init__(self, model: torch.nn.Module, build: Any, batches: Any = ()) -> None:
        self.model = model
        self.build = build
        self.samples = [flatten(spread(batch))[0] for batch in batches]
        self.engines: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils import _pytree as pytree

        leaves, spec = flatten((args, kwargs))
        key = self.key(leaves)
        if key not in self.engines:
            self.engines[key] = self.make(leaves, spec, key)
        engine, constants, out_spec = self.engines[key]
        results = iter(engine([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]))
        # None marks the place of a tensor among the constants that the model returned
        return pytree.tree_unflatten([next(results) if item is None else item[0] for item in constants], out_spec)

    @staticmethod
    def key(leaves: list[Any]) -> Any:
        """What one engine is good for: the shapes and types of the tensors, and the other values."""
        return tuple(
            (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        )

    def make(self, leaves: list[Any], spec: Any, key: Any) -> Any:
        """Build the engine for inputs like `leaves`, and note the structure of the output."""
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
                seen["constants"] = [None if isinstance(item, torch.Tensor) else (item,) for item in results]
                # An input that is returned unchanged is cloned: OpenVINO cannot give two tensors one name.
                own = {id(tensor) for tensor in tensors}
                results = [item.clone() if id(item) in own else item for item in results]
                return tuple(item for item in results if isinstance(item, torch.Tensor))

        def plain(values: list[Any]) -> list[torch.Tensor]:
            return [value.detach().clone() for value in values if isinstance(value, torch.Tensor)]

        # Tensors that were made in inference mode cannot be traced: leave it, and take copies.
        with torch.inference_mode(False), torch.no_grad():
            samples = [plain(sample) for sample in self.samples if self.key(sample) == key]
            engine = self.build(Flat(), plain(leaves), samples)
        return engine, seen["constants"], seen["spec"]
