"""From a recipe to plain PyTorch source, and from that source to the tuned callable.

The file that the user is handed and the code that fettle measured are one text. It defines
``optimize(model, batches)``, or ``optimize(model, batches, call)`` for a workload with a call of its own; to train a
model it defines ``train`` (`_loop.py`).
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from typing import Any

from fettle.batches import FROM_LOADER
from fettle.recipe import Recipe
from fettle.techniques._base import Code, Facts
from fettle.techniques._catalogue import batch_factor, codes, uses_ranks
from fettle.techniques._generation import writing
from fettle.techniques._loop import LOOP_MAIN, LOOP_USE, loop
from fettle.techniques._pipeline import Part, calls_of_parts, put_part
from fettle.techniques._ranks import endless
from fettle.techniques._state_kept import STATE_KEPT
from fettle.workload import Target, map_tensors, spread, wait_for

_BEFORE_START = ("LD_PRELOAD", "MALLOC_CONF")
"""Variables that a process which is running already takes no notice of."""

_USE = """

if __name__ == "__main__":
    print("The model that this was tuned for lives in another program, so this file cannot build it. Use it there:")
    print("    from optimized import optimize")
    print("    fast = optimize(model, [batch]{call})  # changes the model in place; call fast as the model was called")
"""
"""What a file without a factory says when it is run."""

_MAIN = '''

def load():
    """Build the workload that was tuned: its model, sample batches and call."""
    import importlib.util
    import inspect
    import sys
    from collections import OrderedDict, UserDict
    from collections.abc import Sequence
    from itertools import islice

{made}
    if isinstance(made, tuple):
        model, batches, call = made[0], made[1], None
    elif isinstance(made, dict):
        model, batches, call = made["model"], made["inputs"], made.get("call")
        if made.get("draft") is not None:  # a smaller model that guesses what this one writes
            model.__dict__["draft"] = made["draft"].eval()
    else:
        model, batches, call = made.model, made.inputs, made.call
    if inspect.ismethod(model) and isinstance(model.__self__, torch.nn.Module) and call is None:
        model, call = model.__self__, model.__func__
    if isinstance(batches, torch.utils.data.DataLoader):  # a list in it was a tuple before it was collated
        batches = [tuple(batch) if type(batch) is list else batch for batch in islice(batches, {most})]
    several = isinstance(batches, Sequence) and not isinstance(batches, (str, bytes, tuple))
    batches = list(batches) if several else [batches]
    batches = [dict(batch) if isinstance(batch, UserDict) or type(batch) is OrderedDict else batch for batch in batches]
    return model, batches, call


if __name__ == "__main__":
    import time

{ranks}    torch.manual_seed(0)
    model, batches, call = load()
    run = optimize(model, batches[:{calibration}]{call})
    times = []
    while {going}
        args, kwargs = spread({given})
        start = time.perf_counter()
        run(*args, **kwargs)
{wait}        times.append(time.perf_counter() - start)
    later = sorted(times[1:])
    say(f"first call: {{times[0] * 1e3:.1f}} ms")
    say(f"later calls: {{later[len(later) // 2] * 1e3:.3g}} ms (median of {{len(later)}})")
'''


def source(
    recipe: Recipe,
    facts: Facts,
    *,
    heading: str = "",
    target: Target | None = None,
    calibration: int = 1,
) -> str:
    """The source of ``optimized.py`` for `recipe`, to call a model or to train one.

    With the `target` of the workload the file runs as it stands; without it it says how to use it. `calibration` is how
    many of the workload's first batches are handed to ``optimize``.
    """
    waits = facts.device != "cpu"
    if facts.mode == "training":
        title, ranks = _over_ranks(heading or f"A training loop: {recipe}.", recipe, facts)
        titled = [(title, code) for _, title, code in codes(recipe, facts)]
        lines = [*preamble(title, [Code(helpers=(endless,)), *(code for _, code in titled)]), "", *loop(titled, facts)]
        main, use = LOOP_MAIN, LOOP_USE
    else:
        title, ranks = _over_ranks(heading or f"Optimised for inference: {recipe}.", recipe, facts)
        used: list[Callable[..., Any]] = [spread, *[map_tensors] * facts.changes_inputs, *[wait_for] * waits]
        lines = _functions(recipe, facts, title, Code(helpers=() if target is None else tuple(used)))
        main, use = _MAIN, _USE.format(call=_call(facts))
    if target is not None:
        going = "len(times) < 2 or (len(times) < 50 and sum(times[1:]) < 1):  # about a second after the first"
        if uses_ranks(recipe):
            going = "len(times) < 11:  # as often in each rank: they wait for each other"
        lines += [
            main.format(
                made=_lines_that_make(target), calibration=max(1, calibration), call=_call(facts), most=FROM_LOADER,
                wait=f'        wait_for("{facts.device}")\n' * waits, ranks=ranks,
                given="map_tensors(torch.clone, batches[0], caches=True)" if facts.changes_inputs else "batches[0]",
                going=going, samples=facts.samples * batch_factor(recipe),
            )
        ]  # fmt: skip
    elif heading:
        lines += [use]
    text = "\n".join(lines).rstrip() + "\n"
    ast.parse(text)  # a syntax error in a technique's lines shows here, not in the user's program
    return text


def _over_ranks(title: str, recipe: Recipe, facts: Facts) -> tuple[str, str]:
    """The heading of a file, and what its main part begins with, which is where `say` is defined: of several ranks each
    has its own GPU and one speaks."""
    if not uses_ranks(recipe):
        return title, "    say = print\n"
    several = f" --nnodes {facts.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
    each = f"{several if facts.nodes > 1 else ''} --nproc-per-node {facts.ranks // facts.nodes}"
    where = ", on each node" if facts.nodes > 1 else ""
    device = '    torch.cuda.set_device(int(__import__("os").environ["LOCAL_RANK"]))\n'
    one = '    say = print if __import__("os").environ["RANK"] == "0" else lambda text: None\n'
    title = f"{title.rstrip()}\n\nStart it with{where}: torchrun{each} optimized.py\n"
    return title, (device if facts.device == "cuda" else "") + one


def _functions(recipe: Recipe, facts: Facts, heading: str, more: Code) -> list[str]:
    """A function for the whole model; of a pipeline also one for each part that changes, which it puts in its place."""
    by_part: dict[str, list[tuple[str, Code]]] = {"": []}
    for part, title, code in codes(recipe, facts):
        by_part.setdefault(part, []).append((title, code))
    whole = by_part.pop("")
    if by_part:  # after the mode, before the call
        names: dict[str, str] = {}
        for part in by_part:
            name = re.sub(r"\W", "_", f"optimize_{part}")
            names[part] = name if name not in names.values() else f"{name}_{len(names)}"
        places: list[str] = []
        helpers: list[Callable[..., Any]] = [Part, put_part]
        looked_at = [part for part, found in by_part.items() if _looks_at_batches(found)]
        if looked_at:
            call = "call(model, *args, **kwargs)" if facts.custom_call else "model(*args, **kwargs)"
            helpers += [spread, map_tensors, calls_of_parts, *STATE_KEPT]
            places += [
                "def run_all():",
                "    for batch in batches:",
                "        args, kwargs = spread(batch)",
                f"        {call}",
                "",
                f"seen = calls_of_parts(model, {looked_at}, run_all)",
            ]
        for part, name in names.items():
            batches = f'seen["{part}"]' if part in looked_at else "[]"
            places.append(f'put_part(model, "{part}", {name}, {batches})')
        whole.append((f"parts: {', '.join(by_part)}", Code(helpers=tuple(helpers), prepare=tuple(places))))
        whole += [(title, code.whole) for found in by_part.values() for title, code in found if code.whole]
    whole = _on_copies(whole, facts)
    by_part = {part: _on_copies(found, facts.parts[part]) for part, found in by_part.items()}
    every = [code for found in (whole, *by_part.values()) for _, code in found]
    lines = preamble(heading, [more, *([writing(every)] if facts.generates else []), *every])
    for part, found in by_part.items():
        lines += ["", *_optimize(found, facts.parts[part], names[part], f"The part {part}: change it in place"), ""]
    return [*lines, "", *_optimize(whole, facts)]


def _looks_at_batches(found: Sequence[tuple[str, Code]]) -> bool:
    return any(_uses_name("\n".join(code.prepare), "batches") for _, code in found)


def _on_copies(found: list[tuple[str, Code]], facts: Facts) -> list[tuple[str, Code]]:
    """The same lines, with sample batches of their own where the model writes into what it is given."""
    if not (facts.changes_inputs and _looks_at_batches(found)):
        return found
    copies = "batches = [map_tensors(torch.clone, batch, caches=True) for batch in batches]"
    return [("sample batches: copies, which the model may write into", Code(helpers=(map_tensors,), prepare=(copies,))),
            *found]  # fmt: skip


def preamble(heading: str, lines_of: Sequence[Code]) -> list[str]:
    """The lines before the function: what it is, variables for the process, imports, helpers."""
    environment = {key: value for code in lines_of for key, value in code.environment.items()}
    helpers: dict[str, Callable[..., Any]] = {}
    for helper in (helper for code in lines_of for helper in code.helpers):
        if (other := helpers.setdefault(helper.__name__, helper)) is not helper:
            raise ValueError(f"{other.__module__} and {helper.__module__} both have a helper {helper.__name__}")
    said = re.sub(r'"(?="")|"$', r'\\"', heading.replace("\\", r"\\"))  # a workload may have any name
    lines = [f'"""{said}"""', ""]
    before_start = {key: environment.pop(key) for key in _BEFORE_START if key in environment}
    if environment or before_start:
        lines += ["import os", "import sys", ""]
    if before_start:
        lines += _start_again(before_start)
    if environment:
        lines += [
            f"measured_with = {dict(sorted(environment.items()))}",
            'if "torch" in sys.modules:  # this process has begun with others',
            "    measured_with |= os.environ",
            "os.environ.update(measured_with)",
            "",
        ]
    sources = [textwrap.dedent(inspect.getsource(helper)).rstrip() for helper in helpers.values()]
    if any(_uses_name(source, "Any") for source in sources):
        lines += ["from typing import Any", ""]
    lines += ["import torch", ""]
    for source in sources:
        lines += ["", source, ""]
    return lines


def _start_again(variables: dict[str, str]) -> list[str]:
    """Lines that start the program once more with `variables`, which the linker and the allocator read at its start."""
    shell = " ".join(f"{key}={value}" for key, value in variables.items())
    return [
        "# The allocator can only be chosen before the process starts. Run by itself this file starts once more with",
        "# it; start a program that imports it like this:",
        f"#   {shell} python program.py",
        f'if __name__ == "__main__" and os.environ.get("LD_PRELOAD") != "{variables["LD_PRELOAD"]}":',
        f"    os.environ.update({variables})",
        "    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])",
        "",
    ]


def load(source: str, label: str) -> Callable[..., Callable[..., Any]]:
    """The function ``optimize`` or ``train`` of a rendered source; its lines show in tracebacks under `label`."""
    filename = f"<{label}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    # A real module under a name of its own: torch.compile looks functions up through sys.modules.
    module = types.ModuleType(f"optimized_{hashlib.sha256(source.encode()).hexdigest()[:16]}")
    module.__file__ = filename
    sys.modules[module.__name__] = module
    exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)  # no future imports of this file
    found = module.train if hasattr(module, "train") else module.optimize
    assert callable(found)
    return found  # type: ignore[no-any-return]


def _optimize(
    titled: list[tuple[str, Code]], facts: Facts, name: str = "optimize", does: str = "Change `model` in place"
) -> list[str]:
    found = [code for _, code in titled]
    takes = "takes a prompt and writes after it" if facts.generates else "takes what the call took"
    body = [
        f"def {name}(model, batches{_call(facts)}):",
        f'    """{does} and return the fast callable, which {takes}."""',
    ]
    body += [f"    {line}" for code in found for line in code.setup]
    for title, code in titled:
        if code.prepare:
            body += ["", f"    # {title}"] + [f"    {line}" for line in code.prepare]
    inputs = [line for code in found for line in code.inputs]
    outputs = [line for code in reversed(found) for line in code.outputs]
    contexts = [context for code in found for context in code.contexts]
    invoke = "call(model, *args, **kwargs)" if facts.custom_call else "model(*args, **kwargs)"
    if facts.generates:
        code = writing(found)
        body += ["", f"    decoder = {code.decoder}"]
        inputs = [f'kwargs.setdefault("new_tokens", {facts.new_tokens})', *inputs]
        invoke = f"{code.writer}(decoder, *args, **kwargs)"
    if not (inputs or outputs or contexts or facts.custom_call):
        return [*body, "", "    return model"]
    body += ["", "    def run(*args, **kwargs):"]
    body += [f"        {line}" for line in inputs]
    indent = "        "
    if contexts:
        body.append(f"        with {', '.join(contexts)}:")
        indent += "    "
    if outputs:
        body += [f"{indent}output = {invoke}"] + [f"{indent}{line}" for line in outputs] + [f"{indent}return output"]
    else:
        body.append(f"{indent}return {invoke}")
    if facts.generates:
        body += ["", "    run.decoder = decoder"]
    return [*body, "", "    return run"]


def _call(facts: Facts) -> str:
    """The parameter for a call of the workload's own."""
    return ", call" if facts.custom_call and not facts.generates else ""


def _lines_that_make(target: Target) -> str:
    """The lines that import the workload's module, from where the study found it, and call its factory."""
    location, _, factory = target.reference.rpartition(":")
    lines = [f"sys.path[:0] = {list(target.search_path)}"] if target.search_path else []
    if location.endswith(".py"):
        lines += [
            f"spec = importlib.util.spec_from_file_location('workload_file', {location!r})",
            "module = importlib.util.module_from_spec(spec)",
            "sys.modules['workload_file'] = module",
            "spec.loader.exec_module(module)",
        ]
    else:
        lines += [f"module = importlib.import_module({location!r})"]
    given = dict(target.arguments)
    seeded, unseeded = (f"**{ {'seed': 0} | given }", f"**{given}") if given else ("seed=0", "")
    lines += [
        f"factory = module.{factory}",
        f'made = factory({seeded}) if "seed" in inspect.signature(factory).parameters else factory({unseeded})',
    ]
    return textwrap.indent("\n".join(lines), "    ")


def _uses_name(source: str, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(ast.parse(source)))
