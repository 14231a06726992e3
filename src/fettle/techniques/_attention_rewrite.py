"""Attention written out by hand: found in a forward pass, and rewritten to scaled_dot_product_attention.

A module in whose forward a softmax runs is traced by itself, its submodules left closed. Where the graph holds
softmax(q k^T * scale + mask) v and nothing else looks at the weights, that part becomes one call of `attend`. The
module keeps its parameters and submodules, only its forward is replaced, and only for calls of the same form.
"""

from typing import Any

import torch


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
        if fill is not None:  # as numbers, since a row that is masked throughout must stay what it was
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(mask, fill)
        mask = mask.to(query.dtype)
        if mask.dim() < 2:
            mask = mask.expand(query.shape[-2], key_t.shape[-1])
    attention, key = torch.nn.functional.scaled_dot_product_attention, key_t.transpose(-2, -1)
    if query.dim() == 3:  # the fast kernels want a dimension of heads
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        return attention(query, key, value, attn_mask=mask, scale=scale).squeeze(1)
    return attention(query, key, value, attn_mask=mask, scale=scale)


def rewrite_graph(graph: torch.fx.Graph, module: torch.nn.Module) -> int:
    """Replace every attention written out in `graph` by a call of `attend`; how many there were."""
    import operator

    functional = torch.nn.functional

    def called(node: Any, functions: Any, methods: Any = ()) -> bool:
        if not isinstance(node, torch.fx.Node):
            return False
        if node.op == "call_function":
            return node.target in functions
        return node.op == "call_method" and node.target in methods

    def child(node: Any) -> Any:
        return module.get_submodule(node.target) if node.op == "call_module" else None

    def argument(node: torch.fx.Node, index: int, name: str, default: Any = None) -> Any:
        return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)

    def is_softmax(node: torch.fx.Node) -> bool:
        if isinstance(child(node), torch.nn.Softmax):
            return bool(child(node).dim == -1)
        return called(node, (torch.softmax, functional.softmax), ("softmax",)) and argument(node, 1, "dim") == -1

    def is_identity(node: torch.fx.Node) -> bool:
        """Dropout that is off, or a change of type: nothing between the weights and the values."""
        if isinstance(child(node), torch.nn.Dropout):
            return not child(node).training or child(node).p == 0
        if called(node, (functional.dropout,)):
            return argument(node, 2, "training", True) is False or argument(node, 1, "p", 0.5) == 0
        return called(node, (), ("to", "type_as", "float", "half", "bfloat16"))

    def product(node: Any, second: bool) -> Any:
        """Left and right operand of a matrix product; an einsum that is q k^T gives (q, k^T)."""
        if called(node, (torch.matmul, torch.bmm, operator.matmul), ("matmul", "bmm", "__matmul__")):
            return argument(node, 0, "input"), argument(node, 1, "other", node.kwargs.get("mat2"))
        if called(node, (torch.einsum,)) and isinstance(node.args[0], str) and len(node.args) == 3:
            inputs, _, out = node.args[0].replace(" ", "").partition("->")
            left, _, right = inputs.partition(",")
            if min(len(left), len(right), len(out)) < 3:
                return None
            if second and left[:-2] == right[:-2] and left[-1] == right[-2] and out == left[:-1] + right[-1]:
                return node.args[1], node.args[2]
            if not second and left[:-2] == right[:-2] and left[-1] == right[-1] and out == left[:-1] + right[-2]:
                with graph.inserting_before(node):
                    return node.args[1], graph.call_method("transpose", (node.args[2], -2, -1))
        return None

    def only_user(node: torch.fx.Node) -> Any:
        return next(iter(node.users)) if len(node.users) == 1 else None

    done = 0
    for softmax in [node for node in graph.nodes if is_softmax(node)]:
        last, user = softmax, only_user(softmax)
        while user is not None and is_identity(user):
            last, user = user, only_user(user)
        after = product(user, True) if user is not None else None
        if after is None or after[0] is not last or after[1] is last:
            continue
        scores: Any = argument(softmax, 0, "input")
        scales: list[Any] = []
        before, mask, fill = None, None, None
        while isinstance(scores, torch.fx.Node) and len(scores.users) == 1:
            before = product(scores, False)
            if before is not None:
                break
            if called(scores, (operator.add, operator.iadd, torch.add), ("add", "add_")) and mask is None:
                # the scores are the side that leads back to a product
                sides = list(scores.args[:2])
                if len(sides) < 2 or scores.kwargs or scales:
                    break
                follow = next((side for side in sides if leads_to_product(side, called, product)), None)
                if follow is None:
                    break
                mask = sides[1] if follow is sides[0] else sides[0]
                scores = follow
            elif called(scores, (torch.masked_fill,), ("masked_fill", "masked_fill_")) and mask is None:
                if scales:
                    break
                scores, mask, fill = scores.args[0], argument(scores, 1, "mask"), argument(scores, 2, "value")
            elif called(scores, (operator.mul, operator.imul, torch.mul), ("mul", "mul_")) and len(scores.args) == 2:
                follow = next((side for side in scores.args if leads_to_product(side, called, product)), None)
                if follow is None:
                    break
                scales.append((scores.args[1] if follow is scores.args[0] else scores.args[0], False))
                scores = follow
            elif called(scores, (operator.truediv, operator.itruediv, torch.div), ("div", "div_")):
                if len(scores.args) != 2:
                    break
                scales.append((scores.args[1], True))
                scores = scores.args[0]
            elif is_identity(scores) and not isinstance(child(scores), torch.nn.Dropout):
                scores = scores.args[0]
            else:
                break
        if before is None:
            continue
        with graph.inserting_before(user):
            new = graph.call_function(attend, (*before, after[1], tuple(scales), mask, fill))
        user.replace_all_uses_with(new)
        done += 1
    return done


def leads_to_product(node: Any, called: Any, product: Any) -> bool:
    """Whether a node is a matrix product, or one that was scaled or converted."""
    for _ in range(4):
        if not isinstance(node, torch.fx.Node):
            return False
        if product(node, False) is not None:
            return True
        if not node.args:
            return False
        node = next((arg for arg in node.args if isinstance(arg, torch.fx.Node)), None)
    return False


def manual_attention(model: torch.nn.Module, run: Any) -> list[Any]:
    """Modules with attention written out, seen while `run()` calls the model, with a rewritten forward each."""
    import inspect

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

    hooks: list[Any] = []
    for module in model.modules():
        if not isinstance(module, torch.nn.Softmax):  # its owner is what counts
            hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with Watch(), torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()

    rewritten = []
    for module, args, kwargs in found.values():
        try:
            bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
            bound.apply_defaults()
            given = dict(list(bound.arguments.items())[1:])
            fixed = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
            if not all(value is None or isinstance(value, (bool, int, float, str)) for value in fixed.values()):
                continue  # a tuple of tensors, say: out of reach of the trace
            graph = Tracer().trace(module, concrete_args=fixed)
            if rewrite_graph(graph, module):
                traced = torch.fx.GraphModule(module, graph)
                traced.graph.eliminate_dead_code()
                traced.recompile()
                rewritten.append((module, type(traced).forward, list(given), fixed))
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


def rewrite_attention(model: torch.nn.Module, run: Any) -> None:
    """Rewrite all attention that is written out by hand; an error when there is none that can be."""
    import inspect
    import logging

    processors = switch_processors(model)
    rewritten = manual_attention(model, run)
    if not rewritten and not processors:
        raise RuntimeError(f"attention: matched 0 of {sum(1 for _ in model.modules())} modules")

    def replace(module: Any, forward: Any, names: Any, fixed: Any) -> None:
        original = module.forward
        parameters = inspect.signature(original).parameters
        defaults = {name: parameters[name].default for name in names}

        def attention_forward(*args: Any, **kwargs: Any) -> Any:
            given = {**defaults, **dict(zip(names, args)), **kwargs}  # noqa: B905
            for name, value in given.items():  # the trace holds for calls of this form only
                is_tensor = isinstance(value, torch.Tensor)
                if is_tensor == (name in fixed) or (not is_tensor and value != fixed[name]):
                    return original(*args, **kwargs)
            return forward(module, *args, **kwargs)

        module.forward = attention_forward

    for each in rewritten:
        replace(*each)
    logging.getLogger("optimized").info("attention: %d modules use SDPA now", len(rewritten) + processors)


def count_manual_attention(model: torch.nn.Module, run: Any) -> int:
    """How many modules `rewrite_attention` would rewrite."""
    return len(manual_attention(model, run)) + switch_processors(model, dry=True)
