"""What commands share in what they read and write: options, what their words mean, and tables of commas."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fettle.errors import UsageError
from fettle.files import check_writable, write_text

if TYPE_CHECKING:
    from fettle.workload import Target as Found

_DURATION = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s|m|min|h)?\s*")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_OF_FILES = {".html", ".csv", ".parquet", ".json", ".md", ".png", ".svg", ".pdf", ".toml"}
"""Suffixes by which somebody means a file, where another command, or this one for something else, writes such files."""
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")

Target = Annotated[str, typer.Argument(help="path/to/file.py:factory or package.module:factory")]
Mode = Annotated[str, typer.Option(help="inference or training, where the target's factory does not say")]
Techniques = Annotated[
    list[str] | None,
    typer.Option("--technique", help="levels to try, NAME=LEVEL,LEVEL; one level pins it. May be repeated"),
]
Storage = Annotated[str | None, typer.Option(help="Optuna storage URL; default study.db in the folder")]
StudyName = Annotated[str, typer.Option(help="the study's name there")]
StudyOutput = Annotated[
    list[Path] | None,
    typer.Option("--output", "-o", help="folder of this machine alone, and .csv or .parquet for the table"),
]
MaxError = Annotated[
    float | None,
    typer.Option(
        help="largest relative L2 error of the outputs; of text, mean KL divergence; in training, distance of the "
        "losses in spreads",
        show_default="0.02; of text 0.01, in training 1; none beside --max-metric-drop",
    ),
]
MaxMetricDrop = Annotated[float | None, typer.Option(help="how far the workload's metric may fall")]
TrialTimeout = Annotated[str, typer.Option(help="longest time for one recipe to get ready")]
Nproc = Annotated[
    int,
    typer.Option(help="ranks on this machine, for training's parallel strategies or inference's tensor parallelism"),
]
UnderLoad = Annotated[bool, typer.Option(help="measure while the machine does other work, by elapsed time")]
Polite = Annotated[bool, typer.Option(help="never take priority over other processes")]
LatencyLimit = Annotated[
    str | None, typer.Option("--p99", help="latency limit for 99% of the requests, for example 100ms")
]
MaxKl = Annotated[
    float | None,
    typer.Option(
        help="text: largest mean KL divergence from the float32 model, nats per token; the same as --max-error",
        show_default="0.01",
    ),
]
FirstToken = Annotated[
    str | None, typer.Option(help="text: limit for 99% of the times to the first token, for example 500ms")
]
BetweenTokens = Annotated[
    str | None, typer.Option(help="text: limit for 99% of the times between two tokens, for example 50ms")
]
PromptTokens = Annotated[str, typer.Option(help="text: 128, uniform:16:256, exponential:128 or lognormal:128:0.8")]
OutputTokens = Annotated[str, typer.Option(help="text: as --prompt-tokens")]
Texts = Annotated[
    Path | None,
    typer.Option(help='a line of JSON for each text: {"prompt": TEXT or a number of tokens, "max_tokens": N}'),
]
AsJson = Annotated[bool, typer.Option("--json", help="print what was found as JSON")]


def target_or_package(text: str) -> Found:
    """The target that is meant by what is no package."""
    from fettle.workload import find_target

    try:
        return find_target(text)
    except UsageError as error:
        raise UsageError(f"there is no package {text}; and {error}") from None


def given(ctx: typer.Context, *but: str) -> list[str]:
    """The options that the command line names, but parameters of these names."""
    others = [param for param in ctx.command.params if param.name not in but]
    sources = {param.opts[0]: ctx.get_parameter_source(param.name or "") for param in others}
    return [option for option, one in sources.items() if one is not None and one.name == "COMMANDLINE"]


def check_given(ctx: typer.Context, *rules: tuple[bool, Sequence[str], str]) -> None:
    """Raise `UsageError` where the command line names an option that is of no use: `rules` are whether options are
    unused, which, and what they are for."""
    named = given(ctx)
    for unused, options, purpose in rules:
        if unused and (wrong := [option for option in named if option in options]):
            raise UsageError(f"{wrong[0]} is {purpose}")


def duration_s(text: str, option: str, bare: str = "s") -> float:
    """``90s``, ``10m``, ``1h``, ``100ms`` as seconds; a `bare` number has that unit, or is refused if there is none."""
    match = _DURATION.fullmatch(text)
    if not match:
        raise UsageError(f"{option}: {text!r} is not a duration, for example 90s, 10m, 1h, 100ms")
    unit = match[2] or bare
    if not unit and float(match[1]):
        raise UsageError(f"{option}: {text} of what? Write {text}ms or {text}s")
    return float(match[1]) * _SECONDS[unit or "s"]


def milliseconds(text: str | None, option: str) -> float | None:
    """A limit on a latency in milliseconds, where it is given."""
    return None if text is None else limit_s(text, option) * 1e3


def limit_s(text: str | None, option: str) -> float:
    """A limit on a latency, 0 for none. A number without a unit is refused: 100 is hardly meant to be 100 seconds."""
    return duration_s(text or "0", option, bare="")


def check_finite(option: str, value: float | None) -> None:
    """Raise `UsageError` for a number without end, which the parser takes for one in its range."""
    if value is not None and not math.isfinite(value):
        raise UsageError(f"{option} takes a finite number, not {value}")


def share(text: str, option: str, below: float = 0.95) -> float:
    """``20%`` or ``0.2`` as a number from 0 to `below`. A bare 3 is refused: it is hardly meant to be 300%."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < (below if text.endswith("%") else min(1, below)):
        raise UsageError(f"{option}: {text!r} is not a share, for example 20% or 0.2")
    return value


def devices(texts: str | Sequence[str] | None, also: Sequence[str] = ()) -> list[str]:
    """The devices of a ``--device cpu``, ``--device cuda:0,cuda:1`` or one that is repeated; `also` are other words."""
    values = [texts] if isinstance(texts, str) else texts or ()
    names = [name.strip() for text in values if text for name in text.split(",")]
    for name in names:
        if name not in also and not _DEVICE.fullmatch(name):
            raise UsageError(f"--device {name}: write {', '.join((*also, 'cpu', 'cuda'))} or cuda:0")
    return names


def one_device(text: str, also: Sequence[str] = ()) -> str:
    """The same where there can be one only."""
    names = devices(text, also)
    if len(names) != 1:
        raise UsageError(f"--device {text}: name one device")
    return names[0]


def outputs(paths: Sequence[Path] | None, *suffixes: str, folder: bool = False) -> dict[str, Path]:
    """What each ``--output`` is for, by suffix; without any it is the `folder` (key ``""``), if there can be one."""
    by_suffix: dict[str, Path] = {}
    for path in paths or ():
        suffix = path.suffix.lower()
        if folder and suffix not in suffixes and (suffix not in _OF_FILES or path.is_dir()):
            suffix = ""
        elif suffix not in suffixes:
            known = [*([f"a file that ends in {' or '.join(suffixes)}"] if suffixes else []), *["a folder"] * folder]
            raise UsageError(f"--output {path}: name {' or '.join(known)}")
        if suffix in by_suffix:
            raise UsageError(f"--output {path}: {by_suffix[suffix]} is named for that already")
        by_suffix[suffix] = path
    return by_suffix


def output_folder(path: Path) -> Path:
    """The folder of an ``--output``. Raises `UsageError` where a file's name was given."""
    return outputs([path], folder=True)[""]


def check_file(path: Path | None, *suffixes: str) -> None:
    """Raise `UsageError` for an ``--output`` of another suffix, which may be the model itself, or not writable."""
    outputs([] if path is None else [path], *suffixes)
    check_writable(path)


def levels(options: Sequence[str] | None, option: str) -> dict[str, list[str]]:
    """``["precision=fp32,bf16", "compile=off"]`` as levels by name."""
    chosen: dict[str, list[str]] = {}
    for text in options or ():
        name, _, values = text.partition("=")
        several = [value.strip() for value in values.split(",") if value.strip()]
        if not name.strip() or not several:
            raise UsageError(f"{option} {text!r}: write NAME=LEVEL or NAME=LEVEL,LEVEL")
        chosen.setdefault(name.strip(), []).extend(several)
    return {name: list(dict.fromkeys(several)) for name, several in chosen.items()}


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """A table with a header. Raises `UsageError` where it cannot be written."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
