"""fettle serve import-mar FILE.mar: a TorchServe archive as a model package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fettle.cli import _options, _quiet, _show
from fettle.cli.serve.package import add_files, as_handler, show, toml_settings


def command(
    file: Annotated[Path, typer.Argument(help="what torch-model-archiver wrote")],
    trust: Annotated[str, typer.Option(help="SHA-256 of the archive: its code may run here, once, to convert it")] = "",
    target: Annotated[
        str | None, typer.Option(help="file.py:factory with your own code of the model; the archive's is not run")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="what the model takes: 'FP32[-1,3,224,224]'; one for each input")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="a folder, or a file ending in .zip")] = None,
    name: Annotated[str, typer.Option(help="what clients call the model; default: the archive's name for it")] = "",
    max_rows: Annotated[int, typer.Option(min=1, max=8192, help="rows of the largest batch")] = 8,
    handler: Annotated[
        str | None,
        typer.Option(help="for custom ones: tensor, image, detection, text, generate, or your handler.py"),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="names of the classes; default: the archive's index_to_name.json")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json of tokenizers, or its folder")] = None,
    handler_settings: Annotated[Path | None, typer.Option(help="TOML that overrides what the model suggests")] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Convert a TorchServe archive to a model package, which holds no code.

    Without --trust or --target nothing in the archive is run, and its SHA-256 is printed. Pickles with anything but
    weights are refused in any case.

    fettle serve import-mar densenet.mar --trust 5c1a... --labels imagenet.json
    fettle serve import-mar bert.mar --target bert.py --handler text --tokenizer bert/tokenizer.json
    """
    from fettle.compat.mar import import_mar, read_mar
    from fettle.package.settings import ServeSettings
    from fettle.workload import find_target

    mar = read_mar(file)
    path = output or Path(f"{name or mar.name}-{mar.version}")
    with _show.status_line("reading the archive", quiet=as_json) as progress, _quiet.users_code_quiet():
        package = import_mar(
            mar, path, trust=trust.lower(),
            workload=find_target(target).load() if target else None, inputs=inputs or (),
            handler=as_handler(handler), handler_settings=toml_settings(handler_settings),
            files=add_files(labels, tokenizer), settings=ServeSettings(max_rows=max_rows), name=name,
            on_progress=progress,
        )  # fmt: skip
    show(package, path, as_json)
