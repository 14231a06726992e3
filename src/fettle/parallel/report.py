"""The plan as a picture: one stacked bar a strategy, against the memory of the device. As PNG, SVG or one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fettle.page import Table, as_spec, drawn, shell, still
from fettle.parallel.plan import Plan, Prediction
from fettle.parallel.timeline import PARTS
from fettle.units import count_text, size_text


def bars(made: Plan, width: int = 520) -> Any:
    """Stacked bars of the peak's parts; the line is what the headroom leaves of the device. An Altair chart.

    Where it is narrow a strategy's settings stand below each other and the legend below the bars.
    """
    import altair as alt

    from fettle.page.theme import peaks

    planned = {item.strategy: item.parts for item in _planned(made)}
    unit = "GiB" if max(item.peak_bytes for item in made.predictions) >= 1 << 30 else "MiB"
    narrow = width < 400
    axis = alt.Axis(labelExpr="split(datum.label, ' ')", labelLimit=130) if narrow else alt.Axis(labelLimit=300)
    most = (made.device_memory_bytes or 0) * (1 - made.headroom) or None
    layers = peaks(planned, PARTS, unit, "peak per rank", most, 2 if narrow else 3, axis)
    padding = {"left": 40, "right": 16, "top": 16, "bottom": 16}  # names are wider in some browsers' fonts
    return alt.layer(*layers).properties(width=width, height=alt.Step(40 if narrow else 22), padding=padding)


def write_plan(made: Plan, path: Path) -> None:
    """Write the page (.html) or the bars alone (.png, .svg). Raises `UsageError` where that cannot be."""
    drawn.write(path, lambda: page(made), lambda: as_spec(bars(made)))


def page(made: Plan) -> str:
    """One HTML file without network and scripts: the bars as SVG, and the tables."""
    return shell.render(
        "fettle.parallel",
        "plan.html.j2",
        f"Memory plan: {made.name}",
        made=made,
        verdict=verdict(made),
        basis=basis(made),
        drawn=still(verdict(made), lambda narrow: as_spec(bars(made, 200 if narrow else 620))),
        tables=tables(made),
        notes=notes(made),
    )


def tables(made: Plan) -> list[Table]:
    """The peaks, what is sent, and the states: each narrow enough for a terminal of 80 columns."""
    return [_peaks(made), _sent(made), _states(made)]


def notes(made: Plan) -> list[str]:
    """What is to be said of single strategies, those of which the same is said together."""
    said: dict[str, list[str]] = {}
    for item in made.predictions:
        setting, _, rest = item.failed.partition(": ")
        if why := (rest if setting in item.strategy.split() else item.failed) or item.note:
            said.setdefault(why, []).append(item.strategy)
    return [f"{', '.join(strategies)}: {why}" for why, strategies in said.items()]


def _peaks(made: Plan) -> Table:
    """All in one unit, which the caption names: with a unit in each cell the table would be too wide."""
    highest = max(item.peak_bytes for item in made.predictions)
    unit, scale = next(
        ((name, 1 << power) for name, power in (("GiB", 30), ("MiB", 20)) if highest >= 1 << power), ("KiB", 1 << 10)
    )
    columns = ("strategy", "peak", "params", "grads", "optimizer", "activations", "transients", "fits")
    rows, kinds = [], []
    fits = {None: "", True: "yes", False: "no"}
    for item in made.predictions:
        sizes = [item.peak_bytes, *(item.parts.get(part, 0) for part in PARTS)]
        cells = [_number(size / scale) for size in sizes]
        rows.append([item.strategy, "failed"] if item.failed else [item.strategy, *cells, fits[item.fits]])
        kinds.append("winner" if item.strategy == made.cheapest else "failed" if item.fits is False else "")
    return Table(columns, rows, columns[1:], f"The fullest rank's peak, {unit}", kinds=kinds)


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 999.5 or not value else f"{value:#.3g}".removesuffix(".")


def _sent(made: Plan) -> Table:
    columns = ("strategy", "by a rank", "between nodes", "collectives")
    rows = []
    for item in _planned(made):
        counts = ", ".join(f"{count} {name}" for name, count in item.collectives.items()) or "none"
        rows.append([item.strategy, size_text(item.sent_bytes), size_text(item.between_nodes_bytes), counts])
    return Table(columns, rows, columns[1:3], "What is sent in a step")


def _states(made: Plan) -> Table:
    columns = ("strategy", "predicted", "formula", "bytes/parameter")
    rows = []
    for item in _planned(made):
        held = sum(item.states.values())
        formula = "none known" if item.formula_bytes is None else size_text(item.formula_bytes)
        rows.append([item.strategy, size_text(held), formula, f"{held / max(made.parameters, 1):.2f}"])
    return Table(columns, rows, columns[1:], "The states beside the closed formula")


def _planned(made: Plan) -> list[Prediction]:
    return [item for item in made.predictions if not item.failed]


def verdict(made: Plan) -> str:
    """The plan's answer in one sentence."""
    if made.device_memory_bytes is None:
        return "Give the device's memory to learn which strategies fit."
    fitting = [item for item in made.predictions if item.fits]
    room = f"{size_text(made.device_memory_bytes)} with {made.headroom:.0%} left free"
    if not fitting:
        least = min(_planned(made), key=lambda item: item.peak_bytes)
        return f"Nothing fits in {room}; the least is {least.strategy} with {size_text(least.peak_bytes)}."
    if not made.cheapest:
        ranks = count_text(made.world_size, "rank")
        return f"{len(fitting)} of {len(made.predictions)} fit in {room}, none of them on {ranks}."
    return f"{len(fitting)} of {len(made.predictions)} fit in {room}; of these {made.cheapest} communicates least."


def basis(made: Plan) -> str:
    """What was assumed, for those who read the numbers."""
    return (
        f"{made.parameters:,} parameters, {made.optimizer}, {count_text(made.ranks_per_node, 'rank')} per node, "
        f"device {made.device}. "
        "Predicted from fake tensors, nothing was launched. Not counted: the device's context, the communication "
        "library's buffers, fragmentation, and what kernels allocate inside themselves."
    )
