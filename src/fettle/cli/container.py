"""fettle container SOURCE: a container image that pins what a study was measured with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fettle.cli import _options, _show


def command(
    source: Annotated[Path, typer.Argument(help="a package that fettle serve package wrote, or a recipe.toml")],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for the files")] = Path("container"),
    wheel: Annotated[
        Path | None, typer.Option(help="fettle's wheel, if it was installed from a folder and no package index has it")
    ] = None,
    trust: Annotated[str, typer.Option(help="SHA-256 of the package's handler.py, to let it run in the image")] = "",
    as_json: _options.AsJson = False,
) -> None:
    """Write a Containerfile, and a lock with hashes, of the environment that a study was measured in.

    Python, torch and its index, what the recipe needs, its allocator and variables, threads from the quota, a compile
    cache that is mounted, a user that is not root, a health check, and fettle doctor at build time; compose and
    Kubernetes files beside it. pip is asked for the hashes, which asks the package index. Nothing is built.

    fettle container digits-1
    fettle container fettle-out/recipe.toml --output image --wheel torch_fettle-0.1.0-py3-none-any.whl
    """
    from fettle.container import write_image
    from fettle.files import check_writable

    output = _options.output_folder(output)
    check_writable(output / "Containerfile")
    image = write_image(source, output, wheel, trust.lower())
    _show.answer(
        as_json,
        lambda: {"name": image.name, "folder": str(output), "files": image.files, "python": image.python,
                 "versions": dict(image.versions), "variables": image.variables, "debian": image.debian},
        f"wrote {', '.join(image.files)} into {output}: {len(image.versions)} distributions, Python {image.python}.\n"
        f"Build it: podman build -t {image.name} {output}",
    )  # fmt: skip
