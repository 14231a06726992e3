"""To and from files, and questions of one's own: record, report, augment, SQL, the numbers of another tool."""

from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer

from fettle import trace as T
from fettle.cli import _options, _quiet, _show
from fettle.cli.trace.shared import (
    Answer,
    Fresh,
    Json,
    OwnEnd,
    Rows,
    Source,
    app,
    listing,
    open_one,
    open_traces,
    question,
)
from fettle.errors import UsageError, refusing
from fettle.trace.analyses import hta as h
from fettle.trace.frames import joined
from fettle.trace.model import Trace
from fettle.units import count_text


@question
def hta(traces: list[Trace]) -> Answer:
    """The numbers of Holistic Trace Analysis, under its definitions and rounding (see the docs for where they
    mislead); the chart is of its idle time of each stream and its launch histograms.

    fettle trace hta trace.json.gz --json
    """
    frames = {
        name: joined(traces, getattr(h, name))
        for name in ("temporal_breakdown", "kernel_types", "idle_breakdown", "queue_summary", "kernel_statistics")
    }
    notes: dict[str, Any] = {f"overlap of rank {t.rank} (%)": h.communication_overlap(t) for t in traces}
    differs = {f"HTA itself may differ (rank {t.rank})": "; ".join(h.deviations(t)) for t in traces}
    notes |= {what: why for what, why in differs.items() if why}
    breakdown = frames["temporal_breakdown"]
    if (breakdown["non_compute_us"] < 0).any() or (breakdown["compute_us"] < 0).any():
        notes["negative times"] = "rounding both ends of events inward makes short ones negative, as it does there"

    def drawn(charts: Any) -> Any:
        where = pl.format("rank {} stream {}", "rank", "stream")
        category = pl.col("idle_category").str.replace("_", " ")
        waits = frames["idle_breakdown"].select(category, where=where, ms=pl.col("idle_us") / 1e3)
        streams = charts.stacked(waits, "where", "idle_category", "ms")
        launches = charts.launch_charts(joined(traces, h.launch_statistics))
        return charts.stack_of({"Idle time of each stream": streams} | launches)

    return Answer(frames, notes, drawn)


@listing
def sql(
    traces: list[Trace],
    text: Annotated[str, typer.Argument(help="such as: select name, sum(dur_ns) from events group by name")],
    rows: Rows = 50,
) -> Answer:
    """Ask your own: SQL over events, steps, account, idle, kernels, launches, work, operators, collectives, queue,
    memory.

    fettle trace sql trace.json.gz "select name, sum(dur_ns) as ns from events group by name order by ns desc"
    """
    return Answer({"result": T.query(traces, text)}, as_it_is=True)


@app.command()
def augment(
    source: Source,
    target: Annotated[Path | None, typer.Argument(hidden=True, help="earlier spelling of --output")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="the new trace (.json, .json.gz)")] = Path(
        "augmented.json"
    ),
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Write the trace again with queue, copy and critical-path tracks, for Perfetto.

    fettle trace augment trace.json.gz --output for-perfetto.json
    """
    output = target or output
    _options.check_file(output, ".json", ".gz")
    trace = open_one(source, fresh)
    added = T.augment(trace, output, path=T.critical_path(trace))
    text = f"wrote {output}: {count_text(added, 'event')} added"
    _show.answer(as_json, lambda: {"file": str(output), "added_events": added}, text)


@app.command()
def report(
    source: Source,
    output: Annotated[Path, typer.Option("--output", "-o", help="the page")] = Path("trace-report.html"),
    before: Annotated[Path | None, typer.Option(help="an earlier trace to compare with")] = None,
    fresh: Fresh = False,
    own_end: OwnEnd = False,
    as_json: Json = False,
) -> None:
    """One self-contained HTML page: account, idle causes, kernels, overlap, ranks, critical path, a step's timeline.

    fettle trace report trace.json.gz -o report.html
    fettle trace report after.json.gz --before before.json.gz
    """
    _options.check_file(output, ".html")
    earlier = open_one(before, fresh, own_end) if before is not None else None
    failed = T.write_report(open_traces(source, fresh, own_end), output, before=earlier)
    text = f"wrote {output}" + "".join(f"\nnot answered: {line}" for line in failed)
    _show.answer(as_json, lambda: {"file": str(output), "not_answered": failed}, text)


@app.command()
def record(
    target: Annotated[
        str, typer.Argument(help="path/to/file.py:function or package.module:function, called once a step")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="the trace")] = Path("trace.json.gz"),
    active: Annotated[int, typer.Option(min=1, help="steps to keep")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="steps to run and throw away")] = 2,
    stacks: Annotated[bool, typer.Option("--stacks", help="with Python stacks: larger and slower")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="with every allocation")] = False,
    device_only: Annotated[
        bool, typer.Option("--device-only", help="kernels and copies without torch's operators: slows least")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a function step by step under the profiler and keep the trace. What the function prints is not shown.

    fettle trace record train.py:step -o trace.json.gz --active 5 --stacks
    """
    from fettle.workload import find_target

    _options.check_file(output, ".json", ".gz")
    with _show.bar("recording") as show, _quiet.users_code_quiet():
        step = find_target(target).function()
        with T.record(
            output, warmup=warmup, active=active, stacks=stacks, memory=memory, device_only=device_only
        ) as profiler:
            for number in range(warmup + active):
                show("recording", number, warmup + active)
                with refusing(f"{target} raised in step {number}:"):
                    result = step()
                if callable(result[0] if isinstance(result, tuple) and result else result):
                    raise UsageError(
                        f"{target} makes a model or a function, and is itself called once a step: name a function that "
                        "runs one step"
                    )
                profiler.step()
    _show.answer(as_json, lambda: {"file": str(output), "steps": active}, f"wrote {output}")
