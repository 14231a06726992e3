"""fettle worker: measure what is left of a study that is in a storage, together with others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fettle.cli import _options
from fettle.cli.study import measured, places, show


def command(
    storage: Annotated[str, typer.Option(help="Optuna storage URL with which the study was begun")],
    study: _options.StudyName,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            help="where the study's targets lie here; without them, those that it names, as files of this folder"
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="where an environment that the study compares lies here"),
    ] = None,
    output: _options.StudyOutput = None,
    trial_timeout: _options.TrialTimeout = "15m",
    under_load: _options.UnderLoad = False,
    polite: _options.Polite = False,
    as_json: _options.AsJson = False,
) -> None:
    """Measure what nobody has measured yet of a study that `fettle study --study NAME --enqueue` began.

    Workers on machines alike share the combinations; other machines measure all of them each, and are a factor. One
    that vanishes is noticed by its heartbeat, and others take over what it had claimed. Ends with the whole study, its
    page in the folder. Exit code 2: also a model, inputs or weights that are not the study's; 130: asked to end, all
    that was measured kept.

    fettle worker --storage postgresql://fettle@db/studies --study night
    fettle worker models/net.py:small --storage postgresql://fettle@db/studies --study night -o worker-7
    """
    from fettle.studies import Settings, settings_of

    folder, wanted = places(output, Path(f"fettle-{study}"))
    own = Settings(
        storage=storage, name=study, pythons=tuple(python or ()), output=folder, under_load=under_load, polite=polite,
        trial_timeout_s=_options.duration_s(trial_timeout, "--trial-timeout"),
    )  # fmt: skip
    targets_here, settings = settings_of(own, targets or ())
    done = measured(targets_here, settings, agreed=True, quiet=as_json)
    show(folder, wanted, f"{study}: {settings.design} of {', '.join(done.table.groups)}", done.table, done, {}, as_json)
