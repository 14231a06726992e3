"""The pages of the reference that are made from the code when the documentation is built (a hook of mkdocs).

`cli.md` from the commands, `json.md` and `schemas/*.json` from the classes whose fields become JSON, `techniques.md`
from the catalogue, `traces.md` from what the questions about a small trace answer. `contributing.md` is
CONTRIBUTING.md, which stands where those who read the source look for it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import tempfile
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import griffe
import msgspec
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fettle.cli import build
from fettle.techniques import CATALOGUE, Facts

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs: add the pages."""
    made: dict[str, Callable[[], str]] = {
        "cli.md": cli, "json.md": json_page, "techniques.md": techniques, "traces.md": traces,
    }  # fmt: skip
    for name, page in made.items():
        files.append(File.generated(config, f"reference/{name}", content=page()))
    files.append(File.generated(config, "contributing.md", content=CONTRIBUTING.read_text()))
    for output in outputs():
        text = json.dumps(schema(output), indent=1)
        files.append(File.generated(config, f"reference/schemas/{output.name}.json", content=text))
    return files


# Commands


def commands() -> Iterator[tuple[str, Any, Any]]:
    """Every command: its words, itself, and the context it is parsed in."""

    def walk(command: Any, path: str, parent: Any) -> Iterator[tuple[str, Any, Any]]:
        context = command.make_context(path.rpartition(" ")[2], [], parent=parent, resilient_parsing=True)
        if not hasattr(command, "list_commands"):
            yield path, command, context
            return
        for name in command.list_commands(context):
            yield from walk(command.get_command(context, name), f"{path} {name}", context)

    yield from walk(typer.main.get_command(build()), "fettle", None)


def cli() -> str:
    """The command line, option by option."""
    parts = [
        "# Command line",
        "",
        "What `--help` says of each command, on one page. [What they have in common](../commands.md).",
    ]
    for path, command, context in commands():
        text, *examples = re.split(r"\nExamples?\n", inspect.cleandoc(_unmarked(command.help)), maxsplit=1)
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        usage = " ".join([path, *map(_argument, arguments), "[OPTIONS]"])
        parts += ["", f"## {path}", "", text.strip(), "", "```text", usage, "```"]
        if examples:
            lines = [line.strip() for line in examples[0].splitlines() if line.strip()]
            parts += ["", "```console", *(f"$ {line}" for line in lines), "```"]
        rows = [record for param in command.params if (record := _record(param, context))]
        if rows:
            parts += ["", "| | |", "| --- | --- |", *(f"| `{name}` | {_cell(says)} |" for name, says in rows)]
    return "\n".join(parts) + "\n"


def _argument(param: Any) -> str:
    name = param.name.upper() + ("..." if param.nargs == -1 else "")
    return name if param.required else f"[{name}]"


def _record(param: Any, context: Any) -> tuple[str, str] | None:
    found = param.get_help_record(context)
    if found is None or "--help" in found[0]:
        return None
    return " ".join(found[0].split()), _unmarked(found[1])


def _unmarked(text: str | None) -> str:
    """Without the markup of rich."""
    return re.sub(r"\[/?(?:bold|dim|red|green|yellow)?\]", "", text or "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


# JSON


@dataclasses.dataclass(frozen=True)
class Output:
    """What a command prints with `--json`, or a file that it writes."""

    name: str
    where: str
    fields: Mapping[str, Any]
    """Their types."""
    more: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Fields that a class has in JSON and not in Python, by the class's name."""
    optional: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields that are not always there."""
    of: type | None = None
    """The class that has these fields and says what they are."""


def outputs() -> tuple[Output, ...]:
    """All outputs that have a schema."""
    from fettle.diagnose import Diagnosis, Finding
    from fettle.doctor import Finding as Seen
    from fettle.gate import Bisection, Gate, Judged
    from fettle.machine import Machine
    from fettle.measure import Interval, Trial
    from fettle.result import Outcome

    class Advisories(typing.TypedDict):
        checked: str
        age_days: int
        releases: int

    return (
        Output(
            "result", "`result.json`, `fettle tune --json`, `fettle report --json`",
            {"format": int, **_fields(Outcome)}, of=Outcome,
        ),
        Output(
            "comparison", "`fettle bench --json`, `fettle check --json`",
            {
                "name": str, "goal": str, "under_load": bool, "machine": Machine, "interrupted": bool,
                "another_hour": Interval | None, "left_out": list[dict[str, str]], "trials": list[Trial],
            },
            {"Trial": {"verdict": str}},
        ),
        Output(
            "gate", "`fettle bench --against REVISION --json`",
            {
                "name": str, "old": str, "new": str, "verdict": str, "reason": str, "judged": list[Judged],
                "settled_by": list[str], "notes": list[str], "seconds": float, "machine": Machine,
                "trials": list[Trial],
            }, of=Gate,
        ),
        Output(
            "bisection", "`fettle bench --bisect GOOD..BAD --json`", {**_fields(Bisection), "found": bool}, of=Bisection
        ),
        Output(
            "diagnosis", "`fettle diagnose --json`",
            {
                "name": str, "verdict": str, "machine": str, "wall_s": float, "budget": dict[str, float],
                "findings": list[Finding], "opportunities": list[Finding], "notes": list[str],
                "recordings": list[Any],
            },
            {"Finding": {"speedup_at_most": float}},
            {
                "parts": list[Any], "roofline": Any, "evidence": Any, "verified": list[Any],
                "over_the_limit": list[str],
            }, Diagnosis,
        ),
        Output(
            "doctor", "`fettle doctor --json`",
            {"findings": list[Seen], "checks": int, "ignored": list[str], "advisories": Advisories},
        ),
    )  # fmt: skip


def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


def schema(output: Output) -> dict[str, Any]:
    """The output as JSON Schema: every field is there, and no other; a number that is not finite is null."""
    top = typing.TypedDict(output.name, {**output.fields, **output.optional})  # type: ignore[misc]
    _, components = msgspec.json.schema_components([top], schema_hook=lambda kind: {"type": "string"})
    components["Recipe"] = {"type": "object", "additionalProperties": {"type": "string"}}
    for name, fields in output.more.items():
        kinds = list(fields.values())
        for field, made in zip(fields, msgspec.json.schema_components(kinds)[0], strict=True):
            components[name]["properties"][field] = made
    body = _strict(components.pop(output.name))
    body["required"] = list(output.fields)
    body["properties"] = {name: body["properties"][name] for name in (*output.fields, *output.optional)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **body, "$defs": _strict(components)}


def _strict(node: Any) -> Any:
    """As fettle writes it: all fields, no others, NaN as null."""
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node.replace("#/components/", "#/$defs/") if isinstance(node, str) else node
    found = {key: _strict(value) for key, value in node.items() if key != "default"}
    if node.get("type") == "number":
        found["type"] = ["number", "null"]
    if isinstance(node.get("properties"), dict):
        found |= {"required": list(node["properties"]), "additionalProperties": False}
    return found


def json_page() -> str:
    """What each output holds, field by field."""
    parts = [
        "# JSON", "",
        "Every command but `join` has `--json`. Numbers are in the unit that their name ends with (`_ms`, `_s`, "
        "`_bytes`), shares are from 0 to 1, and a number that is not finite is `null`. These outputs have a schema "
        "(JSON Schema 2020-12); a test holds what fettle writes against it. `result.json` and `recipe.toml` carry "
        "`format`, which changes when a reader would have to; fettle reads what earlier versions of a format wrote.",
    ]  # fmt: skip
    shown: dict[str, Mapping[str, Any]] = {}
    for output in outputs():
        parts += ["", f"## {output.name.capitalize()}", "", f"{output.where}. [Schema](schemas/{output.name}.json)."]
        made = schema(output)
        parts += ["", *_rows(_documented(output.of), made["properties"])]
        classes = {kind.__name__: kind for kind in _classes(output.fields.values())}
        for name, body in made["$defs"].items():
            fields, known = body.get("properties", {}), shown.get(name, {})
            if not set(known) <= set(fields):  # another class of that name
                known = {}
            fields = {field: kind for field, kind in fields.items() if field not in known}
            if fields:
                docs = _documented(classes.get(name))
                parts += ["", f"### {name}", "", f"{docs.get('', '')}{' As above, and' if known else ''}", ""]
                parts += _rows(docs, fields)
                shown.setdefault(name, fields)
    return "\n".join(parts) + "\n"


def _rows(docs: Mapping[str, str], properties: Mapping[str, Any]) -> list[str]:
    rows = ["| field | type | |", "| --- | --- | --- |"]
    return rows + [f"| `{name}` | {_type(kind)} | {_cell(docs.get(name, ''))} |" for name, kind in properties.items()]


def _type(kind: Mapping[str, Any]) -> str:
    """A schema in words."""
    if "$ref" in kind:
        return str(kind["$ref"]).rpartition("/")[2]
    if "anyOf" in kind:
        return " or ".join(_type(item) for item in kind["anyOf"])
    if "enum" in kind:
        return " or ".join(f"`{item}`" for item in kind["enum"])
    if kind.get("type") == "array":
        return f"list of {_type(kind['items'])}" if isinstance(kind.get("items"), dict) else "list"
    if kind.get("type") == "object":
        inner = kind.get("additionalProperties")
        return f"{_type(inner)} by name" if isinstance(inner, dict) else "object"
    found = kind.get("type", "anything")
    return " or ".join(found) if isinstance(found, list) else str(found)


def _documented(kind: type | None) -> dict[str, str]:
    """The words of a class's fields, from its source; under the empty name, those of the class."""
    if kind is None or not dataclasses.is_dataclass(kind):
        return {}
    module = importlib.import_module(kind.__module__)
    found = griffe.visit(kind.__module__, Path(str(module.__file__)), inspect.getsource(module))[kind.__name__]
    docs = {field: item.docstring.value for field, item in found.members.items() if item.docstring}
    return {"": found.docstring.value.partition("\n\n")[0] if found.docstring else "", **docs}


def _classes(kinds: Iterable[Any]) -> Iterator[type]:
    """All dataclasses and structs in types, once each."""
    seen: list[type] = []
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        waiting += typing.get_args(kind)
        if (
            isinstance(kind, type)
            and kind not in seen
            and (dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__"))
        ):
            seen.append(kind)
            waiting += typing.get_type_hints(kind).values()
            yield kind


# Techniques


def techniques() -> str:
    """The catalogue."""
    parts = [
        "# Techniques and levels", "",
        "What a [recipe](recipe.md) may name. `fettle techniques TARGET` says which of them can be used here, and why "
        "the others cannot. One level is the workload as given; the others are written `technique=level`.",
    ]  # fmt: skip
    for technique in CATALOGUE:
        words = {level.name: level.summary for level in technique.levels(Facts()) if level.summary}
        title = f"{technique.title[:1].upper()}{technique.title[1:]}"
        parts += [
            "", f"## {technique.name}", "",
            f"{title}. For {' and '.join(technique.modes)}. As given: `{technique.default}`.", "",
            "| level | |", "| --- | --- |",
        ]  # fmt: skip
        parts += [f"| `{level}` | {_cell(text)} |" for level, text in words.items() if level != technique.default]
        others = [level for level in technique.every_level() if level not in words and level != technique.default]
        if others:
            named = [f"`{level}`" for level in others]
            parts.append(f"| {', '.join(named if len(named) < 20 else [*named[:2], '...', named[-1]])} | |")
    return "\n".join(parts) + "\n"


# Traces

_EVENTS = [
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": 90},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5, "dur": 20,
     "args": {"External id": 1}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 10, "dur": 5,
     "args": {"correlation": 1, "External id": 1}},
    {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 30, "dur": 40,
     "args": {"device": 0, "stream": 7, "correlation": 1, "External id": 1}},
]  # fmt: skip
"""A step with one operator, its launch and its kernel."""


def traces() -> str:
    """The columns of every table that `fettle trace sql` knows."""
    from fettle.trace import load
    from fettle.trace.analyses.sql import TABLES

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps({"traceEvents": _EVENTS}))
        trace = load(path)
        frames = {name: (make, make(trace)) for name, make in TABLES.items()}
    parts = [
        "# Columns of a trace", "",
        "The tables of `fettle trace sql` and of [`fettle.trace.query`](../trace.md), as polars frames. Times are "
        "integer nanoseconds on the trace's own clock (`_ns`); `rank` is that of the file. [What the numbers "
        "mean](../trace.md#what-the-numbers-mean).",
    ]  # fmt: skip
    for name, (make, frame) in frames.items():
        words = " ".join(inspect.cleandoc(make.__doc__ or "").partition("\n\n")[0].split())
        parts += ["", f"## {name}", "", words, "", "| column | type |", "| --- | --- |"]
        parts += [f"| `{column}` | {kind} |" for column, kind in frame.schema.items()]
    return "\n".join(parts) + "\n"
