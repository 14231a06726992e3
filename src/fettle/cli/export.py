"""fettle export slurm|kubernetes|ray: the workers of a study as a job of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fettle.cli import _options, _show


def command(
    kind: Annotated[str, typer.Argument(help="slurm, kubernetes or ray")],
    storage: Annotated[str, typer.Option(help="Optuna storage URL that every machine reaches, without a password")],
    study: _options.StudyName,
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="where the study's targets lie on the machines, as fettle worker takes them"),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=10_000, help="how many machines")] = 4,
    gpus: Annotated[int, typer.Option(min=0, max=64, help="GPUs of each machine, a worker for each; 0: none")] = 0,
    image: Annotated[str, typer.Option(help="Kubernetes: the container image, with fettle and the targets")] = "",
    python: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="where an environment that the study compares lies on the machines"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write; default NAME.sbatch, NAME.yaml or NAME-ray.py")
    ] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Write a job that starts the workers of a study, one at a time on each device.

    fettle export slurm model.py --storage postgresql://fettle@db/studies --study night --workers 8
    fettle export kubernetes --storage postgresql://fettle@db/studies --study night --image registry.example/night
    fettle export ray model.py --storage postgresql://fettle@db/studies --study night --gpus 4
    """
    from fettle.files import write_text
    from fettle.studies.jobs import Job, write

    written = write(kind, Job(study, storage, tuple(targets or ()), workers, gpus, image, tuple(python or ())))
    path = output or Path(written.file)
    write_text(path, written.text)
    _show.answer(
        as_json,
        lambda: {"path": str(path), "start": written.start(path), "workers": workers * max(1, gpus)},
        f"wrote {path}; start it: {written.start(path)}",
    )
