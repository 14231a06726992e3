"""The device's side: kernels, launches, communication, queues, copies."""

from typing import Annotated, Any

import polars as pl
import typer

from fettle.cli.trace.shared import Answer, question
from fettle.errors import UsageError
from fettle.trace.frames import joined
from fettle.trace.model import Trace


@question
def kernels(traces: list[Trace]) -> Answer:
    """Kernels by type and name, per rank and across ranks.

    [bold]Examples[/]

      fettle trace kernels trace.json.gz --rows 10

      fettle trace kernels ranks/
    """
    from fettle.trace.analyses import kernels as k
    from fettle.trace.report import charts

    table = joined(traces, k.kernel_table)
    frames = {"classes": joined(traces, k.kernel_classes), "kernels": table}
    if len(traces) > 1:
        frames["across_ranks"] = k.kernels_across_ranks(traces)
    return Answer(frames, chart=lambda: charts.bar_chart(table, "name", "sum_ns", color="class"))


@question
def flops(
    traces: list[Trace],
    peak: Annotated[
        float | None, typer.Option(min=1e-6, help="what the device computes at most, TFLOP/s; for --bandwidth too")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(min=1e-6, help="what its memory moves at most, GB/s")] = None,
) -> Answer:
    """FLOPs of matrix products, convolutions and attention: by operator, by distinct shapes, against the roofline.

    [bold]Examples[/]

      fettle trace flops trace.json.gz --chart roofline.html

      fettle trace flops trace.json.gz --peak 989 --bandwidth 3350
    """
    from fettle.trace.analyses.flops import Limits, limits_of, product_summary, product_table
    from fettle.trace.report import charts

    if (peak is None) != (bandwidth is None):
        raise UsageError("--peak and --bandwidth make a roofline together")
    roof = Limits(dict.fromkeys((1, 2, 4, 8), peak), bandwidth) if peak is not None and bandwidth is not None else None
    table = joined(traces, lambda t: product_table(t, roof))
    if not table.height:
        raise UsageError("no product whose shapes are in this trace: record with record_shapes=True")
    notes = {} if table["roof_share"].null_count() < table.height else {"roof": "unknown: give --peak and --bandwidth"}
    frames = {"operators": product_summary(table), "products": table}
    return Answer(frames, notes, lambda: charts.roofline_chart(table, roof or limits_of(traces[0])))


@question
def launches(traces: list[Trace]) -> Answer:
    """Launch calls and delays: every launch of every runtime, graphs too.

    [bold]Example[/]

      fettle trace launches trace.json.gz
    """
    from fettle.trace.analyses.launches import call_table, launch_stats
    from fettle.trace.report import charts

    frame = joined(traces, launch_stats)
    return Answer(
        {"summary": call_table(frame)},
        chart=lambda: charts.stack_of(charts.launch_charts(frame)),
        long=lambda: {"launches": frame},
    )


@question
def comm(traces: list[Trace]) -> Answer:
    """Communication: overlap, collectives with bandwidths, arrival skew, stragglers and clocks.

    [bold]Examples[/]

      fettle trace comm ranks/

      fettle trace comm ranks/ --chart collectives.html
    """
    from fettle.trace.analyses import communication as c
    from fettle.trace.analyses.arrival import arrival, clock_offsets, match_collectives, stragglers
    from fettle.trace.report import charts

    collectives = joined(traces, c.collective_table)
    frames = {"overlap": joined(traces, c.overlap), "collectives": collectives}
    notes = {}
    if len(traces) > 1:
        frames |= {
            "stragglers": stragglers(traces),
            "clocks": clock_offsets(match_collectives(traces)),
            "arrival": arrival(traces).drop("key"),
        }
    else:
        notes["stragglers"] = "unknown: one rank only; give a folder of ranks"
    by_rank = collectives.group_by("rank", "collective", maintain_order=True).agg(pl.col("sum_ns").sum())
    by_rank = by_rank.with_columns(who=pl.format("rank {}: {}", "rank", "collective"))
    return Answer(frames, notes, lambda: charts.bar_chart(by_rank, "who", "sum_ns"))


@question
def queue(traces: list[Trace]) -> Answer:
    """Queue length of each stream over time, and time on a full queue.

    [bold]Example[/]

      fettle trace queue trace.json.gz --chart queue.html
    """
    from fettle.trace.analyses.queue import queue_length, queue_summary
    from fettle.trace.report import charts

    def line() -> Any:
        series = queue_length(traces[0]).with_columns(name=pl.format("device {} stream {}", "device", "stream"))
        return charts.step_line(series, "length", series="name", unit="launched, not started")

    return Answer(
        {"queue": joined(traces, queue_summary)}, chart=line, long=lambda: {"series": joined(traces, queue_length)}
    )


@question
def bandwidth(traces: list[Trace]) -> Answer:
    """Bandwidth of copies and memory sets.

    [bold]Example[/]

      fettle trace bandwidth trace.json.gz
    """
    from fettle.trace.analyses.queue import bandwidth_summary, copy_bandwidth
    from fettle.trace.report import charts

    return Answer(
        {"bandwidth": joined(traces, bandwidth_summary)},
        chart=lambda: charts.step_line(copy_bandwidth(traces[0]), "gb_per_s", series="name", unit="GB/s"),
        long=lambda: {"series": joined(traces, copy_bandwidth)},
    )
