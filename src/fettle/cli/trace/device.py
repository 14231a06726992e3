"""The device's side: kernels, launches, communication, queues, copies."""

from typing import Any

import polars as pl

from fettle.cli.trace.shared import Answer, joined, question
from fettle.trace.model import Trace


@question
def kernels(traces: list[Trace]) -> Answer:
    """Kernels by type and name, per rank and across ranks.

    [bold]Examples[/]

      fettle trace kernels trace.json.gz --rows 10

      fettle trace kernels ranks/
    """
    from fettle.trace import charts
    from fettle.trace import kernels as k

    table = joined(traces, k.kernel_table)
    frames = {"classes": joined(traces, k.kernel_classes), "kernels": table}
    if len(traces) > 1:
        frames["across_ranks"] = k.kernels_across_ranks(traces)
    return Answer(frames, chart=lambda: charts.bar_chart(table, "name", "sum_ns", color="class"))


@question
def launches(traces: list[Trace]) -> Answer:
    """Launch calls and delays: every launch of every runtime, graphs too.

    [bold]Example[/]

      fettle trace launches trace.json.gz
    """
    from fettle.trace import charts
    from fettle.trace.launches import call_table, launch_stats

    frame = joined(traces, launch_stats)
    return Answer(
        {"summary": call_table(frame)}, chart=lambda: charts.delay_chart(frame), long=lambda: {"launches": frame}
    )


@question
def comm(traces: list[Trace]) -> Answer:
    """Communication: overlap, collectives with bandwidths, arrival skew, stragglers and clocks.

    [bold]Examples[/]

      fettle trace comm ranks/

      fettle trace comm ranks/ --chart collectives.html
    """
    from fettle.trace import charts
    from fettle.trace import communication as c
    from fettle.trace.arrival import arrival, clock_offsets, match_collectives, stragglers

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
    return Answer(frames, notes, lambda: charts.bar_chart(collectives, "collective", "sum_ns"))


@question
def queue(traces: list[Trace]) -> Answer:
    """Queue length of each stream over time, and time on a full queue.

    [bold]Example[/]

      fettle trace queue trace.json.gz --chart queue.html
    """
    from fettle.trace import charts
    from fettle.trace.queue import queue_length, queue_summary

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
    from fettle.trace import charts
    from fettle.trace.queue import bandwidth_summary, copy_bandwidth

    return Answer(
        {"bandwidth": joined(traces, bandwidth_summary)},
        chart=lambda: charts.step_line(copy_bandwidth(traces[0]), "gb_per_s", series="name", unit="GB/s"),
        long=lambda: {"series": joined(traces, copy_bandwidth)},
    )
