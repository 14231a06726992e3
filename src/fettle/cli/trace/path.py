"""What held a step up, what if not, and what changed."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer

from fettle import trace as T
from fettle.cli import _options
from fettle.cli.trace.shared import (
    CHARTS,
    Answer,
    Chart,
    Fresh,
    Json,
    OwnEnd,
    Rows,
    Source,
    Step,
    app,
    doubts,
    open_one,
    question,
    show,
    step_windows,
    write_chart,
)
from fettle.errors import UsageError
from fettle.trace.analyses.whatif import kernels_named
from fettle.trace.model import Trace
from fettle.units import count_text


@question
def critical(
    traces: list[Trace],
    step: Step = None,
    own_end: OwnEnd = False,
    overlay: Annotated[
        Path | None, typer.Option(help="write the (first rank's) trace with its path as a track (JSON)")
    ] = None,
) -> Answer:
    """The critical path: what held the step up, over all of its wall clock.

    fettle trace critical trace.json.gz --step 3
    fettle trace critical ranks/ --overlay for-perfetto.json
    """
    frames: dict[str, pl.DataFrame] = {}
    pieces: dict[str, pl.DataFrame] = {}
    paths, summaries = [], []
    for trace in traces:
        prefix = f"rank_{trace.rank}_" if len(traces) > 1 else ""
        paths.append(path := T.critical_path(trace, step))
        summary = T.path_shares(trace, path)
        summaries.append(summary.with_columns(where=pl.lit(f"rank {trace.rank}"), ms=pl.col("time_ns") / 1e6))
        frames |= {f"{prefix}summary": summary, f"{prefix}events": T.path_events(trace, path)}
        pieces[f"{prefix}pieces"] = path.pieces
    if overlay is not None:
        T.augment(traces[0], overlay, path=paths[0])
    notes: dict[str, Any] = step_windows(own_end)
    if len(traces) > 1:
        try:
            joined = T.critical_path_of_ranks(traces, step)
        except UsageError as error:
            notes["across ranks"] = f"unknown: {error}"
        else:
            by_rank = joined.pieces.group_by("rank", "category").agg(
                time_ns=(pl.col("end_ns") - pl.col("start_ns")).sum()
            )
            frames["across_ranks"] = by_rank.sort("time_ns", descending=True)
    every = pl.concat(summaries)

    def drawn(charts: Any) -> Any:
        if len(traces) == 1:
            return charts.bar_chart(every, "category", "time_ns")
        return charts.stacked(charts.main_parts(every, "category", "ms"), "where", "category", "ms")

    return Answer(frames, notes, drawn, lambda: pieces)


@question
def whatif(
    traces: list[Trace],
    step: Step = None,
    as_json: Json = False,
    rows: Rows = 1000,
    own_end: OwnEnd = False,
    kernels: Annotated[
        str | None, typer.Option(help="kernels that match this expression take --factor of their time")
    ] = None,
    factor: Annotated[
        float | None, typer.Option(min=0, help="factor on the time of --kernels; default 0: they take no time")
    ] = None,
) -> Answer:
    """How long would the step be without syncs, with perfect overlap, with one graph launch, with faster kernels?

    fettle trace whatif trace.json.gz
    fettle trace whatif trace.json.gz --kernels gemm --factor 0.5 --output whatif.html
    """
    if factor is not None and kernels is None:
        raise UsageError("--factor goes with --kernels: name them, for example --kernels gemm")
    answers, questions = [], []
    notes: dict[str, Any] = step_windows(own_end)
    uncertain: dict[str, list[str]] = {}
    if kernels is not None and not any(kernels_named(trace, kernels).any() for trace in traces):
        raise UsageError(f"no kernel's name matches {kernels!r}: 'fettle trace kernels' lists them")
    for trace in traces:
        path = T.critical_path(trace, step)
        changes = ["kernels"] if kernels is not None else ["no_syncs", "perfect_overlap", "graph", "data_ready"]
        if not trace.device_keys and kernels is None:
            changes = ["data_ready"]
            notes[f"rank {trace.rank}"] = "no device work: only the data's part can be asked"
        for change in changes:
            answer = T.what_if(trace, change, kernels=kernels or "", factor=factor or 0.0, path=path)
            first = {"answer": answer.answer, "saving_share": answer.saving_share}
            answers.append({"rank": trace.rank, "change": change, **first, **asdict(answer)})
            if answer.cannot_tell:
                uncertain[f"rank {trace.rank}"] = ["what-if"]
            questions.append(f"rank {trace.rank}: if {answer.question}")
    table = pl.DataFrame(answers)
    shown = table if as_json else table.drop("unknown")
    asked = table.with_columns(question=pl.Series(questions))
    return Answer({"what_if": shown}, notes, lambda charts: charts.what_if_chart(asked), doubts=uncertain)


@app.command()
def compare(
    before: Source,
    after: Annotated[Path, typer.Argument(help="the other trace")],
    as_json: Json = False,
    rows: Rows = 20,
    chart: Chart = None,
    fresh: Fresh = False,
    skip: Annotated[int, typer.Option(min=0, help="leave out this many steps at the beginning")] = 0,
    steps_before: Annotated[str | None, typer.Option(help="steps of the first trace, such as 3,4,5")] = None,
    steps_after: Annotated[str | None, typer.Option(help="steps of the second trace")] = None,
) -> None:
    """Why is one trace slower than another? The change of the step time, booked to causes.

    fettle trace compare before.json.gz after.json.gz --skip 1
    """
    _options.check_file(chart, *CHARTS)
    first, second = (open_one(path, fresh, asked="compare") for path in (before, after))
    result = T.compare(first, second, skip=skip, steps_before=_numbers(steps_before), steps_after=_numbers(steps_after))
    shown = result.parts.filter(pl.col("change_ns") != 0)
    write_chart(
        chart, lambda charts: charts.change_chart(shown.filter(~pl.col("sums")), result.before_ns, result.after_ns)
    )
    if as_json:
        figures = {name: getattr(result, name) for name in ("before_ns", "after_ns", "change_ns", "low_ns", "high_ns")}
        notes = {"notes": list(result.notes), "uncertain": doubts([("before", first), ("after", second)])}
        frames = {"parts": shown, "work": result.work, "operators": result.operators}
        show(Answer(frames, figures | notes), as_json, rows)
        return
    interval = f"95%: {result.low_ns / 1e6:+,.3f} to {result.high_ns / 1e6:+,.3f}"
    if math.isnan(result.low_ns):
        interval = "no interval"
    text = {
        "mean step": f"{result.before_ns / 1e6:,.3f} -> {result.after_ns / 1e6:,.3f} ms, "
        f"change {result.change_ns / 1e6:+,.3f} ms ({interval}); "
        f"{result.steps_before} and {count_text(result.steps_after, 'step')}",
        **({"notes": "; ".join(result.notes)} if result.notes else {}),
    }
    parts = shown.drop("sums").sort(pl.col("change_ns").abs(), descending=True)
    show(Answer({"parts, longest change first": parts}, text), as_json, 1000)
    leading = ["name", "operator", "change_ns", "count", "count_after", "time_ns", "time_ns_after", "class"]
    work = result.work.select(*leading, pl.exclude(*leading))
    changed = result.operators.filter(pl.col("change") != "same")
    show(Answer({"device work, a step": work, "operators, a step": changed}), as_json, rows)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"step numbers look like 3,4,5, not '{text}'") from error
