"""Attention written out by hand: found in a forward pass, and rewritten to scaled_dot_product_attention.

A module in whose forward a softmax runs is traced by itself, its submodules left closed. Where the graph holds
softmax(q k^T * scale + mask) v and nothing else looks at the weights, that part becomes one call of `attend`. The
module keeps its parameters and submodules, only its forward is replaced, and only for calls of the same form.
"""

from typing import Any

import torch

from fettle.techniques._state_kept import STATE_KEPT, state_kept


def attend(
    query: torch.Tensor, key_t: torch.Tensor, value: torch.Tensor, scales: Any, mask: Any, fill: Any
) -> torch.Tensor:
    """softmax(query key_t * scale + mask) value; `fill` is what `mask` writes where it is a boolean mask."""
    if any(isinstance(factor, torch.Tensor) and factor.numel() > 1 for factor, _ in scales):
        scores = query @ key_t  # a scale for each head, say: as it was written
        for factor, divides in scales:
            scores = scores / factor if divides else scores * factor
        if mask is not None:
            scores = scores + mask if fill is None else scores.masked_fill(mask, fill)
        return scores.softmax(-1).to(value.dtype) @ value
    scale = 1.0
    for factor, divides in scales:
        if isinstance(factor, torch.Tensor):
            query = query / factor if divides else query * factor
        else:
            scale = scale / factor if divides else scale * factor
    if mask is not None:
        if fill is not None:  # as numbers: a boolean mask would change a row that is masked throughout
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(mask, fill)
        mask = mask.to(query.dtype)
        if mask.dim() < 2:
            mask = mask.expand(query.shape[-2], key_t.shape[-1])
    attention, key = torch.nn.functional.scaled_dot_product_attention, key_t.transpose(-2, -1)
    if query.dim() == 3:  # the fast kernels need a dimension of heads
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        return attention(query, key, value, attn_mask=mask, scale=scale).squeeze(1)
    return attention(query, key, value, attn_mask=mask, scale=scale)


def kind_of(node: Any, module: torch.nn.Module) -> str:
    """What a node of a traced forward does, as far as attention is made of it; empty for anything else."""
    spellings = {
        "softmax": "softmax", "matmul": "matmul", "bmm": "matmul", "__matmul__": "matmul", "einsum": "einsum",
        "add": "add", "iadd": "add", "add_": "add", "mul": "mul", "imul": "mul", "mul_": "mul",
        "div": "div", "div_": "div", "truediv": "div", "itruediv": "div",
        "masked_fill": "fill", "masked_fill_": "fill", "dropout": "dropout",
        # A cast between scores and softmax, or between weights and values, changes nothing here.
        "to": "nothing", "type_as": "nothing", "float": "nothing", "half": "nothing", "bfloat16": "nothing",
    }  # fmt: skip
    if not isinstance(node, torch.fx.Node):
        return ""
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        if child._forward_hooks or child._forward_pre_hooks:  # somebody looks at the weights
            return ""
        if isinstance(child, torch.nn.Dropout):
            return "" if child.training and child.p else "nothing"
        return "softmax" if isinstance(child, torch.nn.Softmax) and child.dim == -1 else ""
    if node.op not in ("call_function", "call_method"):
        return ""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    kind = spellings.get(name, "")
    if kind == "softmax":
        return kind if argument(node, 1, "dim") == -1 else ""
    if kind == "dropout":
        return "nothing" if argument(node, 2, "training", True) is False or argument(node, 1, "p", 0.5) == 0 else ""
    return kind


def argument(node: torch.fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by place or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def operands(node: Any, module: torch.nn.Module, second: bool = False) -> Any:
    """Left and right of a matrix product, and whether the right one is yet to be transposed; None for other nodes.

    An einsum is one where it reads as query key^T, or with `second` as weights value.
    """
    kind = kind_of(node, module)
    if kind == "matmul":
        return argument(node, 0, "input"), argument(node, 1, "other", node.kwargs.get("mat2")), False
    if kind != "einsum" or not isinstance(node.args[0], str) or len(node.args) != 3:
        return None
    inputs, _, out = node.args[0].replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    if min(len(left), len(right), len(out)) < 3 or left[:-2] != right[:-2]:
        return None
    summed, kept = (right[-2], right[-1]) if second else (right[-1], right[-2])
    fits = left[-1] == summed and out == left[:-1] + kept
    return (node.args[1], node.args[2], not second) if fits else None


def leads_to_product(node: Any, module: torch.nn.Module) -> bool:
    """Whether a node is a matrix product, or one that was scaled or converted."""
    for _ in range(4):
        if operands(node, module) is not None:
            return True
        before = node.args if isinstance(node, torch.fx.Node) else ()
        node = next((arg for arg in before if isinstance(arg, torch.fx.Node)), None)
    return False


def read_scores(scores: Any, module: torch.nn.Module) -> Any:
    """(query, key, key is to be transposed), scales, mask and fill of scores, read from the softmax backwards; None
    where they are not made so, or where something else looks at them on the way."""
    scales: list[Any] = []
    mask, fill = None, None
    while isinstance(scores, torch.fx.Node) and len(scores.users) == 1:
        product = operands(scores, module)
        if product is not None:
            return product, tuple(scales), mask, fill
        kind, sides = kind_of(scores, module), list(scores.args[:2])
        if kind in ("add", "fill") and (mask is not None or scales):
            return None  # two masks, or one that would be scaled
        if kind == "nothing":
            scores = argument(scores, 0, "input")
        elif kind == "fill":
            mask, fill = argument(scores, 1, "mask"), argument(scores, 2, "value")
            if not isinstance(fill, (int, float)) or fill > -1e9:
                return None  # it is added to the scores, which must not matter beside it
            scores = argument(scores, 0, "input")
        elif len(sides) < 2 or (scores.kwargs and kind):
            return None  # add(..., alpha=2), say
        elif kind == "div":
            scores, factor = sides
            scales.append((factor, True))
        elif kind in ("add", "mul"):
            if not leads_to_product(sides[0], module):
                sides.reverse()  # the scores are the side that leads back to a product
            if not leads_to_product(sides[0], module):
                return None
            scores, other = sides
            if kind == "mul":
                scales.append((other, False))
            elif isinstance(other, torch.fx.Node):  # softmax takes no notice of a number that all have more
                mask = other
        else:
            return None
    return None


def rewrite_graph(graph: torch.fx.Graph, module: torch.nn.Module) -> int:
    """Replace every attention written out in `graph` by a call of `attend`; how many there were."""

    def only_user(node: torch.fx.Node) -> Any:
        return next(iter(node.users)) if len(node.users) == 1 else None

    done = 0
    for softmax in [node for node in graph.nodes if kind_of(node, module) == "softmax"]:
        weights, user = softmax, only_user(softmax)
        while kind_of(user, module) == "nothing":
            weights, user = user, only_user(user)
        out = operands(user, module, second=True)
        read = read_scores(argument(softmax, 0, "input"), module)
        if out is None or out[0] is not weights or out[1] is weights or read is None:
            continue
        (query, key, transpose), scales, mask, fill = read
        with graph.inserting_before(user):
            key_t = graph.call_method("transpose", (key, -2, -1)) if transpose else key
            new = graph.call_function(attend, (query, key_t, out[1], scales, mask, fill))
        user.replace_all_uses_with(new)
        done += 1
    return done


def manual_attention(model: torch.nn.Module, run: Any) -> list[Any]:
    """Modules with attention written out, seen while `run()` calls the model, with a rewritten forward each."""
    import contextlib
    import copy
    import inspect

    from torch.utils import _pytree as pytree

    stack: list[Any] = []
    found: dict[int, Any] = {}

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax) and stack:
                found.setdefault(id(stack[-1][0]), stack[-1])
            return func(*args, **(kwargs or {}))

    class Tracer(torch.fx.Tracer):
        proxy_buffer_attributes = True  # a mask kept in a buffer is cut to the length of the input

        def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
            return True

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        stack.append((module, args, kwargs))

    def leave(module: Any, args: Any, output: Any) -> None:
        stack.pop()

    # Of a softmax its owner is what counts; TorchScript takes no hooks.
    seen = [one for one in model.modules() if not isinstance(one, (torch.nn.Softmax, torch.jit.ScriptModule))]
    rewritten = []
    with state_kept(model):
        with contextlib.ExitStack() as hooks, Watch(), torch.no_grad():
            for module in seen:
                hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
            run()

        for module, args, kwargs in found.values():
            if "forward" in vars(module):
                continue  # one of its own: the trace would be of its class's
            try:
                bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
                bound.apply_defaults()
                given = dict(list(bound.arguments.items())[1:])
                fixed = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
                if not all(value is None or isinstance(value, (bool, int, float, str)) for value in fixed.values()):
                    continue  # a tuple of tensors, say: out of reach of the trace
                twin = copy.copy(module)
                containers = [(now, copy.copy(now)) for now in vars(module).values() if type(now) in (list, dict)]
                graph = Tracer().trace(twin, concrete_args=fixed)
                remembers = any(isinstance(leaf, torch.fx.Proxy) for leaf in pytree.tree_leaves(vars(twin)))
                for now, then in containers:
                    now.clear()
                    now.extend(then) if isinstance(now, list) else now.update(then)
                # What nobody uses may change something in place.
                kept = {node for node in graph.nodes if not node.users or node.op == "placeholder"}
                if not remembers and rewrite_graph(graph, module):
                    traced = torch.fx.GraphModule(twin, graph)
                    traced.graph.eliminate_dead_code(kept.__contains__)
                    traced.recompile()
                    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}  # made by a call, maybe
                    constants = {
                        name: value for name, value in vars(twin).items() if name in read or name not in vars(module)
                    }
                    rewritten.append((module, type(traced).forward, list(given), fixed, constants))
            except Exception:  # what cannot be traced stays as it is
                continue
    return rewritten


def switch_processors(model: torch.nn.Module, dry: bool = False) -> int:
    """Give diffusers attention that is written out its processor for SDPA; how many there are."""
    manual: list[Any] = [m for m in model.modules() if type(getattr(m, "processor", None)).__name__ == "AttnProcessor"]
    if manual and not dry:
        from diffusers.models.attention_processor import AttnProcessor2_0

        for module in manual:
            module.set_processor(AttnProcessor2_0())  # type: ignore[no-untyped-call]
    return len(manual)


def as_traced(module: Any, original: Any, forward: Any, defaults: Any, fixed: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a module by its rewritten `forward`, or by the `original` where the call has another form."""
    given = {**defaults, **dict(zip(defaults, args)), **kwargs}  # noqa: B905
    for name, value in given.items():  # the trace holds for calls of one form only
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor == (name in fixed) or (not is_tensor and value != fixed[name]):
            return original(*args, **kwargs)
    return forward(module, *args, **kwargs)


def rewrite_attention(model: torch.nn.Module, run: Any) -> None:
    """Rewrite all attention that is written out by hand; an error when there is none that can be."""
    import functools
    import inspect
    import logging

    processors = switch_processors(model)
    rewritten = manual_attention(model, run)
    # In a pipeline another part may have the same modules.
    before = [one for one in model.modules() if getattr(vars(one).get("forward"), "func", None) is as_traced]
    if not rewritten and not processors and not before:
        raise RuntimeError(f"attention: matched 0 of {sum(1 for _ in model.modules())} modules")

    for module, forward, names, fixed, constants in rewritten:
        vars(module).update(constants)
        parameters = inspect.signature(module.forward).parameters
        defaults = {name: parameters[name].default for name in names}
        # A partial function, whose copy belongs to the module's copy
        module.forward = functools.partial(as_traced, module, module.forward, forward, defaults, fixed)
    logging.getLogger("optimized").info("attention: %d modules use SDPA now", len(before) + len(rewritten) + processors)


def count_manual_attention(model: torch.nn.Module, run: Any) -> int:
    """How many modules `rewrite_attention` would rewrite."""
    return len(manual_attention(model, run)) + switch_processors(model, dry=True)


REWRITE = (
    attend, kind_of, argument, operands, leads_to_product, read_scores, rewrite_graph, manual_attention,
    switch_processors, as_traced, rewrite_attention, *STATE_KEPT,
)  # fmt: skip
"""All that `rewrite_attention` needs in a file of its own."""
