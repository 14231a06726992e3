"""fettle tune TARGET: find the fastest recipe within limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fettle.cli import _options, _show
from fettle.errors import UsageError
from fettle.units import parse_size


def command(
    target: _options.Target,
    mode: _options.Mode = "auto",
    goal: Annotated[
        str, typer.Option(help="throughput, latency, memory, energy, startup, warm-startup; ttft, tpot of text")
    ] = "throughput",
    budget: Annotated[str, typer.Option(help="time to spend, for example 90s, 10m, 1h; 0 for no limit")] = "15m",
    max_error: _options.MaxError = None,
    max_kl: _options.MaxKl = None,
    exact: Annotated[bool, typer.Option(help="text: each token written must be the float32 model's")] = False,
    max_ttft: Annotated[str | None, typer.Option(help="text: longest time to the first token")] = None,
    max_tpot: Annotated[str | None, typer.Option(help="text: longest time per output token")] = None,
    max_spread: Annotated[
        float | None,
        typer.Option(
            help="training: how far the losses may be from the baseline's, in spreads of other seeds; --max-error by "
            "another name",
            show_default="1",
        ),
    ] = None,
    min_agreement: Annotated[float | None, typer.Option(help="least share of equal top-1 decisions")] = None,
    max_metric_drop: _options.MaxMetricDrop = None,
    max_latency: Annotated[
        str | None, typer.Option(help="longest time of a call or of a whole text, for example 100ms")
    ] = None,
    max_memory: Annotated[str | None, typer.Option(help="highest peak memory, for example 2GiB")] = None,
    min_throughput: Annotated[float | None, typer.Option(help="least samples a second, of text tokens")] = None,
    nproc: _options.Nproc = 1,
    nodes: Annotated[
        int, typer.Option(help="training: machines with so many ranks each; on the others run 'fettle join HOST:PORT'")
    ] = 1,
    listen: Annotated[str, typer.Option(help="HOST:PORT at which the other nodes reach this one")] = "",
    device_memory: Annotated[
        str | None,
        typer.Option(help="training: memory of one rank's device; what is planned to need more is not tried"),
    ] = None,
    technique: _options.Techniques = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="what else fettle may change: batch-size (for goal throughput)")
    ] = None,
    design: Annotated[str, typer.Option(help="auto, ladder, factorial or ablation")] = "auto",
    atlas: Annotated[
        Path | None, typer.Option(help="begin with what this atlas expects, of 'fettle atlas add'; design auto only")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for what is found")] = Path("fettle-out"),
    storage: _options.Storage = None,
    study: Annotated[str | None, typer.Option(help="name of the study; default the workload's name")] = None,
    trial_timeout: _options.TrialTimeout = "15m",
    under_load: _options.UnderLoad = False,
    polite: _options.Polite = False,
    as_json: _options.AsJson = False,
) -> None:
    """Find the fastest recipe within limits, and write recipe.toml, optimized.py, report.html and study.db.

    Exit code 1: no recipe keeps the limits. Killed or interrupted, the same command goes on where it was.

    fettle tune model.py
    fettle tune model.py:classifier --max-metric-drop 0.01 --budget 5m
    fettle tune loop.py --nproc 2 --goal memory --min-throughput 100
    fettle tune loop.py --nproc 4 --nodes 2 --listen 10.0.0.1:29400
    fettle tune loop.py --allow batch-size
    fettle tune writer.py --goal tpot --max-ttft 500ms
    fettle tune model.py --goal latency --max-memory 2GiB --technique precision=fp32,bf16
    """
    from fettle.report import print_result, progress, save, to_json
    from fettle.result import limits_given
    from fettle.tuning import Options, tune

    for name in allow or ():
        if name != "batch-size":
            raise UsageError(f"--allow {name}: only batch-size can be allowed to change")
    output = _options.output_folder(output)
    limits = limits_given(
        max_error=max_error,
        max_kl=max_kl,
        max_spread=max_spread,
        min_agreement=min_agreement,
        max_metric_drop=max_metric_drop,
        max_latency_ms=_options.milliseconds(max_latency, "--max-latency"),
        max_memory_bytes=None if max_memory is None else parse_size(max_memory, "--max-memory"),
        min_throughput=min_throughput,
        max_ttft_ms=_options.milliseconds(max_ttft, "--max-ttft"),
        max_tpot_ms=_options.milliseconds(max_tpot, "--max-tpot"),
        exact=exact,
    )
    options = Options(
        goal=goal,  # type: ignore[arg-type]  # checked by tune, which names the goals there are
        limits=limits,
        budget_s=_options.duration_s(budget, "--budget"),
        techniques=_options.levels(technique, "--technique"),
        allow_batch=bool(allow),
        design=design,
        atlas=atlas,
        mode=mode,
        nproc=nproc,
        nodes=nodes,
        listen=listen,
        device_memory_bytes=None if device_memory is None else parse_size(device_memory, "--device-memory"),
        output=output,
        storage=storage,
        study=study,
        trial_timeout_s=_options.duration_s(trial_timeout, "--trial-timeout"),
        under_load=under_load,
        polite=polite,
    )
    with progress(quiet=as_json) as show:
        on_progress = _show.after_spoilers(show)
        result = tune(target, options=options, on_progress=on_progress, command=_show.command_line())
    paths = save(result, output)
    _show.answer(as_json, lambda: to_json(result), lambda console: print_result(result, console), wrote=paths)
    _show.leave(interrupted=result.interrupted, missed=result.winner is None)
