"""What to ask first: can the trace be trusted, where did the time go, why was the device idle."""

from collections.abc import Sequence
from typing import Annotated, Any

import polars as pl
import typer

from fettle import trace as T
from fettle.cli import _show
from fettle.cli.trace.shared import (
    Answer,
    Fresh,
    Json,
    OwnEnd,
    Rows,
    Source,
    Step,
    app,
    listing,
    next_command,
    question,
    read_traces,
    show,
    step_windows,
)
from fettle.errors import UsageError
from fettle.trace.analyses.account import account_parts
from fettle.trace.analyses.health import Health
from fettle.trace.analyses.idle import missing_information
from fettle.trace.frames import joined
from fettle.trace.model import Trace
from fettle.units import count_text


@app.command()
def health(source: Source, as_json: Json = False, fresh: Fresh = False) -> None:
    """Can the trace be trusted? What was skipped, repaired or missing.

    fettle trace health trace.json.gz
    fettle trace health ranks/ --json
    """
    healths = [T.trace_health(t, replayed=True) for t in read_traces(source, fresh)]
    _show.answer(as_json, lambda: [one.as_dict() for one in healths], lambda _: _show_healths(healths))


def _show_healths(healths: Sequence[Health]) -> None:
    for one in healths:
        rows = [(f.severity, f.what, f.count, f.means) for f in one.findings]
        devices = f"device{'s' * (len(one.devices) > 1)} {', '.join(map(str, one.devices))}"
        frame = pl.DataFrame(rows, schema=["severity", "what", "count", "means"], orient="row")
        notes = {
            "trace": f"{one.path}, rank {one.rank}: {one.kept:,} of {one.events:,} events kept, "
            f"{one.span_ns / 1e6:,.3f} ms, {devices if one.devices else 'no device'}",
            "uncertain": ", ".join(one.uncertain) or "nothing",
        }
        show(Answer({"findings": frame}, notes), False, 100)


@listing
def check(traces: list[Trace], rows: Rows = 1000) -> Answer:
    """Do the answers agree with each other? What must add up, as a table; exit code 1 where it does not.

    fettle trace check trace.json.gz
    """
    frame = joined(traces, T.identities)
    return Answer({"identities": frame}, failed=not frame["holds"].all())


@question
def steps(traces: list[Trace], as_json: Json = False, own_end: OwnEnd = False) -> Answer:
    """The steps: medians, outliers, drift.

    fettle trace steps trace.json.gz --output steps.html
    """
    frame = joined(traces, T.steps)
    summaries = {f"rank {t.rank}": T.step_summary(T.steps(t)) for t in traces}
    far = [(t.rank, n) for t, s in zip(traces, summaries.values(), strict=True) for n in s["outliers"]]  # type: ignore[union-attr]
    outliers = pl.DataFrame(far, schema={"rank": pl.Int64(), "step": frame.schema["step"]}, orient="row")
    notes: dict[str, Any] = next_command(traces, "why slow ones are slower", "trace report") | step_windows(own_end)
    notes |= summaries if as_json else {k: _in_words(s) for k, s in summaries.items()}
    return Answer({"steps": frame}, notes, lambda charts: charts.step_chart(frame, outliers))


def _in_words(summary: dict[str, float | int | list[int]]) -> str:
    """A step summary for people."""
    from fettle.trace.report.section import ms

    median, spread, drift = (float(summary[k]) for k in ("median_ns", "mad_ns", "drift_ns_per_step"))  # type: ignore[arg-type]
    count = int(summary["steps"])  # type: ignore[arg-type]
    outliers = summary["outliers"]
    return (
        f"{count_text(count, 'step')}, median {ms(median)} (median deviation {ms(spread)}); "
        + (
            f"outliers: {', '.join(map(str, outliers))}; "
            if isinstance(outliers, list) and outliers
            else "no outliers; "
        )
        + (f"drift {ms(drift)} a step" if summary["drift_is_clear"] else "no clear drift")
    )


@question
def account(
    traces: list[Trace],
    as_json: Json = False,
    annotation: Annotated[str | None, typer.Option(help="treat annotations of this name as steps")] = None,
    own_end: OwnEnd = False,
) -> Answer:
    """Where did the time go? Every nanosecond of each step, booked once.

    fettle trace account trace.json.gz --output account.html
    fettle trace account trace.json.gz --annotation generate
    """
    frame = joined(traces, lambda t: T.time_account(t, annotation))
    total = T.account_total(frame)
    # For people the sum is a list of its parts.
    frames = {"total": total, "steps": frame} if as_json else {
        "where the time went": account_parts(total), "steps": frame.select(pl.exclude("^idle_.*_ns$")),
    }  # fmt: skip
    notes = step_windows(own_end or annotation is not None) | next_command(traces)
    return Answer(frames, notes, lambda charts: charts.account_chart(frame))


@question
def idle(
    traces: list[Trace], step: Step = None, own_end: OwnEnd = False, as_json: Json = False, rows: Rows = 100
) -> Answer:
    """Why was the device idle in the steps? Each gap cut into the pieces that different causes held.

    fettle trace idle trace.json.gz --step 3
    fettle trace idle ranks/ --output idle.png
    """
    frames = [T.idle_summary(t, d, step) for t in traces for d in t.device_keys]
    if not frames:
        raise UsageError("no device work in this trace: 'fettle trace host' answers for the CPU")
    frame = pl.concat(frames)
    missing = {f"rank {t.rank} device {d}": missing_information(t, d, step) for t in traces for d in t.device_keys}
    missing = {place: text for place, text in missing.items() if text}
    notes: dict[str, Any] = {"of each stream": "over the whole trace", **step_windows(own_end), **next_command(traces)}
    notes |= {"missing": missing} if as_json else {f"missing for {place}": text for place, text in missing.items()}
    shown = {"idle": frame, "streams": joined(traces, T.idle_streams)}
    return Answer(shown, notes, lambda charts: charts.bar_chart(frame, "cause", "idle_ns"))
