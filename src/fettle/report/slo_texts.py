"""The report of a search for the best way to write texts under limits: one HTML file, and what a terminal shows of it.

It reads the plain data of the search (`fettle.slo.text_search.texts_data`), which is also what ``result.json`` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt

from fettle.page import Figure, Table, clean, picture, shell, theme
from fettle.page.theme import Rows, by_name, level
from fettle.report import slo
from fettle.units import count_text, size_text

Data = Mapping[str, Any]
_MOST = 8


def texts_page(data: Data) -> str:
    """The page as text."""
    data = clean(data)
    figures = [figure for figure in (_capacity(data), _costs(data)) if figure is not None]
    headline = slo.headline(data, _limits(data), lambda rate: f"{rate:.3g} texts a second")
    return shell.render(
        "fettle.report", "slo_texts.html.j2", f"{headline}: {data['name']}", figures, data=data,
        headline=headline, words=texts_words(data), settings=texts_table(data, len(data["points"])), tests=_tests(data),
        failures=[f"{failure['what']}: {failure['why']}" for failure in data["failures"]],
    )  # fmt: skip


def _limits(data: Data) -> str:
    limits = [(data["ttft_limit_ms"], "to the first token"), (data["itl_limit_ms"], "between two")]
    return " and ".join(f"{limit:.4g} ms {what}" for limit, what in limits if limit)


def texts_words(data: Data) -> str:
    """What was asked for."""
    prompt, output = data["prompt_tokens"], data["output_tokens"]
    return (
        f"Texts a second with p99 within {_limits(data)}, Poisson arrivals; {prompt['p50']:.4g} tokens of prompt "
        f"(up to {prompt['max']:.4g}) and {output['p50']:.4g} new ones (up to {output['max']:.4g}) in the median."
    )


def texts_table(data: Data, most: int = 10) -> Table:
    """Settings: those that were measured, then the best of the others."""
    points = sorted(data["points"], key=lambda point: not point["tests"])[:most]
    several = any(point.get("variant") for point in data["points"])
    best = slo.best_of(data)
    rows = []
    for point in points:
        test = next((one for one in point["tests"] if one["held"] and one["rate"] == point["measured"]), None)
        lowest = min((one["rate"] for one in point["tests"]), default=0.0)
        texts = test["run"]["texts"] if test is not None else None
        measured = "" if not point["tests"] else f"{point['measured']:.3g}" if test else f"under {lowest:.3g}"
        rows.append([
            str(point["max_rows"]), str(point["prefill_tokens"]), str(point["threads"]),
            f"{point['predicted']:.3g}", measured,
            *([f"{texts['ttft_ms']['p99']:.0f}", _ms(texts["itl_ms"]["p99"]), f"{texts['tokens_per_s']:.4g}",
               f"{test['run']['goodput']:.3g}"] if texts and test else ["", "", "", ""]),
            size_text(point["cache_bytes"]) if point["cache_bytes"] else "",
            *([point["variant"]] if several else []),
        ])  # fmt: skip
    columns = ("texts at once", "prompt a step", "threads", "predicted/s", "measured/s", "TTFT p99", "ITL p99",
               "tokens/s", "goodput/s", "cache")  # fmt: skip
    kinds = ["winner" if point is best else "" for point in points]
    return Table((*columns, *["package"] * several), rows, columns, kinds=kinds)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _tests(data: Data) -> Table:
    rows = []
    for point in data["points"]:
        for test in point["tests"]:
            measured = test["run"].get("texts") or {"ttft_ms": {"p99": None}, "itl_ms": {"p99": None}}
            rows.append([
                point["setting"], f"{test['rate']:.3g}", "yes" if test["held"] else "no",
                _ms(test["predicted_p99_ms"]), _ms(measured["ttft_ms"]["p99"]), _ms(test["predicted_itl_ms"]),
                _ms(measured["itl_ms"]["p99"]), f"{test['slower']:.2f}" if test["slower"] else "", test["run"]["void"],
            ])  # fmt: skip
    columns = ("setting", "texts/s", "kept", "TTFT p99 simulated", "measured", "ITL p99 simulated", "as measured",
               "steps over simulated", "note")  # fmt: skip
    return Table(columns, rows, columns[1:-1])


def _lines(name: str, title: str, rows: Rows, x: alt.X, y: alt.Y, words: str, *more: Any) -> Figure | None:
    if not rows:
        return None
    shown = list(dict.fromkeys(row["line"] for row in rows))[:_MOST]
    base = alt.Chart(theme.data([row for row in rows if row["line"] in shown])).encode(
        x=x, y=y, color=by_name("line", shown, columns=2),
        tooltip=[alt.Tooltip("line:N"), alt.Tooltip(x.shorthand), alt.Tooltip(y.shorthand, format=".4~g")],
    )  # fmt: skip
    return picture(name, title, words, 280, base.mark_line(strokeWidth=2), base.mark_point(filled=True, size=45), *more)


def _texts_axis(rows: Rows) -> alt.X:
    most = max((row["texts"] for row in rows), default=1)
    return alt.X("texts:Q", title="texts at once (log)",
                 scale=alt.Scale(type="log", base=2, domain=[0.9, most * 1.1], nice=False),
                 axis=alt.Axis(format="d", grid=False, values=[2**n for n in range(most.bit_length())]))  # fmt: skip


def _capacity(data: Data) -> Figure | None:
    rows: Rows = [
        {"texts": point["max_rows"], "rate": point["predicted"], "line": f"{point['prefill_tokens']} prompt tokens"}
        for point in sorted(data["points"], key=lambda point: (point["prefill_tokens"], point["max_rows"]))
        if _engine(point) == _best_engine(data)
    ]  # fmt: skip
    if not any(row["rate"] for row in rows):
        return None
    best = max(rows, key=lambda row: row["rate"])
    y = alt.Y("rate:Q", title="texts a second within the limits", scale=alt.Scale(zero=True, nice=True))
    texts = count_text(best["texts"], "text")
    words = f"{count_text(len(rows), 'setting')} simulated, the best {best['rate']:.3g}/s with {texts} at once."
    return _lines("capacity", "What could be served", rows, _texts_axis(rows), y, words)


def _engine(found: Data) -> tuple[str, int]:
    return found.get("variant", ""), found["threads"]


def _best_engine(data: Data) -> tuple[str, int]:
    """The package and the threads of the best setting, which the charts are about."""
    return _engine(data["points"][data["best"] or 0]) if data["points"] else ("", 0)


def _costs(data: Data) -> Figure | None:
    rows: Rows = [
        {"texts": cell["texts"], "ms": cell["ms"], "line": f"{cell['kept']} tokens before"}
        for cell in data["costs"]["writing"]
        if _engine(cell) == _best_engine(data)
    ]
    y = alt.Y("ms:Q", title="ms for a token of each", scale=alt.Scale(zero=True, nice=True))
    words = "; ".join(f"{row['texts']} texts, {row['line']}: {row['ms']:.4g} ms" for row in rows) + "."
    limit = data["itl_limit_ms"]
    more = level(limit, f"limit {limit:.4g} ms") if limit else []
    return _lines("costs", "What a step costs", rows, _texts_axis(rows), y, words, *more)
