"""fettle data TARGET: measure and tune an input pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fettle.cli import _options, _show

if TYPE_CHECKING:
    from fettle.inputs import PipelineResult


def command(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(help="path/to/file.py:factory that returns a DataLoader, dataset or (loader, step); or a trace"),
    ],
    slice_: Annotated[str, typer.Option("--slice", help="time of one run of one setting")] = "0.4s",
    timeout: Annotated[str, typer.Option(help="longest time of one run: a worker that hangs is ended then")] = "2m",
    ranks: Annotated[
        int, typer.Option("--nproc", min=1, envvar="LOCAL_WORLD_SIZE", help="ranks of the job on this machine")
    ] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: where each batch is copied before the step")] = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write a page (.html) or the curve alone (.png, .svg)")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="file from which a killed search resumes; default: a hidden one beside TARGET")
    ] = None,
    lints: Annotated[bool, typer.Option(help="look for faults beyond the setting")] = True,
    after: Annotated[
        Path | None, typer.Option(help="TARGET is a profiler trace; this is one after a change, to compare with it")
    ] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Say how long a loop waits for its data, and find the loader setting that ends it, or why none does.

    A search that was killed goes on where it was; Ctrl-C ends it and shows what is known.

    Exit code 1: a row of the data set raises.

    fettle data train.py:loader
    fettle data train.py:loader_and_step --output pipeline.html
    fettle data workers0.pt.trace.json.gz --after workers4.pt.trace.json.gz
    """
    from fettle.errors import UsageError

    if target.endswith((".json", ".json.gz")):
        if output is not None:
            raise UsageError("--output goes with a loader: fettle trace report draws a trace")
        if others := _options.given(ctx, "target", "after", "as_json"):
            raise UsageError(f"{others[0]} goes with a loader: a trace is only read")
        _trace(Path(target), after, as_json)
        return
    if after is not None:
        raise UsageError("--after goes with a trace as TARGET, for example run.pt.trace.json.gz")

    from fettle.inputs import measure_and_search
    from fettle.inputs.kept import default_path
    from fettle.inputs.report import as_data, write_report
    from fettle.page import drawn

    if output is not None:
        drawn.check_path(output)
    slice_s = _options.duration_s(slice_, "--slice")
    if not 0.01 <= slice_s <= 600:
        raise UsageError(f"--slice {slice_}: between 10ms and 10m")
    timeout_s = _options.duration_s(timeout, "--timeout")
    if timeout_s <= slice_s:
        raise UsageError(f"--timeout {timeout}: a run takes --slice {slice_} and more, give a longer one")
    with _show.bar("starting", quiet=as_json, lines=True) as show:
        result = measure_and_search(
            target, slice_s=slice_s, timeout_s=timeout_s, ranks=ranks,
            device=_options.one_device(device, ("auto",)), keep=keep or default_path(target), lints=lints,
            on_progress=show,
        )  # fmt: skip
    if output is not None:
        write_report(result, output)
    _show.answer(as_json, lambda: as_data(result), lambda console: _print(result, console), output)
    _show.leave(interrupted=result.interrupted, missed=bool(result.raises))


def _trace(before: Path, after: Path | None, as_json: bool) -> None:
    """What the steps of a profiled loop waited for."""
    from fettle.files import plain
    from fettle.inputs.from_trace import compare_text, waits_in_trace

    waits = [waits_in_trace(path) for path in ((before,) if after is None else (before, after))]
    rows = [{**plain(item), "bound": item.bound} for item in waits]
    achieved = waits[0].step_s / waits[1].step_s if after is not None else None
    data = {"before": rows[0], "after": rows[1] if after else None, "achieved": achieved}
    text = "\n".join(compare_text(waits))
    _show.answer(as_json, lambda: data, lambda console: console.print(escape(text)))


def _print(result: PipelineResult, console: Console) -> None:
    from fettle.inputs.report import facts, settings

    console.print(f"[bold]{escape(result.verdict)}[/]\n")
    for line in facts(result):
        console.print(escape(line))
    _show.print_table(console, settings(result), without=("first",))
    for lint in result.lints:
        console.print(f"\n[yellow]{escape(lint.says)}[/] {escape(lint.evidence)}\n  → {escape(lint.advice)}")
    for note in result.notes:
        console.print(f"[dim]{escape(note)}[/]")
    if result.best.setting != result.as_given.setting:
        console.print(f"\n{escape(result.code)}", style="green", soft_wrap=True)
