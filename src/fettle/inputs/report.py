"""What was found, as rows, as JSON, as a page, and as the curve alone: batches a second over workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import altair as alt

from fettle.files import plain
from fettle.inputs.result import PipelineResult
from fettle.inputs.setting import BATCH_INDEX, ONE_BY_ONE, Setting, ratio
from fettle.page import Table, clean, drawn, shell, still, theme
from fettle.page.theme import level, sized
from fettle.units import count_text, rate_text, seconds_text, size_text


def facts(result: PipelineResult) -> list[str]:
    """The costs behind the verdict, a line each."""
    plain = result.plain.first
    lines = []
    if result.step_s:
        which = "As given" if result.as_given.able else "Without workers (as given it fails)"
        same = result.best.setting == result.before.setting
        reached = "nothing smaller or faster was found" if same else f"{result.gain:.2f}x was reached"
        lines.append(
            f"A step alone takes {seconds_text(result.step_s)}. {which}, {result.waiting:.1%} of the time is waiting "
            f"for data: removing it brings at most {bound_text(result)}; {reached}."
        )
    else:
        lines.append(
            "No step was given, so that the loop only reads: how long a real step would wait is not known. "
            "Return (loader, step) to learn it."
        )
    lines.append(
        f"One batch ({size_text(plain.batch_bytes)}) takes one process {seconds_text(plain.fetch_p50_s)} (95%: "
        f"{seconds_text(plain.fetch_p95_s)}), {plain.fetch_busy:.0%} of it computing (the rest waits for files or "
        "others)."
    )
    if result.best.setting.num_workers:
        timing, workers = result.best.last, result.best.setting.num_workers
        where = "the worker" if workers == 1 else f"each of {workers} workers"
        lines.append(
            f"In {where} it takes {seconds_text(timing.fetch_p50_s)} (95%: {seconds_text(timing.fetch_p95_s)}); a "
            f"worker holds {size_text(timing.worker_bytes)} of its own, and up to "
            f"{size_text(workers * result.best.setting.prefetch_factor * timing.batch_bytes)} of "
            "batches are in flight."
        )
    lines += _kept(result)
    kept = f", {count_text(result.reused, 'answer')} kept from an earlier start" if result.reused else ""
    cores = count_text(result.cores, "core")
    lines.append(f"{cores} to use ({result.cores_why}); searched in {result.search_s:.0f} s{kept}.")
    if result.interrupted:
        lines.append("Interrupted: this is what was known by then.")
    return lines


def _kept(result: PipelineResult) -> list[str]:
    """What keeping freed memory was tried for, and what it brought."""
    able = {item.setting: item for item in result.settings if item.able}
    for setting, item in able.items():
        before = able.get(replace(setting, keep_memory=False))
        if setting.keep_memory and before:
            return [
                f"For each batch a worker fetched {before.last.fetch_pages:,.0f} pages of memory from the system, "
                f"{before.last.fetch_fresh:.0%} of its time for those beyond the batch itself: keeping what is freed "
                f"brought {ratio(item, before):.2f}x with {setting.num_workers} of them."
            ]
    return []


def _limit_text(result: PipelineResult) -> str:
    """What the chart says of the loop without waiting."""
    if not result.step_s:
        return ""
    if limit_is_near(result):
        return "; the dashed line is the loop with every batch there already"
    return f"; with every batch there already the loop would make {rate_text(1 / result.step_s)} batches a second"


def bound_text(result: PipelineResult) -> str:
    """The bound; beyond a hundredfold it says only that the step is nothing."""
    return f"{result.bound:.2f}x" if result.bound < 100 else "more than 100x"


def rows(result: PipelineResult) -> list[dict[str, str]]:
    """One row a setting, smallest first."""
    listed = []
    for item in sorted(result.settings, key=lambda item: item.setting.size):
        setting = item.setting
        note = " ".join(
            word
            for word, other in (("as given", result.as_given), ("← take this", result.best))
            if setting == other.setting
        )
        if item.failure:
            note = item.failure if item.left_out else f"failed: {item.failure}"
        # Batches a second are those of side-by-side comparisons: rates measured minutes apart do not compare.
        cells = dict.fromkeys(("batches/s", "waiting", "batch 50%", "95%", "first"), "-")
        if item.able:  # of one that failed later it is not known how fast it is beside the others
            timing = item.first
            cells = {
                "batches/s": rate_text(item.level),
                "waiting": f"{item.waiting:.0%}",
                "batch 50%": seconds_text(timing.fetch_p50_s),
                "95%": seconds_text(timing.fetch_p95_s), "first": seconds_text(item.start_s),
            }  # fmt: skip
        workers = bool(setting.num_workers)
        listed.append({
            "workers": str(setting.num_workers), "prefetch": str(setting.prefetch_factor) if workers else "",
            "persist": ("yes" if setting.persistent_workers else "no") if workers else "",
            "also": ", ".join(_other_settings(setting)), **cells, "note": note,
        })  # fmt: skip
    return listed


def as_data(result: PipelineResult) -> dict[str, Any]:
    """Everything as plain data for JSON; what is not known is null."""
    of_setting = ("setting", "rates", "failure", "left_out", "slices")
    settings = [
        {**{name: getattr(item, name) for name in of_setting}, "code": item.setting.code, "level": item.level or None}
        for item in result.settings
    ]
    of_result = (
        "target", "verdict", "raises", "step_s", "waiting", "bound", "gain", "batch_p50_s", "batch_p95_s", "cores",
        "code", "lints", "notes", "search_s", "seconds", "interrupted", "reused",
    )  # fmt: skip
    data: dict[str, Any] = plain({
        **{name: getattr(result, name) for name in of_result},
        "given": result.as_given.setting, "best": result.best.setting, "settings": settings,
        "is_quiet": result.load.is_quiet, "load": result.load,
    })  # fmt: skip
    return data


def write_report(result: PipelineResult, path: Path) -> None:
    """Write the page (.html, needs no network) or the curve alone (.png, .svg), whole or not at all."""
    drawn.write(path, lambda: page(result), lambda: curve(result))


def page(result: PipelineResult) -> str:
    result = clean(result)
    return shell.render(
        "fettle.inputs",
        "page.html.j2",
        f"Input pipeline: {result.target}",
        result=result,
        facts=facts(result),
        settings=settings(result),
        drawn=still(result.verdict, lambda narrow: curve(result, 280 if narrow else 320)),
        tiles=_tiles(result),
        limit=_limit_text(result),
    )


def _tiles(result: PipelineResult) -> list[tuple[str, str, str]]:
    """The figures that are read first."""
    able, as_given = result.as_given.able, result.as_given.setting
    over = "given" if able else "no workers: as given it fails"
    tiles = [
        ("reached", f"{result.gain:.2f}x", f"batches a second, over {over}"),
        (
            "workers",
            f"{result.best.setting.num_workers}",
            f"given {as_given.num_workers}, {count_text(result.cores, 'core')}",
        ),
        ("one batch in one process", seconds_text(result.batch_p50_s), f"95%: {seconds_text(result.batch_p95_s)}"),
    ]
    if result.step_s:
        waiting = f"waiting for data, {'as given' if able else 'without workers'}"
        tiles.insert(0, (waiting, f"{result.waiting:.1%}", f"removing it: at most {bound_text(result)}"))
    return tiles


def settings(result: PipelineResult) -> Table:
    listed = rows(result)
    kinds = [
        "winner" if "take this" in row["note"] else "failed" if row["note"].startswith("failed") else ""
        for row in listed
    ]
    return Table.of(listed, ("workers", "note"), kinds)


def curve(result: PipelineResult, height: int = 300) -> dict[str, Any]:
    """Batches a second over workers as a Vega-Lite chart: a line a variant through medians, a dot a round."""
    points: list[dict[str, Any]] = []
    medians: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for item in result.settings:
        base = {"workers": item.setting.num_workers, "setting": item.setting.name, "variant": _variant(item.setting)}
        points += [{**base, "rate": rate} for rate in item.rates]
        if item.able:
            medians.append({**base, "level": item.level})
        elif item.failure:
            failed.append({**base, "rate": 0.0, "failure": item.failure})
    order = sorted({point["variant"] for point in points}, key=lambda name: (name != "usual", name))
    ticks = sorted({item.setting.num_workers for item in result.settings})
    x = alt.X("workers:Q", title="worker processes", axis=alt.Axis(values=ticks, format="d", grid=False),
              scale=alt.Scale(domainMin=0, nice=False, padding=12))  # fmt: skip
    y = alt.Y("rate:Q", title="batches a second", scale=alt.Scale(zero=True))
    shape = alt.Color("variant:N", title=None, sort=order, scale=alt.Scale(range=list(theme.LEVERS)),
                      legend=alt.Legend(columns=1, labelLimit=280) if len(order) > 1 else None)  # fmt: skip
    levels = alt.Chart(theme.data(medians)).encode(x=x, color=shape)
    dots = alt.Chart(theme.data(points)).encode(x=x, y=y, color=shape, tooltip=["setting:N", "rate:Q"])
    names = {result.best.setting: "take this", result.as_given.setting: "as given"}
    if len(names) == 1:
        names[result.best.setting] = "as given, and best"
    marked = alt.Chart(theme.data([
        {"workers": item.setting.num_workers, "rate": item.level, "name": names[item.setting]}
        for item in result.settings if item.setting in names and item.able
    ])).encode(x=x, y=y)  # fmt: skip
    align = alt.ExprRef(f"datum.workers == {ticks[0]} ? 'left' : 'center'")
    layers = [
        levels.mark_line(size=2, point=True).encode(y=alt.Y("level:Q", title="batches a second")),
        dots.mark_circle(size=22, opacity=0.3),
        marked.mark_point(size=190, strokeWidth=2, color=theme.ACCENT),
        marked.mark_text(dy=-16, fontWeight="bold", align=align).encode(text="name:N"),
    ]
    if limit_is_near(result):
        layers += level(1 / result.step_s, "the step alone", theme.QUIET)
    if failed:
        crosses = alt.Chart(theme.data(failed)).encode(x=x, y=y, tooltip=["setting:N", "failure:N"])
        layers.append(crosses.mark_point(shape="cross", angle=45, size=110, color=theme.WARN, filled=True))
    return sized(height, *layers).to_dict()


def limit_is_near(result: PipelineResult) -> bool:
    """Whether the step's own limit belongs into the curve: one far above would press it flat."""
    return bool(result.step_s) and 1 / result.step_s < 3 * max(item.level for item in result.settings)


def _other_settings(setting: Setting) -> list[str]:
    """What a setting has beyond workers, their queue and their life."""
    words = {ONE_BY_ONE: ["rows one by one"], BATCH_INDEX: ["batch index"]}.get(setting.fetch, [])
    words += ["memory kept"] * setting.keep_memory
    return [*words, *["pinned"] * setting.pin_memory, *["not blocking"] * setting.non_blocking]


def _variant(setting: Setting) -> str:
    """What a setting has beyond its number of workers: a line in the curve."""
    words = _other_settings(setting)
    if setting.num_workers:
        words += [f"prefetch {setting.prefetch_factor}"] * (setting.prefetch_factor != 2)
        words += ["workers end each epoch"] * (not setting.persistent_workers)
    return ", ".join(words) or "usual"
