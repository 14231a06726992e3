"""The host's side: operators, calls, annotations, threads, memory."""

from typing import Annotated

import polars as pl
import typer

from fettle.cli.trace.shared import Chart, Fresh, Json, Rows, Source, app, joined, open_traces, show, write_chart
from fettle.errors import UsageError


@app.command()
def operators(
    source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False
) -> None:
    """Operators by name and shapes; and kernels by module and source line.

    [bold]Example[/]

      fettle trace operators trace.json.gz --rows 10
    """
    from fettle.trace.analyses.attribution import attribute_kernels
    from fettle.trace.analyses.operators import operator_table
    from fettle.trace.report import charts

    traces = open_traces(source, fresh)
    table, work = joined(traces, operator_table), joined(traces, attribute_kernels)
    frames = {"operators": table}
    for column in ("module", "line", "forward_operator", "generated"):
        if work[column].null_count() < work.height:
            frames[column] = (
                work.group_by("rank", column)
                .agg(device_ns=pl.col("duration_ns").sum(), kernels=pl.len())
                .sort("device_ns", column, descending=[True, False])
            )
    cost = "device_ns" if any(t.device_keys for t in traces) else "self_ns"
    write_chart(chart, lambda: charts.bar_chart(table, "operator", cost))
    show(frames | ({"work": work} if as_json else {}), as_json, rows, traces=traces)


@app.command()
def tree(
    source: Source,
    as_json: Json = False,
    rows: Rows = 60,
    chart: Chart = None,
    fresh: Fresh = False,
    depth: Annotated[int, typer.Option(min=1, max=200, help="how deep")] = 4,
    python: Annotated[bool, typer.Option("--python", help="with Python functions")] = False,
) -> None:
    """Calls merged by path, with host and device time.

    [bold]Examples[/]

      fettle trace tree trace.json.gz --depth 6

      fettle trace tree trace.json.gz --python --chart flame.html
    """
    from fettle.trace.analyses.operators import call_blocks, call_tree
    from fettle.trace.report import charts

    traces = open_traces(source, fresh)
    flame = (traces[0], bool(traces[0].device_keys), depth, python)
    write_chart(chart, lambda: charts.blocks(call_blocks(*flame), "milliseconds"))
    tree = joined(traces, lambda t: call_tree(t, max_depth=depth, python=python))
    show({"tree": tree}, as_json, rows, traces=traces)


@app.command()
def sequences(
    source: Source,
    operator: Annotated[str, typer.Argument(help="part of an operator's name; any operator where left out")] = "",
    as_json: Json = False,
    rows: Rows = 10,
    chart: Chart = None,
    fresh: Fresh = False,
    min_kernels: Annotated[int, typer.Option(min=1, help="the fewest kernels in a sequence")] = 3,
) -> None:
    """Frequent kernel sequences under an operator, or under any.

    [bold]Examples[/]

      fettle trace sequences trace.json.gz

      fettle trace sequences trace.json.gz aten::linear --min-kernels 1
    """
    from fettle.trace.analyses.operators import kernel_sequences
    from fettle.trace.report import charts

    traces = open_traces(source, fresh)
    found = joined(traces, lambda t: kernel_sequences(t, operator, min_kernels=min_kernels, top=rows))
    named = found.with_columns(sequence=pl.format("{} x {}: {}", "count", "operator", "kernels"))
    write_chart(chart, lambda: charts.bar_chart(named, "sequence", "device_ns"))
    notes = {} if found.height or as_json else {"none": f"no operator launched {min_kernels} kernels: --min-kernels 1"}
    show({"sequences": found}, as_json, rows, notes, traces)


@app.command()
def annotations(
    source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False
) -> None:
    """User annotations with the host time inside them and the device time of all that they launched, backward too.

    [bold]Example[/]

      fettle trace annotations trace.json.gz
    """
    from fettle.trace.analyses.operators import annotation_table
    from fettle.trace.report import charts

    traces = open_traces(source, fresh)
    table = joined(traces, annotation_table)
    cost = "device_inclusive_ns" if any(t.device_keys for t in traces) else "host_inclusive_ns"
    write_chart(chart, lambda: charts.bar_chart(table, "annotation", cost))
    show({"annotations": table}, as_json, rows, traces=traces)


@app.command()
def counters(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """Hardware counters (CUPTI) by operator.

    [bold]Example[/]

      fettle trace counters trace.json.gz --chart counters.html
    """
    from fettle.trace.analyses.operators import counters_by_operator
    from fettle.trace.report import charts

    traces = open_traces(source, fresh)
    frames = [f for t in traces if (f := counters_by_operator(t)) is not None]
    if not frames:
        raise UsageError("no hardware counters in this trace, or not as many ranges as launches: they cannot be paired")
    frame = pl.concat(frames)
    sums = (
        frame.group_by("rank", "operator", "counter")
        .agg(pl.col("value").sum())
        .sort("value", "operator", descending=[True, False])
    )
    write_chart(chart, lambda: charts.counter_chart(sums))
    show({"by_operator": sums, "ranges": frame}, as_json, rows, traces=traces)


@app.command()
def host(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """The CPU's side: threads, operator overhead, small operators, conversions, data loading.

    [bold]Example[/]

      fettle trace host trace.json.gz
    """
    from fettle.trace.analyses import host as h
    from fettle.trace.report import charts

    traces = open_traces(source, fresh)
    summary = joined(traces, h.host_summary)
    write_chart(chart, lambda: charts.bar_chart(summary, "question", "time_ns"))
    frames = {
        "questions": summary,
        "threads": joined(traces, h.threads),
        "parallel": joined(traces, h.parallel_operators),
        "sizes": joined(traces, h.operator_sizes),
        "small_operators": joined(traces, h.small_operators),
        "conversions": joined(traces, h.conversions),
        "data_loading": joined(traces, h.data_loading),
    }
    show(frames, as_json, rows, traces=traces)


@app.command()
def memory(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """Memory over time: who held what at the peak.

    [bold]Example[/]

      fettle trace memory trace.json.gz
    """
    from fettle.trace.analyses.memory_timeline import memory_peak, memory_timeline
    from fettle.trace.report import charts

    traces = open_traces(source, fresh)
    timeline = joined(traces, memory_timeline)
    if not timeline.height:
        raise UsageError("no memory events in this trace: record with profile_memory=True")
    write_chart(
        chart,
        lambda: charts.step_line(
            timeline.with_columns(mib=pl.col("allocated_bytes") / 2**20),
            "mib",
            series="device",
            unit="MiB",
        ),
    )
    frames = {"peak": joined(traces, memory_peak)} | ({"timeline": timeline} if as_json else {})
    show(frames, as_json, rows, traces=traces)
