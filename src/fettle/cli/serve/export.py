"""fettle serve export: a model package for other people's servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fettle.cli import _options, _show
from fettle.cli._lazy import SETTINGS

app = typer.Typer(help="Write a model package as an application of another server.", **SETTINGS)


@app.callback()
def _root() -> None:
    """Keeps `fettle serve export KIND` a group while there is one kind only."""


@app.command()
def ray(
    package: Annotated[Path, typer.Argument(help="what fettle serve package wrote")],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder to write")],
    max_replicas: Annotated[int, typer.Option(min=1, help="the most replicas that autoscaling may start")] = 4,
    trust: Annotated[str, typer.Option(help="SHA-256 of the package's handler.py, to let it run")] = "",
    device: Annotated[str, typer.Option(help="cpu, or cuda: one GPU for each replica")] = "cpu",
    as_json: _options.AsJson = False,
) -> None:
    """Write a Ray Serve application: the same runner and batcher in each replica, for many machines.

    fettle serve export ray digits-1 --output digits-ray
    digits-ray/start.sh
    """
    from fettle.compat.ray_files import write_ray
    from fettle.package.manifest import open_package

    name = _options.one_device(device)
    scaling = write_ray(open_package(package), output, max_replicas=max_replicas, trust=trust.lower(), device=name)
    data = {"path": str(output), "target_ongoing_requests": scaling.target, "why": scaling.why}
    text = (
        f"requests in a replica at a time: {scaling.target:.3g} ({scaling.why})\n{output} is written: {output}/start.sh"
    )
    _show.answer(as_json, lambda: data, text)
