"""fettle atlas: what helped whom, where; one table of the trials of many studies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fettle.cli import _options, _show
from fettle.cli._lazy import SETTINGS
from fettle.units import count_text

if TYPE_CHECKING:
    from fettle.atlas import Effect, Pair, Row

app = typer.Typer(name="atlas", help="What helped whom, where: one table of the trials of many studies.", **SETTINGS)

_ATLAS = typer.Argument(help="an atlas, a Parquet file that 'fettle atlas add' made")
_MOST = 40
_MODEL = ("workload", "family", "mode", "device", "machine", "torch")
_MACHINE = ("machine", "cpu", "gpu", "cores", "matrix_units")


@app.command()
def add(
    atlas: Annotated[Path, typer.Argument(help="the atlas, a Parquet file; created if missing")],
    studies: Annotated[list[str], typer.Argument(help="folders of 'fettle tune' and 'fettle study', or storage URLs")],
    family: Annotated[str, typer.Option(help="what kind of model it is; default by its operators")] = "",
    as_json: _options.AsJson = False,
) -> None:
    """Add all trials of studies to an atlas. A trial that is made again takes the place of the earlier one.

    fettle atlas add atlas.parquet fettle-out fettle-study
    fettle atlas add atlas.parquet out/unet --family diffusion
    """
    from fettle.atlas import merged, read_atlas, write_atlas
    from fettle.errors import UsageError, refusing
    from fettle.files import check_writable
    from fettle.storage import storage_url
    from fettle.tuning import atlas_rows

    check_writable(atlas)
    new = []
    for study in studies:
        if "://" not in study and not Path(study, "study.db").is_file():
            raise UsageError(f"there is no study.db in {study}")
        with refusing(f"{study.rpartition('@')[2]}:", UsageError):
            new += atlas_rows(study if "://" in study else storage_url(None, Path(study)), family=family)
    with _locked(atlas):
        rows = merged(read_atlas(atlas) if atlas.exists() else [], new)
        write_atlas(rows, atlas)
    counts = {"added": len(new), "rows": len(rows), "models": len({row.fingerprint for row in rows})}
    text = f"{count_text(len(rows), 'trial')} of {count_text(counts['models'], 'model')}"
    _show.answer(as_json, lambda: counts, f"{atlas}: {count_text(len(new), 'trial')} added; {text}")


@contextmanager
def _locked(atlas: Path) -> Iterator[None]:
    """Whoever else adds to it waits: of two that read the same rows, one's would be lost."""
    from fettle.errors import refusing
    from fettle.journal import locked

    target = atlas.resolve()
    path = target.with_name(f".{target.name}.lock")
    with refusing(f"cannot write {path}:", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = locked(path, wait=True)
    with open(lock):
        yield


@app.command()
def show(atlas: Annotated[Path, _ATLAS], as_json: _options.AsJson = False) -> None:
    """What is in an atlas: its models and machines.

    fettle atlas show atlas.parquet
    """
    from fettle.atlas import read_atlas

    rows = read_atlas(atlas)
    _show.answer(as_json, lambda: _contents(rows), lambda console: _print_contents(console, rows))


@app.command()
def query(
    atlas: Annotated[Path, _ATLAS],
    family: Annotated[str, typer.Option(help="kind of model: transformer, convolutional, recurrent, ...")] = "",
    workload: Annotated[str, typer.Option(help="name of a model")] = "",
    machine: Annotated[str, typer.Option(help="id of a machine, or 'this'; default: all")] = "",
    mode: Annotated[str, typer.Option(help="inference or training")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "",
    matrix_units: Annotated[str, typer.Option(help="machines with this feature, for example amx")] = "",
    as_json: _options.AsJson = False,
) -> None:
    """What helps such models on such machines, how much, and what fights what.

    A text stands for all that begin with it. Each gain is that of a level beside otherwise equal recipes of the same
    model on the same machine; its interval is over models. Each machine, device and mode has an answer of its own.

    fettle atlas query atlas.parquet --family convolutional --machine this
    """
    from fettle.atlas import matching, read_atlas
    from fettle.machine import this_machine

    wanted = {
        "family": family, "workload": workload, "mode": mode, "device": device, "matrix_units": matrix_units,
        "machine": this_machine().id if machine == "this" else machine,
    }  # fmt: skip
    rows = matching(read_atlas(atlas), **{name: text for name, text in wanted.items() if text})
    _show.answer(as_json, lambda: _answer(rows), lambda console: _print_answer(console, rows))


def _contents(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "trials": len(rows), "quiet": sum(row.quiet for row in rows),
        "statuses": dict(sorted(Counter(row.status for row in rows).items())),
        "models": [dict(zip(_MODEL, key, strict=True), trials=count)
                   for key, count in sorted(Counter(map(attrgetter(*_MODEL), rows)).items())],
        "machines": [dict(zip(_MACHINE, key, strict=True), trials=count)
                     for key, count in sorted(Counter(map(attrgetter(*_MACHINE), rows)).items(), key=str)],
    }  # fmt: skip


def _best(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The fastest recipe of each model that kept its limits."""
    able = [row for row in rows if row.status == "measured" and row.speedup]
    model = attrgetter(*_MODEL, "fingerprint")
    best = {model(row): row for row in sorted(able, key=lambda row: row.speedup or 0.0)}
    return [{"workload": row.workload, "machine": row.machine, "recipe": row.recipe, "speedup": row.speedup,
             "low": row.low, "high": row.high} for _, row in sorted(best.items())]  # fmt: skip


def _answer(rows: Sequence[Row]) -> dict[str, Any]:
    from fettle.atlas import apart, effects, pairs
    from fettle.files import plain

    def told(ask: Callable[[Sequence[Row]], Sequence[Effect | Pair]]) -> list[dict[str, Any]]:
        return [{"machine": some[0].machine, "device": some[0].device, "mode": some[0].mode,
                 "name": one.name, **plain(one)} for some in apart(rows) for one in ask(some)]  # fmt: skip

    return {**_contents(rows), "effects": told(effects), "pairs": told(pairs), "best": _best(rows)}


def _print_contents(console: Console, rows: Sequence[Row]) -> None:
    from fettle.page import Table

    data = _contents(rows)
    console.print(f"{count_text(data['trials'], 'trial')}, {data['quiet']} on a quiet machine: " + ", ".join(
        f"{count} {status}" for status, count in data["statuses"].items()))  # fmt: skip
    for name in ("machines", "models"):
        columns = list(data[name][0]) if data[name] else ["nothing"]
        cells = [["" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
                  for value in item.values()] for item in data[name]]  # fmt: skip
        _show.print_table(console, Table(columns, cells, numbers={"trials", "cores"}), name)


def _print_answer(console: Console, rows: Sequence[Row]) -> None:
    from fettle.atlas import apart, effects, never_compared, pairs
    from fettle.page import Table

    console.print(f"{count_text(len(rows), 'trial')} of {len({row.comparable for row in rows})} models and machines")
    parts = apart(rows)
    for some in parts:
        if len(parts) > 1:
            one = some[0]
            where = f"{one.gpu or one.cpu or 'machine'} ({one.machine}), {one.device}, {one.mode}"
            console.print(f"\n{where}", style="bold", markup=False)
        brought = effects(some)
        _print_gains(console, brought, pairs(some))
        if left := never_compared(some, brought):
            names = ", ".join(f"{name} ({count_text(count, 'trial')})" for name, count in left.items())
            console.print(f"never beside an otherwise equal recipe: {names}", markup=False)
    cells = [[item["workload"], f"{item['speedup']:.2f}x", item["recipe"], item["machine"]] for item in _best(rows)]
    columns = ["model", "gain", "recipe", "machine"]
    _show.print_table(console, Table(columns, cells, numbers={"gain"}), "best recipes tried")


def _print_gains(console: Console, effects: Sequence[Effect], together: Sequence[Pair]) -> None:
    from fettle.page import Table

    cells = [
        [one.name, _ratio(one), str(one.models), str(one.helped), str(one.hurt), _extreme(one.best),
         _extreme(one.worst), str(one.failed or ""), str(one.inaccurate or "")]
        for one in effects
    ]  # fmt: skip
    columns = ["level", "gain", "models", "helped", "hurt", "most", "least", "failed", "inaccurate"]
    _show.print_table(console, Table(columns, cells, numbers=set(columns[1:5] + columns[7:])), "what a level brought")
    fighting = [pair for pair in together if pair.together.high < 1]
    helping = [pair for pair in reversed(together) if pair.together.low > 1]
    for title, some in (("what fights what", fighting), ("what helps each other", helping)):
        if some:
            cells = [[pair.name, str(pair.together), str(pair.models)] for pair in some[:_MOST]]
            columns = ["levels", "together", "models"]
            _show.print_table(console, Table(columns, cells, numbers=set(columns[1:])), title)


def _ratio(one: Effect) -> str:
    return str(one.gain) if one.models > 1 else f"{one.gain.estimate:.2f}x"


def _extreme(extreme: tuple[str, float]) -> str:
    return f"{extreme[1]:.2f}x {extreme[0]}"
