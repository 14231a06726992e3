"""What a model remembers of its calls, and how it forgets them: a look at it must change none of its later answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors are equal; others may not be compared."""
    alike = one.dtype == other.dtype and one.device == other.device and one.layout == other.layout == torch.strided
    return alike and torch.equal(one, other)


def put_value_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor have its earlier value again, unless its shape has changed."""
    if tensor.shape == value.shape and not is_same(tensor, value):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(value)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a module's buffers by name. A lazy one has no value yet."""
    buffers = module.named_buffers()
    return {name: one.detach().clone() for name, one in buffers if not torch.nn.parameter.is_lazy(one)}


def put_modes_back(modes: Sequence[tuple[torch.nn.Module, bool]]) -> None:
    """Let modules, each after those that it is part of, have the modes again that they had. One whose class does more
    than torch where it is switched, such as merging weights into others, is told to do that again."""
    for child, training in modes:
        if child.training != training and type(child).train is not torch.nn.Module.train:
            child.train(training)
    for child, training in modes:
        child.training = training


def to_eval(module: torch.nn.Module) -> bool:
    """Switch a module to eval mode; False for what torch.export made, which has the one mode it was exported in."""
    try:
        module.eval()
    except NotImplementedError:
        return False
    return True


def state_kept(model: Any) -> Any:
    """A context that puts back what calls change in a model: buffers whose shape stays, attributes of its modules, and
    what those hold. Of a callable that is no module these are its own attributes, and the modules among them.

    A lazy module stays what its first call made of it. So does a module that got other parameters or submodules, with
    all that it is part of, whose attributes may say that this was done.
    """
    import contextlib
    import inspect

    owner = model.__self__ if inspect.ismethod(model) else model
    has = getattr(owner, "__dict__", None)

    def modules_of() -> Any:
        held = [owner] if isinstance(owner, torch.nn.Module) else has.values() if isinstance(has, dict) else []
        return [one for one in held if isinstance(one, torch.nn.Module)]

    @contextlib.contextmanager
    def kept() -> Any:
        module: Any = owner if isinstance(owner, torch.nn.Module) else torch.nn.ModuleList(modules_of())
        alive = [*module.parameters(), *module.modules()]  # kept alive, so that no `id` is used again
        buffers, met = buffers_of(module), set[int]()
        torchs = vars(torch.nn.Module()).keys()  # parameters, buffers, submodules, hooks and the mode
        before = [(child, type(child), made_of(child), Attributes(child, met, torchs)) for child in module.modules()]
        is_plain = module is not owner and isinstance(has, dict)
        own = Attributes(owner, met, values=False, deep=False) if is_plain else None
        try:
            yield
        finally:
            for name, buffer in module.named_buffers():
                if name in buffers:
                    put_value_back(buffer, buffers[name])
            rebuilt = {id(child) for child, kind, made, _ in before if type(child) is kind and made_of(child) != made}
            for child, kind, _, attributes in before:
                if type(child) is kind and not (rebuilt and rebuilt & {id(one) for one in child.modules()}):
                    attributes.put_back()
            if own is not None and [*module] == modules_of():
                own.put_back()
            del alive

    return kept()


def made_of(module: torch.nn.Module) -> list[Any]:
    """A module's own parameters, with how often each was written into, and its own submodules."""
    if isinstance(module, torch.jit.ScriptModule):  # its parameters are new objects each time
        return []
    items = module._parameters.items()
    parameters = [(name, one) for name, one in items if one is not None and not torch.nn.parameter.is_lazy(one)]
    children = [(name, id(one)) for name, one in module._modules.items()]
    return [*children, *((name, id(one), 0 if one.is_inference() else one._version) for name, one in parameters)]


class Attributes:
    """A module's attributes `but` some, and what lists, dictionaries, generators and, if it is to be `deep`, objects in
    them hold, and the `values` of tensors. What another module has `met`, and holds as well, is that one's."""

    from collections import OrderedDict, defaultdict, deque

    HOLD_OTHERS = (list, dict, set, deque, OrderedDict, defaultdict)

    def __init__(self, module: Any, met: set[int], but: Any = (), values: bool = True, deep: bool = True) -> None:
        self.module, self.met, self.but, self.values, self.deep = module, met, but, values, deep
        self.buffers = {*getattr(module, "_buffers", {}).keys()}
        self.attributes = {name: value for name, value in vars(module).items() if name not in but}
        self.held: list[tuple[Any, Any]] = []
        for value in self.attributes.values():
            self._note(value)

    @staticmethod
    def _is_object(value: Any) -> bool:
        """Whether it is an object of a class that is no part of Python or torch, whose locks are their own."""
        import sys

        library = type(value).__module__.partition(".")[0]
        others = library == "torch" or library in sys.stdlib_module_names - {"__main__"}
        return not others and not callable(value) and hasattr(value, "__dict__")

    def _note(self, value: Any) -> None:
        import copy

        is_noted = isinstance(value, (torch.Tensor, torch.Generator, tuple)) or type(value) in self.HOLD_OTHERS
        is_object = self.deep and not is_noted and self._is_object(value)
        if not (is_noted or is_object) or id(value) in self.met:
            return
        self.met.add(id(value))
        if isinstance(value, torch.Tensor):
            if self.values and type(value) is torch.Tensor and value.layout == torch.strided:
                self.held.append((value, value.detach().clone()))
        elif isinstance(value, torch.Generator):
            self.held.append((value, value.get_state()))
        else:
            value = vars(value) if is_object else value
            if not isinstance(value, tuple):
                self.held.append((value, copy.copy(value)))
            for item in [*value.values()] if isinstance(value, dict) else value:
                self._note(item)

    def put_back(self) -> None:
        """Let the module have these attributes again, and no others, and let them hold what they held."""
        for one, had in self.held:
            if isinstance(one, torch.Tensor):
                put_value_back(one, had)
            elif isinstance(one, torch.Generator):
                one.set_state(had)
            else:
                one.clear()
                one.extend(had) if hasattr(one, "extend") else one.update(had)
        now, registered = vars(self.module), self.buffers | {*getattr(self.module, "_buffers", {}).keys()}
        for name in now.keys() - self.attributes.keys() - registered - {*self.but}:
            del now[name]
        now.update({name: value for name, value in self.attributes.items() if name not in registered})


STATE_KEPT = (is_same, put_value_back, buffers_of, state_kept, made_of, Attributes)
"""What `state_kept` needs in a file of its own."""
