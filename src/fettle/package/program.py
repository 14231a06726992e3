"""A model as data: the graph that torch.export found as JSON, its weights as safetensors. No code, no pickle.

`torch.export.save` writes pickles, and its reader trusts the graph's text: operator names are looked up by attribute
anywhere in torch, expressions go through ``eval``, names become Python source. A package comes from outside, so every
string of the graph is checked here before torch sees it, and only computing operators pass.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fettle.errors import UsageError, first_line, refusing, type_text
from fettle.files import read_text
from fettle.package.experts import OF_TRANSFORMERS, OWN

GRAPH, WEIGHTS = "graph.json", "weights.safetensors"
TOGETHER = (
    "Where the rows of a batch belong together as one request, give the workload samples=1 and batches of several rows"
)
"""What to do with a model whose rows cannot be other clients'."""
MAX_GRAPH_BYTES = 256 << 20
_MOST_SHAPES = 4096
"""Shapes that are remembered as checked."""
_NAME = re.compile(r"[A-Za-z0-9_][\w.\-]{0,500}|")
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|mkldnn|quantized_decomposed)\.\w+(\.\w+)?|torch\.ops\.fettle\.grouped_mm\.default"
    r"|torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|wrap_with_autocast|cond|while_loop|scan)"
    r"|torch\.sym_\w+|_operator\.(getitem|add|sub|mul|truediv|floordiv|mod|pow|neg|lt|le|gt|ge|eq|ne|and_|or_|not_)"
    r"|math\.(ceil|floor|trunc|sqrt|pow)"
)
_FORBIDDEN_OPERATORS = {"from_file"}
_SYMBOL = re.compile(r"Symbol\('[suz]\d+'(, (positive|integer|nonnegative|nonzero)=True)*\)")
_EXPRESSION = re.compile(r"[\w\s+\-*/%(),.<>=!&|~]{0,2000}")
_EXPONENT = re.compile(r"Integer\(-?\d\)|Rational\(-?1, 2\)")
_EXPRESSION_WORDS = re.compile(
    r"[suz]\d+|FloorDiv|Mod|PythonMod|ModularIndexing|Where|CleanDiv|CeilDiv|CeilToInt|FloorToInt|TruncToInt|RoundToInt"
    r"|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv|ToFloat|Identity|Max|Min|Abs|Add|Mul|Pow|Integer|Rational|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|True"
    r"|Equality|Unequality|(Strict)?(LessThan|GreaterThan)"
    r"|False|oo|int_oo|\d+(\.\d+)?"
)


def export_program(
    model: torch.nn.Module, tensors: Sequence[torch.Tensor], dynamic: Sequence[Mapping[int, str]], max_rows: int
) -> torch.export.ExportedProgram:
    """The program of a module that takes tensors and returns a tuple of tensors.

    `dynamic` names, for each tensor, the dimensions that may have any size; equal names are one size. ``rows`` is the
    batch's, from 1 to `max_rows`. Raises `UsageError` with the exporter's reason.
    """
    names = {name for dims in dynamic for name in dims.values()} - {"rows"}
    sizes = {name: torch.export.Dim(name, min=1) for name in names}
    sizes["rows"] = torch.export.Dim("rows", min=1, max=max(2, max_rows))
    shapes = tuple({dim: sizes[name] for dim, name in dims.items()} or None for dims in dynamic)
    examples = [
        _two_rows(tensor) if dims.get(0) == "rows" else tensor.detach().clone()
        for tensor, dims in zip(tensors, dynamic, strict=True)
    ]
    words = "the model cannot be exported for any number of rows:"
    with refusing(words), torch.inference_mode(False), torch.no_grad():
        program = _export(model, tuple(examples), {"tensors": shapes})
    given = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    for name, dims in zip(program.graph_signature.user_inputs, dynamic, strict=True):
        if dims.get(0) == "rows" and isinstance(given[name].shape[0], int):
            raise UsageError(
                f"the model takes {given[name].shape[0]} rows and no other number of them, as one does that asks for "
                f"len(x) and not for x.shape[0]. {TOGETHER}"
            )
    _forget_types(program)
    return program


def _export(
    model: torch.nn.Module, examples: tuple[torch.Tensor, ...], shapes: dict[str, Any]
) -> torch.export.ExportedProgram:
    """Export with these sizes, within the bounds that the model has for them: as many positions as it has learned."""
    from torch._dynamo.exc import UserError
    from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

    try:
        return torch.export.export(model, examples, dynamic_shapes=shapes)
    except UserError as error:
        try:
            narrower = refine_dynamic_shapes_from_suggested_fixes(error.msg, shapes)
        except Exception:  # it suggests nothing
            raise error from None
        return torch.export.export(model, examples, dynamic_shapes=narrower)


def _forget_types(program: torch.export.ExportedProgram) -> None:
    """Let a recipe compute in other types than those that were exported with.

    Takes out the assertions of every tensor's type, conversions to the type and device that a tensor had already, the
    typed nothing that a new cache joins its first keys to, and what no output needs.
    """
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target is torch.ops.aten._assert_tensor_metadata.default:
                    module.graph.erase_node(node)
                elif _converts_nothing(node):
                    node.replace_all_uses_with(node.args[0])
                    module.graph.erase_node(node)
                elif node.target is torch.ops.aten.cat.default and node.meta["val"].dim() > 1:
                    node.update_arg(0, [one for one in node.args[0] if one.meta["val"].shape != (0,)])
            drop_unused(module.graph)
            module.recompile()


def drop_unused(graph: torch.fx.Graph) -> None:
    """Take out what no output needs: the exporter leaves what has a dropout in it, which does nothing here. A graph in
    this one stays, since torch does not look into it for what changes a tensor."""
    for node in reversed(graph.nodes):
        inner = isinstance(node.target, torch._ops.HigherOrderOperator)
        if not (node.users or inner or node.is_impure(impure_random=False)):
            graph.erase_node(node)


def _converts_nothing(node: torch.fx.Node) -> bool:
    aten = torch.ops.aten
    if node.target not in (aten.to.dtype, aten.to.device, aten.to.dtype_layout):
        return False
    arguments = (*node.args[1:], *node.kwargs.values())
    if any(value is True or isinstance(value, torch.memory_format) for value in arguments):  # a copy, another layout
        return False
    before = node.args[0].meta.get("val") if isinstance(node.args[0], torch.fx.Node) else None
    made = node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    # The program's signature names the nodes that are its outputs.
    kept = any(user.op == "output" for user in node.users)
    return (before.dtype, before.device) == (made.dtype, made.device) and not kept


def _two_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The exporter takes a dimension of 1 for a constant."""
    return (tensor.repeat(2, *[1] * (tensor.dim() - 1)) if tensor.shape[0] == 1 else tensor).detach().clone()


def save_program(program: torch.export.ExportedProgram, folder: Path) -> None:
    """Write ``graph.json`` and ``weights.safetensors``, as for the CPU, wherever the model lies."""
    from safetensors.torch import save_file
    from torch._export.serde.serialize import serialize
    from torch.export.passes import move_to_device_pass

    held = (*program.state_dict.values(), *program.constants.values())
    if any(isinstance(one, torch.Tensor) and one.device.type != "cpu" for one in held):
        program = move_to_device_pass(program, "cpu")
    parts = ("serialize_state_dict", "serialize_constants", "serialize_example_inputs")  # torch 2.11 has no such choice
    without: Any = {part: False for part in parts if part in inspect.signature(serialize).parameters}
    data = serialize(program, **without).exported_program
    graph = _plain(json.loads(data.replace(OF_TRANSFORMERS.encode(), OWN.encode())))
    try:
        _check(graph)  # a package that could not be loaded is refused now
    except ValueError as error:
        raise UsageError(f"the model cannot be packaged: {error}") from error
    parameters = set(program.graph_signature.parameters)
    weights = {
        f"{'parameter' if name in parameters else 'buffer'}:{name}": tensor
        for name, tensor in program.state_dict.items()
    }
    for name, value in program.constants.items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"the model holds {type_text(value)} that cannot be stored as a tensor")
        weights[f"constant:{name}"] = value
    (folder / GRAPH).write_text(json.dumps(graph, separators=(",", ":")), encoding="utf-8")
    # Tied weights share memory, which safetensors refuses: each name gets its own copy.
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}, folder / WEIGHTS)


def load_program(folder: Path, device: str = "cpu") -> torch.nn.Module:
    """The module of a saved program on a device, with what its graph makes there. Raises `UsageError` for others."""
    from safetensors.torch import load_file
    from torch._export.serde.serialize import SerializedArtifact, deserialize
    from torch.export.passes import move_to_device_pass

    with refusing("the package's model cannot be read:"):
        text = read_text(folder / GRAPH, MAX_GRAPH_BYTES)
        graph = _plain(json.loads(text))
        _check(graph)
        if "torch.ops.quantized_decomposed." in text:
            importlib.import_module("torch.ao.quantization.fx._decomposed")  # makes these operators known to torch
        weights = load_file(folder / WEIGHTS)
    state: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        use, _, path = name.partition(":")
        if use == "parameter":
            state[path] = torch.nn.Parameter(tensor, requires_grad=False)
        elif use in ("buffer", "constant"):
            (state if use == "buffer" else constants)[path] = tensor
        else:
            raise UsageError(f"{WEIGHTS} holds a tensor of unknown use: {name[:80]!r}")
    artifact = SerializedArtifact(json.dumps(graph).encode(), state, constants, None)  # type: ignore[arg-type]
    with refusing(f"the package's model cannot be read by torch {torch.__version__}:"):
        program = deserialize(artifact)
        if device != "cpu":
            program = move_to_device_pass(program, device)
        module: torch.nn.Module = program.module()
    check = size_check(module)

    def before(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if not torch.compiler.is_compiling():  # compiled code has guards of its own
            check(inputs)
            if module.validate_inputs:
                module.validate_inputs = False  # torch's own check, at each call

    module.register_forward_pre_hook(before, prepend=True)
    module.training = False
    # An exported program cannot change its mode and says so by raising, also to those that only pass a mode along.
    module.train = lambda mode=True: module  # type: ignore[method-assign]
    module.eval = lambda: module  # type: ignore[method-assign]
    return module


def size_check(module: torch.nn.Module) -> Callable[[tuple[torch.Tensor, ...]], None]:
    """What raises `UsageError` where a loaded program takes no inputs of these sizes, and looks at them only where
    their shapes are new: each time, it costs more than a tiny model.

    What it checks are sizes that were fixed or are equal to each other, of inputs whose types the runner has made.
    """
    from torch.export._unlift import _check_input_constraints_for_module

    seen: set[tuple[torch.Size, ...]] = set()

    def check(tensors: tuple[torch.Tensor, ...]) -> None:
        shapes = tuple([tensor.shape for tensor in tensors])
        if shapes in seen:
            return
        try:
            _check_input_constraints_for_module(module, tensors, {})
        except RuntimeError as error:
            why = first_line(error).removeprefix("RuntimeError: ").partition(". If you meant")[0]
            raise UsageError(f"the model takes no inputs of these sizes: {why}") from error
        if len(seen) >= _MOST_SHAPES:
            seen.clear()
        seen.add(shapes)

    return check


def _plain(graph: Any) -> Any:
    """The graph without what only helps debugging, and without its guards, which torch would run as Python."""
    if not isinstance(graph, dict) or "graph_module" not in graph:
        raise ValueError(f"{GRAPH} is not an exported program")
    graph["guards_code"] = []
    for table in tables(graph):
        if "metadata" in table:
            table["metadata"] = {}
    return graph


def tables(value: Any) -> Iterator[dict[str, Any]]:
    """Every table in a tree of JSON, outer ones first: the caller may change one before those in it follow."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from tables(item)


def _check(value: Any, key: str = "") -> None:
    """Raise ValueError for any string that is not what stands in its place."""
    if isinstance(value, dict):
        for name, item in value.items():
            # A size that is a multiple of another has its range under that expression.
            _check(name, "expr_str" if key == "range_constraints" and not _NAME.fullmatch(name) else "")
            _check(item, name)
    elif isinstance(value, list):
        for item in value:
            _check(item, key)
    elif isinstance(value, str):
        if key in ("target", "as_operator"):
            if not _OPERATOR.fullmatch(value) or _FORBIDDEN_OPERATORS & set(value.split(".")):
                raise ValueError(f"the operator {value[:80]!r} may not be in a package")
        elif key == "expr_str":
            bare = _SYMBOL.sub("s0", value)
            words = re.findall(r"[A-Za-z_0-9.]+", bare)
            if not _EXPRESSION.fullmatch(bare) or not all(_EXPRESSION_WORDS.fullmatch(word) for word in words):
                raise ValueError(f"not an expression of sizes: {value[:80]!r}")
            _check_powers(bare)
        elif key in ("in_spec", "out_spec"):
            _check_tree(json.loads(value))
        elif key in ("as_float", "as_floats"):
            float(value)  # an infinity is text in JSON; what is no number raises ValueError
        elif key in ("as_string", "as_strings"):
            pass  # an argument of an operator: it is quoted wherever it is printed
        elif key == "torch_version":
            if not re.fullmatch(r"[\w.+]{1,40}", value):
                raise ValueError("not a version of torch")
        elif not _NAME.fullmatch(value):
            raise ValueError(f"not a name in a graph: {value[:80]!r}")


def _check_powers(expression: str) -> None:
    """Raise ValueError for what may be a number of any length: torch computes numbers while it reads them."""
    try:
        calls = [call for call in ast.walk(ast.parse(expression.strip(), mode="eval")) if isinstance(call, ast.Call)]
    except SyntaxError as error:
        raise ValueError(f"not an expression of sizes: {expression[:80]!r}") from error
    powers = [[ast.unparse(argument) for argument in call.args] for call in calls if ast.unparse(call.func) == "Pow"]
    small = all(len(one) == 2 and "Pow" not in one[0] and _EXPONENT.fullmatch(one[1]) for one in powers)
    if not small or "**" in expression or "<<" in expression:
        raise ValueError(f"a power of sizes that is too large: {expression[:80]!r}")


def _check_tree(spec: Any) -> None:
    """Only Python's own containers may be in a structure: naming another type would look it up. Their keys are plain: a
    table among them names a module, which torch imports."""
    allowed = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict", None)
    for table in tables(spec):
        if table.get("type") not in allowed:
            raise ValueError(f"a structure of {str(table['type'])[:80]!r} may not be in a package")
        if any(tables(json.loads(table.get("context") or "null"))):
            raise ValueError("a structure whose keys are no plain values may not be in a package")
