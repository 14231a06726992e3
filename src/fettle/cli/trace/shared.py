"""What the trace commands share: options, opening, showing."""

import functools
import inspect
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer
from rich.console import Console
from rich.markup import escape

from fettle import trace as T
from fettle.cli import _options, _show
from fettle.cli._console import console
from fettle.cli._lazy import SETTINGS
from fettle.files import check_writable, plain
from fettle.trace.model import Trace

app = typer.Typer(help="Analyse profiler traces: where the time went, and why.", **SETTINGS)

Source = Annotated[
    Path, typer.Argument(help="a trace (.json, .json.gz), or a folder with one trace a rank", show_default=False)
]
Json = _options.AsJson
Rows = Annotated[int, typer.Option("--rows", min=1, help="how many rows of each table to show")]
Chart = Annotated[Path | None, typer.Option("--output", "-o", help="draw a chart: .html, .png, .svg or .json")]
CHARTS = (".html", ".png", ".svg", ".json")
_ANALYSES = {"critical": "critical path", "whatif": "what-if"}
"""What a trace's health calls the answer to a question, where that is not the question's own name."""
Fresh = Annotated[
    bool, typer.Option("--fresh", help="read the trace itself, not the columns kept when it was last opened")
]
OwnEnd = Annotated[
    bool, typer.Option("--own-end", help="a step ends with its own annotation, not where the next one begins")
]
Step = Annotated[int | None, typer.Option("--step", help="one step's number; default: all steps")]


@dataclass(frozen=True)
class Answer:
    """What a question about traces came to."""

    frames: Mapping[str, pl.DataFrame]
    notes: dict[str, Any] = field(default_factory=dict)
    chart: Callable[[Any], Any] | None = None
    """What draws it, given the module of the charts: that is slow to load, and few ask for one."""
    long: Callable[[], Mapping[str, pl.DataFrame]] = dict
    """For machines only: too long to be read."""
    as_it_is: bool = False
    """Whether people see moments as they are, too, and not since the first of them."""
    doubts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By rank: what is uncertain beside what the trace's health says."""
    failed: bool = False
    """Whether something that must hold does not: exit code 1."""


def question(look: Callable[..., Answer], *, charted: bool = True) -> Callable[..., None]:
    """Make a command of a function that is given traces: it opens them, and shows, draws or prints the answer.

    Its further parameters are options of its own. One that is named as an option of all commands (`as_json`, `rows`) is
    handed on, and its default stands above the usual one. Where one is `own_end`, the traces are opened with it.
    """
    usual: dict[str, tuple[Any, Any]] = {
        "source": (Source, inspect.Parameter.empty), "as_json": (Json, False), "rows": (Rows, 30),
        **({"chart": (Chart, None)} if charted else {}), "fresh": (Fresh, False),
    }  # fmt: skip
    own = {name: (one.annotation, one.default) for name, one in list(inspect.signature(look).parameters.items())[1:]}

    @functools.wraps(look)
    def command(**options: Any) -> None:
        _options.check_file(options.get("chart"), *CHARTS)
        check_writable(*(options[name] for name in own if isinstance(options[name], Path)))
        traces = open_traces(options["source"], options["fresh"], options.get("own_end", False), look.__name__)
        answer = look(traces, **{name: options[name] for name in own})
        if answer.chart is not None:
            write_chart(options["chart"], answer.chart)
        show(answer, options["as_json"], options["rows"], traces)
        if answer.failed:
            raise typer.Exit(1)

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for name, (kind, default) in {**usual, **own}.items()
        ]
    )
    return app.command()(command)


listing = functools.partial(question, charted=False)
"""The same without a chart."""


def read_traces(path: Path, fresh: bool = False, own_end: bool = False) -> list[Trace]:
    """Read a trace or a folder; people see how far it is and how long it will take."""
    with _show.bar(f"reading {path}") as show:
        return T.load_all(
            path,
            own_end=own_end,
            use_sidecar=not fresh,
            on_progress=lambda share: show(f"reading {path}", share, 1.0),
        )


def open_traces(path: Path, fresh: bool, own_end: bool, asked: str = "") -> list[Trace]:
    """Read a trace or a folder, and say what was left out of it and which answers are uncertain; see `_warn`."""
    traces = read_traces(path, fresh, own_end)
    for trace in traces:
        _warn(trace, f"rank {trace.rank}" if len(traces) > 1 else trace.path.name, asked)
    return traces


def open_one(path: Path, fresh: bool, own_end: bool = False, asked: str = "") -> Trace:
    """The same of a trace, or of the first rank in a folder, and say so."""
    traces = read_traces(path, fresh, own_end)
    first = traces[0]
    if len(traces) > 1:
        console(error=True).print(
            f"{path}: of its {len(traces)} ranks only rank {first.rank} is taken; for another name its file",
            style="yellow", markup=False, soft_wrap=True,
        )  # fmt: skip
    _warn(first, path.name, asked)
    return first


def _warn(trace: Trace, label: str, asked: str) -> None:
    """Say what was left out, and which answers are uncertain: of a question that was `asked` its own alone, unless what
    was found probably makes some wrong."""
    out, name = console(error=True), escape(label)
    for note in trace.facts.notes:
        from fettle.page import clean  # takes a while to load, and few have any

        out.print(f"[yellow]{name}: {escape(clean(note))}[/]")
    health = T.trace_health(trace)
    serious = any(finding.severity == "serious" for finding in health.findings)
    if uncertain := [one for one in health.uncertain if serious or _ANALYSES.get(asked, asked) in ("", one)]:
        out.print(f"[yellow]{name}: uncertain: {', '.join(uncertain)}; see 'fettle trace health'[/]")


def step_windows(own_end: bool) -> dict[str, str]:
    """What a step's window is, as a note."""
    return {"a step ends": "with its own annotation" if own_end else "where the next one begins"}


def next_command(
    traces: Sequence[Trace], question: str = "what to do about it", command: str = "diagnose"
) -> dict[str, str]:
    """A note: the command that answers what one asks next."""
    path = traces[0].path.parent if len(traces) > 1 else traces[0].path
    return {question: f"fettle {command} {shlex.quote(str(path))}"}


def show(answer: Answer, as_json: bool, rows: int, traces: Sequence[Trace] = ()) -> None:
    """Print an answer as JSON ({name: rows}) or as tables for people.

    JSON also says which answers are uncertain for each of the `traces` (people saw it when they were opened).
    """
    if as_json:
        data = {name: frame.to_dicts() for name, frame in {**answer.frames, **answer.long()}.items()} | answer.notes
        if traces:
            known = doubts((f"rank {trace.rank}", trace) for trace in traces)
            data["uncertain"] = known | {rank: [*known.get(rank, []), *more] for rank, more in answer.doubts.items()}
        print(json.dumps(plain(data), default=str))
        return
    out = console()
    for key, value in answer.notes.items():
        out.print(f"{key}: {value}", markup=False)
    for name, frame in answer.frames.items():
        if frame.height:
            _print_table(out, name.replace("_", " "), frame if answer.as_it_is else _since_the_first(frame), rows)
        else:
            out.print(f"{name.replace('_', ' ')}: nothing")


def doubts(traces: Iterable[tuple[str, Trace]]) -> dict[str, list[str]]:
    """Which analyses are uncertain for each trace; traces without any are left out."""
    uncertain = {name: list(T.trace_health(trace).uncertain) for name, trace in traces}
    return {name: analyses for name, analyses in uncertain.items() if analyses}


_CLOCK = ("start_ns", "end_ns", "ts_ns", "first_ns")


def _since_the_first(frame: pl.DataFrame) -> pl.DataFrame:
    """With the time since the first moment, which a person wants to know, in place of a clock's."""
    clocks = [c for c in _CLOCK if c in frame.columns]
    if not clocks:
        return frame
    zero = min(int(frame[c].min() or 0) for c in clocks)  # type: ignore[arg-type]
    return frame.with_columns(pl.col(clocks) - zero)


def _print_table(out: Console, title: str, frame: pl.DataFrame, rows: int) -> None:
    """One table; columns that say nothing are left out."""
    from fettle.page import clean
    from fettle.trace.report.section import as_table, cell

    same = [c for c in ("rank", "device") if c in frame.columns and frame[c].n_unique() == 1]
    empty = [c for c in frame.columns if c.startswith("idle_") and frame[c].dtype.is_numeric() and not frame[c].sum()]
    shared = ", ".join(f"{c} {frame[c][0]}" for c in same if frame[c][0] != -1)
    table = as_table(frame.drop(same, empty), rows, title + (f" ({shared})" if shared else ""), cell)
    _show.print_table(out, clean(table))
    if frame.height > rows:
        out.print(f"{frame.height - rows} more rows: --rows {frame.height}")


def write_chart(path: Path | None, make: Callable[[Any], Any]) -> None:
    """Write a chart to a file where one is named; `make` is given the module of the charts."""
    if path is not None:
        from fettle.trace.report import charts

        charts.save(make(charts), path)
        console(error=True).print(f"wrote {path}", markup=False, soft_wrap=True)
