"""fettle serve slo TARGET: the best way to serve under a latency limit, predicted and then proven."""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fettle.cli import _options, _quiet, _show
from fettle.cli.serve._slo_answer import print_settings, print_texts
from fettle.cli.serve._slo_packages import check_settings, is_package, variants_of
from fettle.errors import UsageError, first_line, needing
from fettle.files import check_writable, write_text
from fettle.kept_files import whole_folder
from fettle.units import count_text

if TYPE_CHECKING:
    from rich.console import Console

    from fettle.load.run import TextLimits
    from fettle.load.texts import TextLine
    from fettle.recipe import Recipe
    from fettle.slo.points import Failure, Outcome, SearchResult, Variant
    from fettle.slo.text_search import TextSearch


def command(
    ctx: typer.Context,
    target: Annotated[
        list[str],
        typer.Argument(
            help="a package, several of one model to choose among, or path/to/file.py:factory, which is packaged first"
        ),
    ],
    p99: _options.LatencyLimit = None,
    rate: Annotated[float, typer.Option(min=0.0, help="requests a second to be served; 0: as many as possible")] = 0.0,
    headroom: Annotated[
        str, typer.Option(help="share of the capacity to leave free at that rate, for example 20%")
    ] = "0%",
    recipe: Annotated[
        list[str] | None, typer.Option(help="with a target: recipe.toml, or 'precision=bf16'. May be repeated")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="with a target: try the best recipes of a study in this study.db or Optuna storage"),
    ] = None,
    study: Annotated[str, typer.Option(help="name of the study in that storage; default: the target's name")] = "",
    recipes: Annotated[
        int, typer.Option(min=1, help="how many recipes of the study to try, beside the model as given")
    ] = 3,
    max_error: Annotated[
        float, typer.Option(help="with a target: largest relative error of a recipe's answers")
    ] = 0.02,
    max_rows: Annotated[int, typer.Option(min=1, max=256, help="rows of the largest batch to try")] = 32,
    cores: Annotated[int | None, typer.Option(min=1, help="cores for the workers; default: all")] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="cpu, cuda, or several: cpu,cuda:1; default: the CPU and a GPU of each kind; of texts the package's"
        ),
    ] = None,
    trust: Annotated[list[str] | None, typer.Option(help="SHA-256 of a handler.py that may run")] = None,
    seconds: Annotated[str, typer.Option("--duration", "-d", help="length of one load test")] = "8s",
    confirm: Annotated[int, typer.Option(min=1, help="how many settings to prove by load tests")] = 3,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price-per-hour", help="what the machine costs: 0.40, or cuda=2.50 for that device. May be repeated"
        ),
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            help="folder for what is found (default slo-NAME), or a file for the load tests in TorchServe's benchmark "
            "columns (.csv); for both repeat it",
        ),
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", hidden=True)] = None,  # an earlier spelling of --output
    ttft: _options.FirstToken = None,
    itl: _options.BetweenTokens = None,
    prompt_tokens: _options.PromptTokens = "128",
    output_tokens: _options.OutputTokens = "128",
    texts: _options.Texts = None,
    write: Annotated[bool, typer.Option(help="write the best setting to the package's serve.toml")] = True,
    as_json: _options.AsJson = False,
) -> None:
    """Find the best way to serve a model under a latency limit, and write it to serve.toml.

    Measures what batches of each size cost, simulates every setting, and proves the best ones by open-loop load. Exit
    code 1 where the limit, or the rate under it, cannot be met. OUTPUT holds report.html, result.json and all that was
    measured: a search that was stopped, also by kill -9, goes on where it was.

    Of a package that writes texts the limits are --ttft and --itl: found are how many texts are written at once, their
    cache, and how much of a prompt is computed between two tokens of the others. Of several packages (the model with
    one recipe or another) the best one's serve.toml is written.

    fettle serve slo digits-1 --p99 20ms
    fettle serve slo bert-1 --p99 100ms --rate 80 --headroom 20% --price-per-hour 0.40
    fettle serve slo model.py --p99 100ms --storage fettle-out/study.db
    fettle serve slo model.py --p99 100ms --recipe baseline --recipe "precision=bf16"
    fettle serve slo smollm-1 --ttft 500ms --itl 50ms --prompt-tokens lognormal:128:0.8 --output-tokens 64
    """
    with needing("serve"):
        import fettle.serve.server  # noqa: F401 (each server that is tried is a process of its own)
        from fettle.load.run import TextLimits
        from fettle.load.texts import text_lines
        from fettle.slo.outcome import as_data, torchserve_rows
    from fettle.loop import run
    from fettle.package import host
    from fettle.package.manifest import check_place
    from fettle.report import slo_page

    _options.check_finite("--rate", rate)
    wanted = _options.outputs(output, ".csv", folder=True)
    check_writable(csv_file := wanted.get(".csv", csv_file))
    writes, sizes = bool(ttft or itl), ("--prompt-tokens", "--output-tokens")
    _options.check_given(
        ctx,
        (writes, ("--p99", "--price-per-hour", "--trust"), "for models that write no texts"),
        (writes, ("--recipe", "--storage", "--max-error"),
         "for a target: package the model with each recipe (fettle serve package --recipe) and name the packages"),
        (storage is None, ("--study", "--recipes"), "of a study in a --storage: name that, too"),
        (not writes, ("--texts", *sizes), "for --ttft and --itl"),
        (texts is not None, sizes, "for texts that are made up: --texts FILE has its own"),
    )  # fmt: skip
    if writes:
        limits = TextLimits(_options.limit_s(ttft, "--ttft"), _options.limit_s(itl, "--itl"))
        _of_texts(
            target, limits, text_lines(prompt_tokens, output_tokens, texts), wanted.get(""), csv_file, write=write,
            as_json=as_json,
            rate=rate, headroom=_options.share(headroom, "--headroom"), most_rows=max_rows,
            cores=cores or host.cores(), device=_options.one_device(",".join(device)) if device else "",
            confirm=confirm, seconds=_options.duration_s(seconds, "--duration"),
        )  # fmt: skip
        return
    if p99 is None:
        raise UsageError(
            "say what limit to keep: --p99 100ms, or for a model that writes texts --ttft 500ms --itl 50ms"
        )
    if not (limit_s := _options.limit_s(p99, "--p99")):
        raise UsageError("--p99 must be more than 0")
    options: dict[str, Any] = {
        "limit_s": limit_s, "rate": rate, "headroom": _options.share(headroom, "--headroom"),
        "most_rows": max_rows, "cores": cores or host.cores(), "confirm": confirm, "prices": _prices(price or []),
        "devices": _options.devices(device) or host.devices(), "seconds": _options.duration_s(seconds, "--duration"),
        "trust": trust or (),
    }  # fmt: skip
    work = _Work.of(target, recipe or [], storage, study, recipes, trust or ())
    _options.check_given(
        ctx, (work.target is None, ("--max-error",), "for a target: how exactly a package answers is known already")
    )
    if write and work.packages:
        check_settings(work.packages)
    folder = wanted.get("", Path(f"slo-{work.name}"))
    if work.target is not None:
        check_place(place := folder / "package")
        if place.exists() and not (folder / "measured.jsonl").exists():
            raise UsageError(f"{place} exists already, and no search of fettle's made it: give another --output")
    with _show.status_line("starting", quiet=as_json) as progress, _quiet.users_code_quiet():
        result = run(work.search(folder, max_error, options, progress))
    data = as_data(result, name=work.name, target=" ".join(target), machine=_machine(), written="")
    best = (lambda: work.write(result, folder)) if write else None
    rows = torchserve_rows(result, work.name)
    _finish(result, data, folder, slo_page, as_json, print_settings, best, csv_file, rows)


def _of_texts(
    texts: list[str], limits: TextLimits, lines: list[TextLine], folder: Path | None, csv_file: Path | None, *,
    write: bool, as_json: bool, device: str, **options: Any,
) -> None:  # fmt: skip
    """The same for packages that write texts."""
    from fettle.loop import run, stopped_by_interrupt
    from fettle.package.manifest import write_settings
    from fettle.report import texts_page
    from fettle.slo.text_search import search_texts, settings_with, texts_data, texts_rows

    if min(limits.ttft_s, limits.itl_s) < 0 or not max(limits.ttft_s, limits.itl_s):
        raise UsageError("--ttft and --itl must be more than 0")
    if other := next((text for text in texts if not is_package(text)), ""):
        raise UsageError(f"--ttft and --itl need a package: fettle serve package {other} --handler generate")
    variants = variants_of(texts, writes=True)
    first = variants[0].package
    name = first.manifest.name
    if write:
        check_settings(variants)
    kept = folder or Path(f"slo-{name}")

    async def search(progress: Callable[[str], None]) -> TextSearch:
        return await search_texts(
            variants, lines, limits, keep=kept / "measured.jsonl", on_progress=progress, stop=stopped_by_interrupt(),
            device=device or first.settings.devices[0], **options,
        )  # fmt: skip

    with _show.status_line("starting", quiet=as_json) as progress, _quiet.users_code_quiet():
        result = run(search(progress))

    def best() -> Path:
        assert result.best is not None
        setting = result.best.setting
        package = next(variant.package for variant in variants if variant.name == setting.variant)
        return write_settings(package, settings_with(package.settings, setting, result.costs[setting.engine])).folder

    data = texts_data(result, name=name, target=" ".join(texts), machine=_machine())
    rows = texts_rows(result, name)
    _finish(result, data, kept, texts_page, as_json, print_texts, best if write else None, csv_file, rows)


def _finish(
    result: Outcome[Any], data: dict[str, Any], folder: Path, page: Callable[[dict[str, Any]], str],
    as_json: bool, show: Callable[[dict[str, Any], Console], None], best: Callable[[], Path] | None,
    csv_file: Path | None, rows: list[dict[str, str]],
) -> None:  # fmt: skip
    """Write the `best` setting, if asked to, and what came of a search; say it, and leave with its exit code, or with
    why the setting or the table is not written: that is no reason to lose what was found."""
    from fettle.load.torchserve import COLUMNS

    problem = None
    if best is not None and result.best is not None and not result.interrupted:
        try:
            data["written"] = str(best())
        except UsageError as error:
            problem = error
        except OSError as error:
            problem = UsageError(f"the best setting could not be written: {first_line(error)}")
    write_text(folder / "result.json", json.dumps(data) + "\n")
    write_text(folder / "report.html", page(data))
    if csv_file is not None:
        try:
            _options.write_csv(csv_file, COLUMNS, rows)
        except UsageError as error:
            problem = problem or error
    _show.answer(as_json, lambda: data, lambda out: show(data, out), folder / "report.html")
    if problem is not None:
        raise problem
    _show.leave(interrupted=result.interrupted, missed=not result.met)


@dataclass
class _Work:
    """What is to be served: packages, or a target with its recipes."""

    name: str
    text: str = ""
    target: Any = None
    recipes: tuple[Recipe, ...] = ()
    packages: Sequence[Variant] = ()
    """To choose among; of a target those that `search` makes."""

    @classmethod
    def of(
        cls, texts: list[str], recipes: list[str], storage: str | None, study: str, most: int, trust: Sequence[str]
    ) -> _Work:  # fmt: skip
        """Read what the command line names. Raises `UsageError`."""
        from fettle.recipe import Recipe
        from fettle.recipe_file import read_recipe

        text = next((text for text in texts if not is_package(text)), "")
        if not text:
            if recipes or storage is not None:
                raise UsageError(f"{texts[0]} is packaged with its recipe already: name the target to try others")
            packages = variants_of(texts, trust)
            return cls(packages[0].package.manifest.name, packages=packages)
        if texts[1:]:
            raise UsageError(f"{text} is no package: several that are named are packages of one model")
        target = _options.target_or_package(text)
        levels = [read_recipe(item).recipe for item in recipes]
        if storage is not None:
            from fettle.slo.variants import study_recipes

            levels += study_recipes(target, storage, study, most)
        return cls(target.name, text, target, tuple(levels or [Recipe()]))

    async def search(
        self, folder: Path, max_error: float, options: dict[str, Any], progress: Callable[[str], None]
    ) -> SearchResult:
        """Make the packages, and find the best setting as `fettle.slo.search` does; Ctrl-C ends it early."""
        from fettle.loop import stopped_by_interrupt
        from fettle.slo.kept import open_journal
        from fettle.slo.search import search
        from fettle.slo.stopping import Stopped
        from fettle.slo.variants import package_all

        stop = stopped_by_interrupt()
        is_new = not folder.exists()
        journal = open_journal(folder / "measured.jsonl")  # first: no two searches make the same packages
        try:
            failures: list[Failure] = []
            if self.target is not None:
                self.packages, failures = await asyncio.to_thread(
                    package_all, self.text, self.target, self.recipes, folder / "packages",
                    max_rows=options["most_rows"], max_error=max_error, on_progress=progress, stopped=stop.is_set,
                )  # fmt: skip
            if not self.packages:
                raise UsageError("; ".join(f"{failure.what}: {failure.why}" for failure in failures))
        except BaseException as error:
            journal.close(delete=not journal.lines)
            if is_new:
                with contextlib.suppress(OSError):  # it holds packages
                    folder.rmdir()
            if isinstance(error, Stopped):
                raise typer.Exit(130) from None
            raise
        return await search(self.packages, keep=journal, failures=failures, on_progress=progress, stop=stop, **options)

    def write(self, result: SearchResult, folder: Path) -> Path:
        """The best setting as the package's ``serve.toml``; a target's best package is copied out of its cache."""
        from fettle.package.manifest import open_package, write_settings
        from fettle.slo.proof import tuned

        assert result.best is not None
        package = next(v.package for v in self.packages if v.name == result.best.setting.variant)
        if self.target is not None:
            place = folder / "package"
            with whole_folder(place) as made:
                shutil.copytree(package.folder, made, dirs_exist_ok=True)
            package = open_package(place)
        write_settings(package, tuned(result, package))
        return package.folder


def _prices(texts: list[str]) -> dict[str, float]:
    """``["0.4", "cuda=2.5"]`` as prices by device; ``""`` is any."""
    prices = {}
    for text in texts:
        device, equals, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e9 or (equals and not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device)):
            raise UsageError(f"--price-per-hour: {text!r} is not a price, for example 0.40 or cuda=2.50")
        prices[device] = value
    return prices


def _machine() -> str:
    """One line for the report, without importing torch."""
    from fettle.machine import cpu_name
    from fettle.package.host import cores

    here = f"{cpu_name()}, {count_text(cores(), 'core')}"
    return f"{here}, torch {metadata.version('torch')}, Python {platform.python_version()}"
