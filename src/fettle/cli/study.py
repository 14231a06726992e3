"""fettle study TARGET: every combination, and how techniques interact."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fettle.cli import _options, _show
from fettle.errors import UsageError
from fettle.files import check_writable, write_text
from fettle.units import count_text, parse_size, rate_text, size_text

if TYPE_CHECKING:
    from fettle.measure import Interval
    from fettle.page import Table as Grid
    from fettle.recipe import Recipe
    from fettle.studies import Analysis, Done, Settings, Table
    from fettle.studies.outcome import Rung

_FOLDER = Path("fettle-study")
_MOST_SENTENCES = 6


def command(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="path/to/file.py:factory or package.module:factory; several make one study"),
    ] = None,
    from_csv: Annotated[
        Path | None, typer.Option(help="instead of targets: a table of experiments already made, one row each")
    ] = None,
    response: Annotated[
        list[str] | None,
        typer.Option(help="column that came out; NAME:larger or NAME:smaller says which is better. May be repeated"),
    ] = None,
    factors: Annotated[
        list[str] | None,
        typer.Option(
            help="columns that were varied, NAME,NAME, or NAME=LEVEL with its default level; default: all that vary"
        ),
    ] = None,
    group_by: Annotated[
        list[str] | None, typer.Option(help="columns by which rows are grouped and analysed separately, such as model")
    ] = None,
    design: Annotated[
        str, typer.Option(help="ladder, factorial, fraction, ablation, pairs or sensitivity")
    ] = "factorial",
    technique: _options.Techniques = None,
    only: Annotated[
        bool, typer.Option("--only", help="vary no technique but those of --technique and --order")
    ] = False,
    factor: Annotated[
        list[str] | None,
        typer.Option(help="vary an argument of the factory, NAME=VALUE,VALUE, the usual value first. May be repeated"),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="another environment, its interpreter or venv folder, raced beside this one; NAME=PATH names it. "
            "May be repeated",
        ),
    ] = None,
    order: Annotated[str, typer.Option(help="techniques in the order of the ladder, NAME,NAME")] = "",
    recipe: Annotated[
        str | None,
        typer.Option(
            help="text or recipe.toml: what an ablation takes apart, a sensitivity study varies, a ladder starts from"
        ),
    ] = None,
    grow_batch: Annotated[
        str | None,
        typer.Option(
            help="ladder: find the largest batch at each step that needs no more memory than this, such as 2GiB; "
            "'device' is all that a GPU has"
        ),
    ] = None,
    cells: Annotated[int | None, typer.Option(help="most combinations of each workload")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of each race, the same for every combination")] = 12,
    budget: Annotated[
        str, typer.Option(help="time to spend, for example 30m; the best fraction that fits. 0: all")
    ] = "0",
    yes: Annotated[bool, typer.Option("--yes", help="begin even if it takes more than an hour")] = False,
    mode: _options.Mode = "auto",
    max_error: _options.MaxError = None,
    max_metric_drop: _options.MaxMetricDrop = None,
    output: _options.StudyOutput = None,
    storage: Annotated[
        str | None,
        typer.Option(help="Optuna storage URL, which others that run the same command share; default study.db"),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            help="the study's name in the storage, by which fettle worker finds it; without targets: draw what is there"
        ),
    ] = None,
    enqueue: Annotated[
        bool, typer.Option("--enqueue", help="begin the study of that name for workers, and measure nothing here")
    ] = False,
    atlas: Annotated[
        Path | None, typer.Option(help="an atlas: where a search begins, and forecasts beside what is found")
    ] = None,
    published: Annotated[
        Path | None,
        typer.Option(help="ladder: a CSV table of a published one, step and throughput, drawn beside ours"),
    ] = None,
    trial_timeout: _options.TrialTimeout = "15m",
    under_load: _options.UnderLoad = False,
    polite: _options.Polite = False,
    as_json: _options.AsJson = False,
) -> None:
    """Measure combinations of techniques, or read a table of them, and say what helps, what hurts and what needs what.

    Writes study.html, study.json, study.csv and pictures. Killed or interrupted, the same command goes on where it was.
    Exit code 2: also a study of more than an hour without --yes, which prints its plan.

    fettle study model.py --only --technique precision=fp32,bf16 --technique compile=off,default
    fettle study model.py other.py --design pairs --factor batch=1,4,16 --budget 30m
    fettle study model.py --python ../old/.venv --only --technique runtime=torch,openvino
    fettle study model.py --storage postgresql://fettle@db/studies -o study-node1
    fettle study model.py --storage postgresql://fettle@db/studies --study night --enqueue
    fettle study --storage postgresql://fettle@db/studies --study night      # draw what is there, measure nothing
    fettle study model.py --design ladder --order mode,precision,channels_last,compile
    fettle study model.py --design ladder --grow-batch 2GiB
    fettle study --from-csv cube.csv --response "throughput (it/s)" --group-by model-arch
    """
    from fettle.studies import Settings, check_name, read_csv, read_ladder, stored

    folder, wanted = places(output, _FOLDER)
    if published is not None and (design != "ladder" or from_csv is not None):
        raise UsageError("`published` stands beside a ladder that is measured: `design=ladder` with a target")
    theirs = read_ladder(published) if published is not None else {}
    settings = Settings(
        design=design, techniques=_options.levels(technique, "--technique"), only=only,
        arguments=_options.levels(factor, "--factor"), pythons=tuple(python or ()),
        order=tuple(name.strip() for name in order.split(",") if name.strip()),
        start=None if recipe is None else _start(recipe), cells=cells, rounds=rounds,
        grow_batch=None if grow_batch is None else _limit_bytes(grow_batch),
        budget_s=_options.duration_s(budget, "--budget"), mode=mode, max_error=max_error, output=folder,
        max_metric_drop=max_metric_drop, storage=storage, name=study or "", atlas=atlas, under_load=under_load,
        polite=polite, trial_timeout_s=_options.duration_s(trial_timeout, "--trial-timeout"),
    )  # fmt: skip
    if from_csv is not None:
        if targets or enqueue or settings != Settings(output=folder):
            raise UsageError("`from_csv` reads what was measured: leave out the targets and how to measure them")
        if os.path.realpath(from_csv) in map(os.path.realpath, (folder / "study.csv", *wanted.values())):
            raise UsageError(f"{from_csv} would be written over: give another `output`")
        table = read_csv(from_csv, response=response or (), factors=factors or (), group_by=group_by or ())
        show(folder, wanted, from_csv.name, table, None, theirs, as_json)
        return
    if response or factors or group_by:
        raise UsageError("`response`, `factors` and `group_by` are for a table, `from_csv`")
    if study is not None:
        check_name(study)
    elif enqueue:
        raise UsageError("`enqueue` begins a study that workers find by its name: give it one, `study=NAME`")
    if enqueue:
        if atlas is not None:
            raise UsageError("`atlas` stands beside what is measured, and `enqueue` measures nothing: leave one out")
        _enqueue(targets or [], settings, as_json)
        return
    from_storage = storage is not None and study is not None and not targets
    if from_storage and settings != Settings(output=folder, storage=storage, name=settings.name):
        raise UsageError("without targets what is in the storage is only drawn: leave out how to measure, or name them")
    done = stored(settings) if from_storage else measured(targets or [], settings, agreed=yes, quiet=as_json)
    show(folder, wanted, f"{done.design} of {', '.join(done.table.groups)}", done.table, done, theirs, as_json)


def places(output: Sequence[Path] | None, default: Path) -> tuple[Path, dict[str, Path]]:
    """The folder of a study and its other files by suffix, as `--output` names them. Raises `UsageError` where one
    cannot be written."""
    wanted = _options.outputs(output, ".csv", ".parquet", folder=True)
    folder = wanted.get("", default)
    check_writable(folder / "study.html", *(path for suffix, path in wanted.items() if suffix))
    return folder, wanted


def _enqueue(targets: Sequence[str], settings: Settings, as_json: bool) -> None:
    """Begin a study for workers, and say how they are started."""
    from fettle.report import progress
    from fettle.storage import hidden
    from fettle.studies import enqueue

    with progress(quiet=as_json) as on_progress:
        cells = enqueue(targets, settings, on_progress)
    start = f"fettle worker --storage {hidden(settings.storage or '')} --study {settings.name}"
    lines = [f"{name}: {count_text(count, 'combination')}" for name, count in cells.items()]
    _show.answer(
        as_json,
        lambda: {"study": settings.name, "combinations": cells, "start": start},
        "\n".join([*lines, f"on each machine: {start}"]),
    )


def show(
    folder: Path, wanted: dict[str, Path], name: str, table: Table, done: Done | None, theirs: Mapping[str, float],
    as_json: bool,
) -> None:  # fmt: skip
    """Analyse what was measured, write it, and say it; `theirs` is a ladder that was published."""
    from fettle.page.drawn import write_pictures
    from fettle.studies import analyse
    from fettle.studies.charts import figures
    from fettle.studies.designs import STEPS
    from fettle.studies.ladder_chart import unmatched
    from fettle.studies.output import study_json, write_table
    from fettle.studies.page import page

    if done is not None and (missing := unmatched(done.steps, theirs)):
        done = replace(done, notes=(*done.notes, f"published, and no step here: {', '.join(missing)}"))
    steps = done.steps if done is not None else {}
    notes = [*table.notes, *(done.notes if done is not None else ())]
    analyses = [] if done is not None and done.design in STEPS else analyse(table)
    data = study_json(table, analyses, done, theirs)
    drawn = figures(table, analyses, steps, theirs)
    texts = {"study.html": page(name, table, analyses, drawn, notes, steps), "study.json": json.dumps(data, indent=1)}
    tables = [folder / "study.csv", *(path for suffix, path in wanted.items() if suffix)]
    for file, text in texts.items():
        write_text(folder / file, text)
    for path in tables:
        write_table(table, path)
    write_pictures(drawn, folder / "pictures")
    _show.answer(
        as_json,
        lambda: data,
        lambda console: _print(console, analyses, steps, theirs, notes),
        wrote=[*(folder / file for file in texts), *tables, folder / "pictures"],
    )
    _show.leave(interrupted=done is not None and done.interrupted)


def measured(targets: Sequence[str], settings: Settings, *, agreed: bool, quiet: bool) -> Done:
    """Run the study; raises `UsageError` with its plan where it takes long and nobody agreed, and before anything is
    measured where it could not be analysed."""
    from fettle.report import progress
    from fettle.studies import Plan, study
    from fettle.studies.designs import STEPS
    from fettle.studies.model import statsmodels

    if settings.design not in STEPS:
        statsmodels()
    with progress(quiet=quiet) as on_progress:
        outcome = study(targets, settings, on_progress, agreed=agreed)
    if isinstance(outcome, Plan):
        raise UsageError(
            f"{outcome}: add `yes` to run it, `budget='30m'` for the best fraction that fits, or `only` to vary "
            "nothing but what you name"
        )
    return outcome


def _start(text: str) -> Recipe:
    """A recipe as a file or as text, which may name factors outside of recipes as well."""
    from fettle.recipe import Recipe
    from fettle.recipe_file import load_recipe

    return load_recipe(text).recipe if text.endswith(".toml") else Recipe.parse(text)


def _limit_bytes(text: str) -> float:
    """``2GiB`` as bytes; ``device`` is as much as there is."""
    return math.inf if text == "device" else parse_size(text, "--grow-batch")


def _print(
    console: Console, analyses: Sequence[Analysis], steps: Mapping[str, Sequence[Rung]], theirs: Mapping[str, float],
    notes: Sequence[str],
) -> None:  # fmt: skip
    from fettle.studies.page import lead

    for note in notes:
        console.print(f"[dim]{escape(note)}[/]")
    for name, rungs in steps.items():
        _show.print_table(console, _ladder(name, rungs, theirs))
        for rung in rungs:
            if not rung.kept:
                console.print(f"[yellow]  {escape(rung.label)}: {escape(rung.reason or 'left out')}[/]")
            if rung.grown is not None:
                console.print(f"[dim]  {escape(rung.label)}, no larger batch: {escape(rung.grown.why)}[/]")
    for analysis in analyses:
        console.print(f"\n[bold]{escape(analysis.title)}[/]")
        console.print(escape(lead(analysis)))
        for doubt in analysis.checks.doubts if analysis.checks is not None else ():
            console.print(f"[yellow]! {escape(doubt.text)}[/]")
        helps = [sentence for sentence in analysis.sentences if not sentence.is_surprise]
        for mark, sentences in (("surprise", analysis.surprises), ("helps", helps)):
            for sentence in sentences[:_MOST_SENTENCES]:
                console.print(f"  {mark}: {escape(sentence.text)}")
            if len(sentences) > _MOST_SENTENCES:
                console.print(f"  [dim]and {len(sentences) - _MOST_SENTENCES} more on the page[/]")


def _ladder(name: str, rungs: Sequence[Rung], theirs: Mapping[str, float]) -> Grid:
    from fettle.page import Table as Grid
    from fettle.report import interval
    from fettle.studies.ladder_chart import beside

    def speed(per_second: float, speedup: Interval | None) -> tuple[str, str]:
        return rate_text(per_second) if speedup is not None else "–", interval(speedup)

    rows: list[list[str]] = []
    grown = any(rung.grown for rung in rungs)
    columns = ("step", "per second", "speed-up", *(["published"] if theirs else []), "memory", "error",
               *(["largest batch", "per second", "speed-up"] if grown else []))  # fmt: skip
    for rung in rungs:
        most = rung.grown
        largest = (str(most.rows), *speed(most.per_second, most.speedup)) if most and most.factor else ("–",) * 3
        ratio = beside(rung, rungs, theirs)
        theirs_at = [f"{ratio:.2f}x" if ratio is not None else "–"] if theirs else []
        error = f"{rung.error:.1e}" if math.isfinite(rung.error) else "–"
        rows.append([
            rung.label, *speed(rung.per_second, rung.speedup), *theirs_at,
            size_text(rung.peak_bytes) if rung.peak_bytes else "–", error, *(largest if grown else ()),
        ])  # fmt: skip
    kinds = ["" if rung.kept else "rejected" for rung in rungs]
    return Grid(columns, rows, columns[1:], name, kinds=kinds)
