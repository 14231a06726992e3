"""`fettle trace`: analyse profiler traces, one command a question."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fettle.errors import UsageError
from fettle.trace.model import Trace

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Analyse profiler traces: where the time went, and why."
)

Source = Annotated[
    Path, typer.Argument(help="A trace (.json, .json.gz), or a folder with one trace a rank.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")]
Rows = Annotated[int, typer.Option("--rows", min=1, help="How many rows of each table to show.")]
Chart = Annotated[Path | None, typer.Option("--chart", help="Write a chart to this file: .html, .png, .svg or .json.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Read the trace itself, not the columns kept from its last opening.")
]
Step = Annotated[int | None, typer.Option("--step", help="One step's number; all steps where left out.")]


def open_traces(path: Path, fresh: bool = False) -> list[Trace]:
    """Open a trace or a folder, with a sign of life for people."""
    from fettle.trace.reader import load_all

    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        progress.add_task(f"reading {path}", total=None)
        traces = load_all(path, use_sidecar=not fresh)
    for trace in traces:
        from fettle.trace.health import trace_health

        uncertain = trace_health(trace).uncertain
        if uncertain:
            console.print(
                f"[yellow]rank {trace.rank}: uncertain: {', '.join(uncertain)}; see 'fettle trace health'[/]",
                highlight=False,
            )
    return traces


def show(frames: dict[str, pl.DataFrame], as_json: bool, rows: int = 30, notes: dict[str, Any] | None = None) -> None:
    """Print frames as JSON ({name: rows}) or as tables, times in milliseconds."""
    if as_json:
        data = {name: frame.to_dicts() for name, frame in frames.items()} | (notes or {})
        print(json.dumps(_plain(data), default=str))
        return
    from fettle.trace.report.section import cell, heading

    console = Console()
    for key, value in (notes or {}).items():
        console.print(f"{key}: {value}", highlight=False, markup=False)
    for name, frame in frames.items():
        shown = frame.select(
            [c for c in frame.columns if not (c.endswith("_ns") and frame[c].dtype.is_numeric() and not frame[c].sum())]
        )
        table = Table(title=name.replace("_", " "), title_justify="left")
        for column in shown.columns:
            table.add_column(
                heading(column), justify="right" if shown[column].dtype.is_numeric() else "left", overflow="fold"
            )
        for row in shown.head(rows).iter_rows():
            table.add_row(*(_escape(cell(v, c)) for v, c in zip(row, shown.columns, strict=True)))
        console.print(table)
        if shown.height > rows:
            console.print(f"{shown.height - rows} more rows: --rows {shown.height}", highlight=False)


def _plain(value: Any) -> Any:
    """NaN and infinities are not JSON: null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _chart(path: Path | None, make: Callable[[], Any]) -> None:
    if path is not None:
        from fettle.trace import charts

        charts.save(make(), path)
        Console(stderr=True).print(f"wrote {path}", highlight=False)


def _all(traces: list[Trace], analysis: Callable[[Trace], pl.DataFrame]) -> pl.DataFrame:
    return pl.concat([analysis(t) for t in traces], how="vertical_relaxed")


@app.command()
def health(source: Source, as_json: Json = False, fresh: Fresh = False) -> None:
    """Can the trace be trusted? What was skipped, repaired or missing."""
    from fettle.trace.health import trace_health
    from fettle.trace.reader import load_all

    found = [trace_health(t) for t in load_all(source, use_sidecar=not fresh)]
    if as_json:
        print(json.dumps([h.as_dict() for h in found], default=str))
        return
    for one in found:
        rows = [(f.severity, f.what, f.count, f.means) for f in one.findings]
        frame = pl.DataFrame(rows, schema=["severity", "what", "count", "means"], orient="row")
        notes = {
            "trace": f"{one.path}, rank {one.rank}: {one.kept:,} of {one.events:,} events kept, "
            f"{one.span_ns / 1e6:,.3f} ms, "
            f"devices {list(one.devices)}",
            "uncertain": ", ".join(one.uncertain) or "nothing",
        }
        show({"findings": frame}, False, 100, notes)


@app.command()
def steps(source: Source, as_json: Json = False, rows: Rows = 30, fresh: Fresh = False) -> None:
    """The steps: medians, outliers, drift."""
    from fettle.trace.steps import step_summary
    from fettle.trace.steps import steps as find

    traces = open_traces(source, fresh)
    frame = _all(traces, find)
    show({"steps": frame}, as_json, rows, {f"rank {t.rank}": step_summary(find(t)) for t in traces})


@app.command()
def account(
    source: Source,
    as_json: Json = False,
    rows: Rows = 30,
    chart: Chart = None,
    fresh: Fresh = False,
    annotation: Annotated[str | None, typer.Option(help="Take annotations of this name for steps.")] = None,
) -> None:
    """Where did the time go? Every nanosecond of each step, booked once."""
    from fettle.trace import charts
    from fettle.trace.account import account_total, time_account

    frame = _all(open_traces(source, fresh), lambda t: time_account(t, annotation))
    _chart(chart, lambda: charts.account_chart(frame))
    show({"total": account_total(frame), "steps": frame}, as_json, rows)


@app.command()
def idle(source: Source, as_json: Json = False, chart: Chart = None, fresh: Fresh = False) -> None:
    """Why was the device idle? Each gap cut into the pieces that different causes held."""
    from fettle.trace import charts
    from fettle.trace.idle import idle_summary

    frames = [idle_summary(t, d) for t in open_traces(source, fresh) for d in t.device_keys]
    if not frames:
        raise UsageError("no device work in this trace: 'fettle trace host' answers for the CPU")
    frame = pl.concat(frames)
    _chart(chart, lambda: charts.bar_chart(frame, "cause", "idle_ns"))
    show({"idle": frame}, as_json, 100)


@app.command()
def kernels(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """Kernels by type and name, per rank and across ranks."""
    from fettle.trace import charts
    from fettle.trace import kernels as k

    traces = open_traces(source, fresh)
    table = _all(traces, k.kernel_table)
    _chart(chart, lambda: charts.bar_chart(table, "name", "sum_ns", color="class"))
    frames = {"classes": _all(traces, k.kernel_classes), "kernels": table}
    if len(traces) > 1:
        frames["across_ranks"] = k.kernels_across_ranks(traces)
    show(frames, as_json, rows)


@app.command()
def launches(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """Launch calls and delays: every launch of every runtime, graphs too."""
    from fettle.trace import charts
    from fettle.trace.launches import call_table, launch_stats

    frame = _all(open_traces(source, fresh), launch_stats)
    _chart(chart, lambda: charts.delay_chart(frame))
    summary = call_table(frame)
    show({"summary": summary, **({"launches": frame} if as_json else {})}, as_json, rows)


@app.command()
def comm(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """Communication: overlap, collectives with bandwidths, arrival skew, stragglers and clocks."""
    from fettle.trace import charts
    from fettle.trace import communication as c

    traces = open_traces(source, fresh)
    frames = {"overlap": _all(traces, c.overlap), "collectives": _all(traces, c.collective_table)}
    notes = {}
    if len(traces) > 1:
        frames |= {
            "stragglers": c.stragglers(traces),
            "clocks": c.clock_offsets(c.match_collectives(traces)),
            "arrival": c.arrival(traces).drop("key"),
        }
    else:
        notes["stragglers"] = "unknown: one rank only; give a folder of ranks"
    _chart(chart, lambda: charts.bar_chart(frames["collectives"], "collective", "sum_ns"))
    show(frames, as_json, rows, notes)


@app.command()
def queue(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """Queue length of each stream over time, and time on a full queue."""
    from fettle.trace import charts
    from fettle.trace.queue import queue_length, queue_summary

    traces = open_traces(source, fresh)

    def draw() -> Any:
        series = queue_length(traces[0]).with_columns(name=pl.format("device {} stream {}", "device", "stream"))
        return charts.step_line(series, "length", series="name", unit="launched, not started")

    _chart(chart, draw)
    frames = {"queue": _all(traces, queue_summary)}
    show(frames | ({"series": _all(traces, queue_length)} if as_json else {}), as_json, rows)


@app.command()
def bandwidth(
    source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False
) -> None:
    """Bandwidth of copies and memory sets."""
    from fettle.trace import charts
    from fettle.trace.queue import bandwidth_summary, copy_bandwidth

    traces = open_traces(source, fresh)
    _chart(chart, lambda: charts.step_line(copy_bandwidth(traces[0]), "gb_per_s", series="name", unit="GB/s"))
    show(
        {"bandwidth": _all(traces, bandwidth_summary)} | ({"series": _all(traces, copy_bandwidth)} if as_json else {}),
        as_json,
        rows,
    )


@app.command()
def operators(
    source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False
) -> None:
    """Operators by name and shapes; and kernels by module and source line."""
    from fettle.trace import charts
    from fettle.trace.operators import attribute_kernels, operator_table

    traces = open_traces(source, fresh)
    table, work = _all(traces, operator_table), _all(traces, attribute_kernels)
    frames = {"operators": table}
    for column in ("module", "line", "forward_operator", "generated"):
        if work[column].null_count() < work.height:
            frames[column] = (
                work.group_by("rank", column)
                .agg(device_ns=pl.col("duration_ns").sum(), kernels=pl.len())
                .sort("device_ns", descending=True)
            )
    _chart(chart, lambda: charts.bar_chart(table, "operator", "device_ns"))
    show(frames | ({"work": work} if as_json else {}), as_json, rows)


@app.command()
def tree(
    source: Source,
    as_json: Json = False,
    rows: Rows = 60,
    fresh: Fresh = False,
    depth: Annotated[int, typer.Option(min=1, max=200, help="How deep.")] = 4,
    python: Annotated[bool, typer.Option("--python", help="With Python functions.")] = False,
) -> None:
    """Calls merged by path, with host and device time."""
    from fettle.trace.operators import call_tree

    show(
        {"tree": _all(open_traces(source, fresh), lambda t: call_tree(t, max_depth=depth, python=python))},
        as_json,
        rows,
    )


@app.command()
def sequences(
    source: Source,
    operator: Annotated[str, typer.Argument(help="Part of an operator's name.")],
    as_json: Json = False,
    rows: Rows = 10,
    fresh: Fresh = False,
) -> None:
    """Frequent kernel sequences under an operator."""
    from fettle.trace.operators import kernel_sequences

    show(
        {"sequences": _all(open_traces(source, fresh), lambda t: kernel_sequences(t, operator, top=rows))},
        as_json,
        rows,
    )


@app.command()
def annotations(
    source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False
) -> None:
    """User annotations with host and device time."""
    from fettle.trace import charts
    from fettle.trace.operators import annotation_table

    table = _all(open_traces(source, fresh), annotation_table)
    _chart(chart, lambda: charts.bar_chart(table, "annotation", "device_ns"))
    show({"annotations": table}, as_json, rows)


@app.command()
def counters(source: Source, as_json: Json = False, rows: Rows = 30, fresh: Fresh = False) -> None:
    """Hardware counters (CUPTI) by operator."""
    from fettle.trace.operators import counters_by_operator

    frames = [f for t in open_traces(source, fresh) if (f := counters_by_operator(t)) is not None]
    if not frames:
        raise UsageError("no hardware counters in this trace, or not as many ranges as launches: they cannot be paired")
    frame = pl.concat(frames)
    show(
        {
            "by_operator": frame.group_by("rank", "operator", "counter")
            .agg(pl.col("value").sum())
            .sort("value", descending=True),
            "ranges": frame,
        },
        as_json,
        rows,
    )


@app.command()
def critical(
    source: Source,
    step: Step = None,
    as_json: Json = False,
    rows: Rows = 30,
    chart: Chart = None,
    fresh: Fresh = False,
    overlay: Annotated[Path | None, typer.Option(help="Write the trace with the path as a track (JSON).")] = None,
) -> None:
    """The critical path: what held the step up, over all of its wall clock."""
    from fettle.trace import charts
    from fettle.trace.critical import critical_path, path_events
    from fettle.trace.critical_ranks import critical_path_of_ranks
    from fettle.trace.perfetto import augment

    traces = open_traces(source, fresh)
    frames: dict[str, pl.DataFrame] = {}
    for trace in traces:
        path = critical_path(trace, step)
        prefix = f"rank_{trace.rank}_" if len(traces) > 1 else ""
        summary = path.summary()
        frames |= {f"{prefix}summary": summary, f"{prefix}events": path_events(trace, path)}
        if as_json:
            frames[f"{prefix}pieces"] = path.pieces
        if trace is traces[0]:
            _chart(chart, lambda summary=summary: charts.bar_chart(summary, "category", "time_ns"))  # type: ignore[misc]
            if overlay is not None:
                augment(trace, overlay, path=path)
    notes: dict[str, Any] = {}
    if len(traces) > 1:
        try:
            joined = critical_path_of_ranks(traces, step)
        except UsageError as error:
            notes["across ranks"] = f"unknown: {error}"
        else:
            by_rank = joined.pieces.group_by("rank", "category").agg(
                time_ns=(pl.col("end_ns") - pl.col("start_ns")).sum()
            )
            frames["across_ranks"] = by_rank.sort("time_ns", descending=True)
    show(frames, as_json, rows, notes)


@app.command()
def whatif(
    source: Source,
    step: Step = None,
    as_json: Json = False,
    fresh: Fresh = False,
    kernels: Annotated[
        str | None, typer.Option(help="Kernels that match this expression take --factor of their time.")
    ] = None,
    factor: Annotated[float, typer.Option(min=0, help="With --kernels.")] = 0.0,
) -> None:
    """How long would the step be without syncs, with perfect overlap, with one graph launch, with faster kernels?"""
    from fettle.trace.critical import critical_path
    from fettle.trace.whatif import what_if

    rows = []
    for trace in open_traces(source, fresh):
        path = critical_path(trace, step)
        changes = ["kernels"] if kernels is not None else ["no_syncs", "perfect_overlap", "graph", "data_ready"]
        for change in changes:
            answer = what_if(trace, change, kernels=kernels or "", factor=factor, path=path)
            rows.append({"rank": trace.rank, **asdict(answer), "saving_share": answer.saving_share})
    show({"what_if": pl.DataFrame(rows)}, as_json)


@app.command()
def compare(
    before: Source,
    after: Annotated[Path, typer.Argument(help="The other trace.")],
    as_json: Json = False,
    rows: Rows = 20,
    chart: Chart = None,
    fresh: Fresh = False,
    skip: Annotated[int, typer.Option(min=0, help="Leave out first steps.")] = 0,
    steps_before: Annotated[str | None, typer.Option(help="Steps of the first trace, such as 3,4,5.")] = None,
    steps_after: Annotated[str | None, typer.Option(help="Steps of the second trace.")] = None,
) -> None:
    """Why is one trace slower than another? The change of the step time, booked to causes."""
    from fettle.trace import charts
    from fettle.trace.compare import compare as compare_traces

    first, second = open_traces(before, fresh)[0], open_traces(after, fresh)[0]
    result = compare_traces(
        first, second, skip=skip, steps_before=_numbers(steps_before), steps_after=_numbers(steps_after)
    )
    shown = result.parts.filter(pl.col("change_ns") != 0)
    _chart(
        chart,
        lambda: charts.change_chart(shown.filter(~pl.col("sums")), result.before_ns, result.after_ns),
    )
    notes = {
        "before_ns": result.before_ns,
        "after_ns": result.after_ns,
        "change_ns": result.change_ns,
        "low_ns": result.low_ns,
        "high_ns": result.high_ns,
        "notes": list(result.notes),
    }
    text = {
        "mean step": f"{result.before_ns / 1e6:,.3f} -> {result.after_ns / 1e6:,.3f} ms, "
        f"change {result.change_ns / 1e6:+,.3f} ms (95%: {result.low_ns / 1e6:+,.3f} to {result.high_ns / 1e6:+,.3f}); "
        f"{result.steps_before} and {result.steps_after} steps",
        **({"notes": "; ".join(result.notes)} if result.notes else {}),
    }
    show(
        {
            "parts": shown,
            "work": result.work,
            "operators": result.operators.filter(pl.col("change") != "same") if not as_json else result.operators,
        },
        as_json,
        rows,
        notes if as_json else text,
    )


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"step numbers look like 3,4,5, not '{text}'") from error


@app.command()
def memory(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """Memory over time: who held what at the peak."""
    from fettle.trace import charts
    from fettle.trace.memory_timeline import memory_peak, memory_timeline

    traces = open_traces(source, fresh)
    timeline = _all(traces, memory_timeline)
    if not timeline.height:
        raise UsageError("no memory events in this trace: record with profile_memory=True")
    _chart(
        chart,
        lambda: charts.step_line(
            timeline.with_columns(mib=pl.col("allocated_bytes") / 2**20),
            "mib",
            series="device",
            unit="MiB",
        ),
    )
    show({"peak": _all(traces, memory_peak)} | ({"timeline": timeline} if as_json else {}), as_json, rows)


@app.command()
def host(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """The CPU's side: threads, operator overhead, small operators, conversions, data loading."""
    from fettle.trace import charts
    from fettle.trace import host as h

    traces = open_traces(source, fresh)
    summary = _all(traces, h.host_summary)
    _chart(chart, lambda: charts.bar_chart(summary, "question", "time_ns"))
    frames = {
        "questions": summary,
        "threads": pl.concat([h.threads(t) for t in traces], how="diagonal_relaxed"),
        "parallel": _all(traces, h.parallel_operators),
        "sizes": _all(traces, h.operator_sizes),
        "small_operators": _all(traces, h.small_operators),
        "conversions": _all(traces, h.conversions),
        "data_loading": _all(traces, h.data_loading),
    }
    show(frames, as_json, rows)


@app.command()
def hta(source: Source, as_json: Json = False, rows: Rows = 30, fresh: Fresh = False) -> None:
    """The numbers of Holistic Trace Analysis, under its definitions and rounding (see the docs for where they
    mislead).
    """
    from fettle.trace import hta as h

    traces = open_traces(source, fresh)
    frames = {
        name: _all(traces, getattr(h, name))
        for name in ("temporal_breakdown", "kernel_types", "idle_breakdown", "queue_summary", "kernel_statistics")
    }
    show(frames, as_json, rows, {f"overlap of rank {t.rank} (%)": h.communication_overlap(t) for t in traces})


@app.command()
def sql(
    source: Source,
    text: Annotated[str, typer.Argument(help="Such as: select name, sum(dur_ns) from events group by name")],
    as_json: Json = False,
    rows: Rows = 50,
    fresh: Fresh = False,
) -> None:
    """Ask your own: SQL over events, steps, account, idle, kernels, launches, work, operators, collectives, queue,
    memory.
    """
    from fettle.trace.sql import query

    show({"result": query(open_traces(source, fresh), text)}, as_json, rows)


@app.command()
def augment(
    source: Source,
    target: Annotated[Path, typer.Argument(help="The new trace (.json).")],
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Write the trace again with queue, copy and critical-path tracks, for Perfetto."""
    from fettle.trace.critical import critical_path
    from fettle.trace.perfetto import augment as write

    trace = open_traces(source, fresh)[0]
    added = write(trace, target, path=critical_path(trace))
    print(json.dumps({"file": str(target), "added_events": added})) if as_json else Console().print(
        f"wrote {target}: {added} events added"
    )


@app.command()
def report(
    source: Source,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("trace-report.html"),
    before: Annotated[Path | None, typer.Option(help="An earlier trace to compare with.")] = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """One self-contained HTML page: account, idle causes, kernels, overlap, ranks, critical path, a step's timeline."""
    from fettle.trace.report import write_report

    earlier = open_traces(before, fresh)[0] if before is not None else None
    failed = write_report(open_traces(source, fresh), output, before=earlier)
    if as_json:
        print(json.dumps({"file": str(output), "not_answered": failed}))
    else:
        Console().print(
            f"wrote {output}" + "".join(f"\nnot answered: {line}" for line in failed), highlight=False, markup=False
        )


@app.command()
def record(
    target: Annotated[
        str, typer.Argument(help="path/to/file.py:function or package.module:function, called once a step.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace.")] = Path("trace.json.gz"),
    active: Annotated[int, typer.Option(min=1, help="Steps to keep.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Steps to run and throw away.")] = 2,
    stacks: Annotated[bool, typer.Option("--stacks", help="With Python stacks: larger and slower.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="With every allocation.")] = False,
    as_json: Json = False,
) -> None:
    """Run a function step by step under the profiler and keep the trace."""
    from fettle.trace.record import load_target
    from fettle.trace.record import record as record_trace

    step = load_target(target)
    with record_trace(output, warmup=warmup, active=active, stacks=stacks, memory=memory) as profiler:
        for _ in range(warmup + active):
            step()
            profiler.step()
    print(json.dumps({"file": str(output), "steps": active})) if as_json else Console().print(
        f"wrote {output}", highlight=False
    )
