"""The device's side: kernels, launches, communication, queues, copies."""

from typing import Annotated

import polars as pl
import typer

from fettle import trace as T
from fettle.cli import _options
from fettle.cli.trace.shared import Answer, next_command, question
from fettle.errors import UsageError
from fettle.trace.analyses.arrival import clock_offsets, match_collectives
from fettle.trace.analyses.flops import Limits, limits_of
from fettle.trace.frames import joined
from fettle.trace.model import Trace


@question
def kernels(traces: list[Trace]) -> Answer:
    """Kernels by type and name, per rank and across ranks.

    fettle trace kernels trace.json.gz --rows 10
    fettle trace kernels ranks/
    """
    table = joined(traces, T.kernel_table)
    frames = {"classes": joined(traces, T.kernel_classes), "kernels": table}
    if len(traces) > 1:
        frames["across_ranks"] = T.kernels_across_ranks(traces)
    return Answer(frames, chart=lambda charts: charts.bar_chart(table, "name", "sum_ns", color="class"))


@question
def occupancy(traces: list[Trace]) -> Answer:
    """How far kernels fill the device: estimated SM efficiency and occupancy, and which kernels leave most unused.

    fettle trace occupancy trace.json.gz
    """
    table = joined(traces, T.kernels_by_sm)
    if not table.height:
        raise UsageError("no kernel of this trace has its blocks per SM, which PyTorch records on NVIDIA's GPUs")
    frames = {"sm_efficiency": joined(traces, T.sm_efficiency), "kernels": table}
    return Answer(frames, chart=lambda charts: charts.bar_chart(table, "name", "unused_ns"))


@question
def flops(
    traces: list[Trace],
    peak: Annotated[
        float | None, typer.Option(min=1e-6, help="peak arithmetic of the device, TFLOP/s; goes with --bandwidth")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=1e-6, help="peak bandwidth of its memory, GB/s; goes with --peak")
    ] = None,
) -> Answer:
    """FLOPs of matrix products, convolutions and attention: by operator, by distinct shapes, against the roofline.

    fettle trace flops trace.json.gz --output roofline.html
    fettle trace flops trace.json.gz --peak 989 --bandwidth 3350
    """
    if (peak is None) != (bandwidth is None):
        raise UsageError("--peak and --bandwidth make a roofline together")
    _options.check_finite("--peak", peak)
    _options.check_finite("--bandwidth", bandwidth)
    roof = Limits(dict.fromkeys((1, 2, 4, 8), peak), bandwidth) if peak is not None and bandwidth is not None else None
    table = joined(traces, lambda t: T.product_table(t, roof))
    if not table.height:
        raise UsageError("no product whose shapes are in this trace: record with record_shapes=True")
    notes = {} if table["roof_share"].null_count() < table.height else {"roof": "unknown: give --peak and --bandwidth"}
    frames = {"operators": T.product_summary(table), "products": table}
    return Answer(frames, notes, lambda charts: charts.roofline_chart(table, roof or limits_of(traces[0])))


@question
def launches(traces: list[Trace]) -> Answer:
    """Launch calls and delays: every launch of every runtime, graphs too.

    fettle trace launches trace.json.gz
    """
    frame = joined(traces, T.launch_stats)
    return Answer(
        {"summary": T.call_table(frame)},
        next_command(traces),
        lambda charts: charts.stack_of(charts.launch_charts(frame)),
        long=lambda: {"launches": frame},
    )


@question
def comm(traces: list[Trace]) -> Answer:
    """Communication: overlap, collectives with bandwidths, arrival skew, stragglers and clocks.

    fettle trace comm ranks/
    fettle trace comm ranks/ --output collectives.html
    """
    collectives = joined(traces, T.collective_table)
    frames = {"overlap": joined(traces, T.overlap), "collectives": collectives}
    notes = next_command(traces)
    if len(traces) > 1:
        matched = match_collectives(traces)
        frames |= {
            "stragglers": T.stragglers(traces, matched),
            "clocks": clock_offsets(matched),
            "arrival": T.arrival(traces, matched).drop("key"),
        }
    else:
        notes["stragglers"] = "unknown: one rank only; give a folder of ranks"
    by_rank = collectives.with_columns(who=pl.format("rank {}: {}", "rank", "collective"))
    return Answer(frames, notes, lambda charts: charts.bar_chart(by_rank, "who", "sum_ns"))


@question
def queue(traces: list[Trace]) -> Answer:
    """Queue length of each stream over time, and time on a full queue.

    fettle trace queue trace.json.gz --output queue.html
    """
    return Answer(
        {"queue": joined(traces, T.queue_summary)},
        chart=lambda charts: charts.queue_chart(joined(traces, T.queue_length)),
        long=lambda: {"series": joined(traces, T.queue_length)},
    )


@question
def bandwidth(traces: list[Trace]) -> Answer:
    """Bandwidth of copies and memory sets.

    fettle trace bandwidth trace.json.gz
    """
    return Answer(
        {"bandwidth": joined(traces, T.bandwidth_summary)},
        chart=lambda charts: charts.bandwidth_chart(joined(traces, T.copy_bandwidth)),
        long=lambda: {"series": joined(traces, T.copy_bandwidth)},
    )
