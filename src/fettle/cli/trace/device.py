"""The device's side: kernels, launches, communication, queues, copies."""

from typing import Any

import polars as pl

from fettle.cli.trace.shared import Chart, Fresh, Json, Rows, Source, app, joined, open_traces, show, write_chart


@app.command()
def kernels(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """Kernels by type and name, per rank and across ranks.

    [bold]Examples[/]

      fettle trace kernels trace.json.gz --rows 10

      fettle trace kernels ranks/
    """
    from fettle.trace.analyses import kernels as k
    from fettle.trace.report import charts

    traces = open_traces(source, fresh)
    table = joined(traces, k.kernel_table)
    write_chart(chart, lambda: charts.bar_chart(table, "name", "sum_ns", color="class"))
    frames = {"classes": joined(traces, k.kernel_classes), "kernels": table}
    if len(traces) > 1:
        frames["across_ranks"] = k.kernels_across_ranks(traces)
    show(frames, as_json, rows, traces=traces)


@app.command()
def launches(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """Launch calls and delays: every launch of every runtime, graphs too.

    [bold]Example[/]

      fettle trace launches trace.json.gz
    """
    from fettle.trace.analyses.launches import call_table, launch_stats
    from fettle.trace.report import charts

    traces = open_traces(source, fresh)
    frame = joined(traces, launch_stats)
    write_chart(chart, lambda: charts.delay_chart(frame))
    summary = call_table(frame)
    show({"summary": summary, **({"launches": frame} if as_json else {})}, as_json, rows, traces=traces)


@app.command()
def comm(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """Communication: overlap, collectives with bandwidths, arrival skew, stragglers and clocks.

    [bold]Examples[/]

      fettle trace comm ranks/

      fettle trace comm ranks/ --chart collectives.html
    """
    from fettle.trace.analyses import communication as c
    from fettle.trace.analyses.arrival import arrival, clock_offsets, match_collectives, stragglers
    from fettle.trace.report import charts

    traces = open_traces(source, fresh)
    frames = {"overlap": joined(traces, c.overlap), "collectives": joined(traces, c.collective_table)}
    notes = {}
    if len(traces) > 1:
        frames |= {
            "stragglers": stragglers(traces),
            "clocks": clock_offsets(match_collectives(traces)),
            "arrival": arrival(traces).drop("key"),
        }
    else:
        notes["stragglers"] = "unknown: one rank only; give a folder of ranks"
    write_chart(chart, lambda: charts.bar_chart(frames["collectives"], "collective", "sum_ns"))
    show(frames, as_json, rows, notes, traces)


@app.command()
def queue(source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False) -> None:
    """Queue length of each stream over time, and time on a full queue.

    [bold]Example[/]

      fettle trace queue trace.json.gz --chart queue.html
    """
    from fettle.trace.analyses.queue import queue_length, queue_summary
    from fettle.trace.report import charts

    traces = open_traces(source, fresh)

    def line() -> Any:
        series = queue_length(traces[0]).with_columns(name=pl.format("device {} stream {}", "device", "stream"))
        return charts.step_line(series, "length", series="name", unit="launched, not started")

    write_chart(chart, line)
    frames = {"queue": joined(traces, queue_summary)}
    show(frames | ({"series": joined(traces, queue_length)} if as_json else {}), as_json, rows, traces=traces)


@app.command()
def bandwidth(
    source: Source, as_json: Json = False, rows: Rows = 30, chart: Chart = None, fresh: Fresh = False
) -> None:
    """Bandwidth of copies and memory sets.

    [bold]Example[/]

      fettle trace bandwidth trace.json.gz
    """
    from fettle.trace.analyses.queue import bandwidth_summary, copy_bandwidth
    from fettle.trace.report import charts

    traces = open_traces(source, fresh)
    write_chart(chart, lambda: charts.step_line(copy_bandwidth(traces[0]), "gb_per_s", series="name", unit="GB/s"))
    show(
        {"bandwidth": joined(traces, bandwidth_summary)}
        | ({"series": joined(traces, copy_bandwidth)} if as_json else {}),
        as_json,
        rows,
        traces=traces,
    )
