"""The host's side: operators, calls, annotations, threads, memory."""

from typing import Annotated

import polars as pl
import typer

from fettle import trace as T
from fettle.cli.trace.shared import Answer, Json, Rows, next_command, question
from fettle.errors import UsageError
from fettle.trace.analyses.attribution import work_by
from fettle.trace.analyses.operators import call_blocks, counter_sums
from fettle.trace.frames import joined
from fettle.trace.model import Trace
from fettle.units import count_text


@question
def operators(traces: list[Trace]) -> Answer:
    """Operators by name and shapes; and kernels by module and source line.

    fettle trace operators trace.json.gz --rows 10
    """
    table, work = joined(traces, T.operator_table), joined(traces, T.attribute_kernels)
    frames = {"operators": table}
    for column in ("module", "line", "forward_operator", "generated"):
        if work[column].null_count() < work.height:
            frames[column] = work_by(work, column)
    cost = "device_ns" if any(t.device_keys for t in traces) else "self_ns"
    return Answer(frames, chart=lambda charts: charts.bar_chart(table, "operator", cost), long=lambda: {"work": work})


@question
def tree(
    traces: list[Trace],
    rows: Rows = 60,
    depth: Annotated[int, typer.Option(min=1, max=200, help="deepest level of calls that is shown")] = 4,
    python: Annotated[bool, typer.Option("--python", help="include Python functions")] = False,
) -> Answer:
    """Calls merged by path, with host and device time.

    fettle trace tree trace.json.gz --depth 6
    fettle trace tree trace.json.gz --python --output flame.html
    """
    flame = (traces, any(trace.device_keys for trace in traces), depth, python)
    return Answer(
        {"tree": joined(traces, lambda t: T.call_tree(t, max_depth=depth, python=python))},
        chart=lambda charts: charts.blocks(call_blocks(*flame), "milliseconds"),
    )


@question
def sequences(
    traces: list[Trace],
    operator: Annotated[str, typer.Argument(help="part of an operator's name; default: any")] = "",
    as_json: Json = False,
    rows: Rows = 10,
    min_kernels: Annotated[int, typer.Option(min=1, help="the fewest kernels in a sequence")] = 3,
) -> Answer:
    """Frequent kernel sequences under an operator, or under any.

    fettle trace sequences trace.json.gz
    fettle trace sequences trace.json.gz aten::linear --min-kernels 1
    """
    table = joined(traces, lambda t: T.kernel_sequences(t, operator, min_kernels=min_kernels, top=rows))
    named = table.with_columns(sequence=pl.format("{} x {}: {}", "count", "operator", "kernels"))
    none = f"no operator launched {count_text(min_kernels, 'kernel')}: --min-kernels 1"
    notes = {} if table.height or as_json else {"none": none}
    return Answer({"sequences": table}, notes, lambda charts: charts.bar_chart(named, "sequence", "device_ns"))


@question
def annotations(traces: list[Trace]) -> Answer:
    """User annotations with the host time inside them and the device time of all that they launched, backward too.

    fettle trace annotations trace.json.gz
    """
    table = joined(traces, T.annotation_table)
    cost = "device_inclusive_ns" if any(t.device_keys for t in traces) else "host_inclusive_ns"
    return Answer({"annotations": table}, chart=lambda charts: charts.bar_chart(table, "annotation", cost))


@question
def counters(traces: list[Trace]) -> Answer:
    """Hardware counters (CUPTI) by operator.

    fettle trace counters trace.json.gz --output counters.html
    """
    frames = [f for t in traces if (f := T.counters_by_operator(t)) is not None]
    if not frames:
        raise UsageError("no hardware counters in this trace, or not as many ranges as launches: they cannot be paired")
    frame = pl.concat(frames)
    shown = {"by_operator": counter_sums(frame, "rank"), "ranges": frame}
    return Answer(shown, chart=lambda charts: charts.counter_chart(counter_sums(frame)))


@question
def host(traces: list[Trace]) -> Answer:
    """The CPU's side: threads, operator overhead, small operators, conversions, data loading.

    fettle trace host trace.json.gz
    """
    summary = joined(traces, T.host_summary)
    frames = {
        "questions": summary,
        "threads": joined(traces, T.threads),
        "parallel": joined(traces, T.parallel_operators),
        "sizes": joined(traces, T.operator_sizes),
        "small_operators": joined(traces, T.small_operators),
        "conversions": joined(traces, T.conversions),
        "data_loading": joined(traces, T.data_loading),
    }
    return Answer(frames, next_command(traces), lambda charts: charts.bar_chart(summary, "question", "time_ns"))


@question
def memory(traces: list[Trace]) -> Answer:
    """Memory over time: who held what at the peak.

    fettle trace memory trace.json.gz
    """
    timeline = joined(traces, T.memory_timeline)
    if not timeline.height:
        raise UsageError("no memory events in this trace: record with profile_memory=True")
    where = pl.format("rank {}, {}", "rank", "device") if len(traces) > 1 else pl.col("device")
    shown = timeline.with_columns(where=where, mib=pl.col("held_bytes") / 2**20)
    has_totals = (timeline["allocated_bytes"] >= 0).all()
    return Answer(
        {"peak": joined(traces, T.memory_peak)},
        {} if has_totals else {"bytes": "since the trace began; what the allocator held in all is not in it"},
        chart=lambda charts: charts.step_line(shown, "mib", series="where", unit="MiB"),
        long=lambda: {"timeline": timeline},
    )
