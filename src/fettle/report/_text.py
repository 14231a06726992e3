"""Text that is written: its time taken apart, how near it is to the reference's, and to what the machine allows."""

from __future__ import annotations

import math

import altair as alt

from fettle.generate.limits import Point, Work, peak_bytes, peak_flops, points
from fettle.measure import Trial
from fettle.page import Cell, Figure, Table, picture, theme
from fettle.page.theme import ACCENT, QUIET, WARN, Rows, coloured
from fettle.report import _format as fmt
from fettle.report._facts import is_winner, name_of, ranked
from fettle.result import Outcome
from fettle.units import count_text


def timed(result: Outcome) -> list[Trial]:
    """The trials whose text was taken apart, in their order of rank."""
    return [trial for trial in ranked(result) if trial.generation is not None]


def speeds(result: Outcome) -> Table:
    """Time to the first token, per token and between them, tokens a second by rows, and the shares of the limits."""
    trials = timed(result)
    counts = sorted(
        {int(rows) for trial in trials for rows in (trial.generation.tokens_per_s if trial.generation else {})}
    )
    rows: list[dict[str, Cell | str]] = []
    for trial in trials:
        text = trial.generation
        assert text is not None
        between = (text.itl_p50_ms, text.itl_p90_ms, text.itl_p99_ms)
        shares = {point.phase: fmt.share(point.share) for point in standing(result, trial)}
        rows.append({
            "recipe": Cell(name_of(trial.recipe), code=True), "first token": fmt.milliseconds(text.ttft_ms),
            "per token": fmt.milliseconds(text.tpot_ms),
            "between, p50 / p90 / p99": " / ".join(map(fmt.milliseconds, between)),
            **{f"tokens/s, {count_text(count, 'row')}": fmt.number(text.tokens_per_s.get(str(count)), 3)
               for count in counts},
            "memory": fmt.size(text.peak_bytes), "of the limit, prefill": shares.get("prefill", "–"),
            "decode": shares.get("decode", "–"),
        })  # fmt: skip
    return Table.of(rows, ["recipe"], stack=True)


def quality(result: Outcome) -> Table:
    """How near each recipe's text is to the reference's."""
    rows: list[dict[str, Cell | str]] = []
    for trial in timed(result):
        accuracy = trial.accuracy
        ratio = f"{accuracy.perplexity_ratio:.4f} [{accuracy.perplexity_low:.4f}, {accuracy.perplexity_high:.4f}]"
        rows.append({
            "recipe": Cell(name_of(trial.recipe), code=True), "mean KL": fmt.error(accuracy.error),
            "worst token": fmt.error(accuracy.max_abs), "top-1": fmt.share(accuracy.agreement),
            "perplexity": fmt.number(accuracy.perplexity),
            "over the reference's": ratio if math.isfinite(accuracy.perplexity_ratio) else "–",
            "other tokens, written alone": fmt.share(accuracy.unequal),
        })  # fmt: skip
    return Table.of(rows, ["recipe"], stack=True)


def standing(result: Outcome, trial: Trial) -> list[Point]:
    """Where a trial's prefill and decode stand on the roofline."""
    reference = result.reference
    work = Work(reference.prefill_flops, reference.decode_flops)
    return list(points(trial.generation, work, result.machine.get("peaks", {}))) if trial.generation else []


def roofline(result: Outcome) -> Figure | None:
    """Operations a second by operations for each byte, under what bandwidth and arithmetic allow."""
    rows: Rows = [
        {"recipe": name_of(trial.recipe), "phase": point.phase, "x": point.intensity, "y": point.flops / 1e9,
         "share": fmt.share(point.share), "status": "winner" if is_winner(result, trial) else "other"}
        for trial in timed(result) for point in standing(result, trial)
    ]  # fmt: skip
    peaks = result.machine.get("peaks", {})
    best, bandwidth = peak_flops(peaks), peak_bytes(peaks)
    if not rows or not math.isfinite(best * bandwidth):
        return None
    knee = best / bandwidth
    low, high = min(*(row["x"] for row in rows), knee) / 3, max(*(row["x"] for row in rows), knee) * 3
    roof: Rows = [{"x": x, "y": min(best, bandwidth * x) / 1e9} for x in (low, knee, high)]
    log = alt.Scale(type="log")
    tens = alt.Axis(values=[10.0**power for power in range(-6, 9)])
    x = alt.X("x:Q", title="FLOP for each byte of weights and cache (log)", scale=log, axis=tens)
    y = alt.Y("y:Q", title="GFLOP/s (log)", scale=log, axis=tens)
    line = alt.Chart(theme.data(roof)).mark_line(color=WARN, strokeWidth=2).encode(x=x, y=y)
    dots = (
        alt.Chart(theme.data(rows))
        .mark_point(filled=True, size=70, opacity=0.8)
        .encode(
            x=x,
            y=y,
            shape=alt.Shape("phase:N", title=None),
            color=coloured("status", {"winner": ACCENT, "other": QUIET}),
            tooltip=["recipe:N", "phase:N", alt.Tooltip("y:Q", title="GFLOP/s", format=".3g"),
                     alt.Tooltip("share:N", title="of the limit there")],
        )
    )  # fmt: skip
    shares = "; ".join(f"{row['recipe']} {row['phase']} {row['share']}" for row in rows[:16])
    words = f"Shares of what bandwidth or arithmetic allow: {shares}."
    return picture("roofline", "Prefill and decode under the machine's limits", words, 320, line, dots)


def sentence(result: Outcome) -> str:
    """The winner's text in one sentence, beside the model as given; empty where no text was written."""
    winner, baseline = result.winner, result.baseline
    if winner is None or winner.generation is None:
        return ""
    text, before = winner.generation, baseline.generation if baseline else None
    sentence = f"First token after {fmt.milliseconds(text.ttft_ms)}, then {fmt.milliseconds(text.tpot_ms)} a token"
    if before is not None and winner.recipe.levels:
        sentence += f" (as given {fmt.milliseconds(before.ttft_ms)} and {fmt.milliseconds(before.tpot_ms)})"
    speeds = ", ".join(f"{fmt.number(rate, 3)} with {rows}" for rows, rate in sorted(
        text.tokens_per_s.items(), key=lambda item: int(item[0])))  # fmt: skip
    sentence += f"; tokens a second by rows: {speeds}." if speeds else "."
    for point in standing(result, winner):
        if point.phase == "decode":
            peaks = result.machine.get("peaks", {})
            is_reading = peak_bytes(peaks) * point.intensity < peak_flops(peaks)
            roof = "the measured bandwidth" if is_reading else "this machine"
            sentence += f" Decoding reaches {fmt.share(point.share)} of what {roof} allows."
    return sentence
