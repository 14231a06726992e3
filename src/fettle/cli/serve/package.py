"""fettle serve package TARGET: a tuned model as a folder or zip that a server can load without running its code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from fettle.cli import _options, _quiet, _show
from fettle.errors import UsageError, refusing
from fettle.files import read_bytes, read_toml
from fettle.recipe import Recipe

if TYPE_CHECKING:
    from fettle.package.manifest import Manifest, Package


def command(
    target: _options.Target,
    recipe: Annotated[
        str | None,
        typer.Option(help="recipe.toml that fettle tune wrote, or 'precision=bf16'; without it, the model as given"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="a folder, or a file ending in .zip; default: NAME-VERSION")
    ] = None,
    name: Annotated[str, typer.Option(help="what clients call the model; default: the target's name")] = "",
    version: Annotated[str, typer.Option("--version", help="version of the package")] = "1",
    max_rows: Annotated[int, typer.Option(min=1, max=8192, help="rows of the largest batch that is served")] = 8,
    handler: Annotated[
        str | None,
        typer.Option(help="tensor, image, detection, text, generate, or your handler.py: what /predictions does"),
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="names of the classes: one a line, or JSON")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json of the library tokenizers, or its folder")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="the chat template of a --handler generate; default: the one beside the tokenizer"),
    ] = None,
    requires: Annotated[
        list[str] | None,
        typer.Option(help="a library that your handler.py imports: scipy, or 'scipy>=1.10'"),
    ] = None,
    handler_settings: Annotated[
        Path | None, typer.Option(help="TOML with settings of a ready handler, which override its own guesses")
    ] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Write a model package: the exported model, its weights, the recipe, how it was judged, and how to serve it.

    fettle serve package workloads/digits.py --recipe fettle-out/recipe.toml
    fettle serve package model.py:bert --recipe recipe.toml --name bert --version 2 -o store/bert-2.zip
    fettle serve package resnet.py --handler image --labels imagenet.txt
    fettle serve package workloads/minilm.py --handler text --tokenizer minilm/tokenizer.json
    """
    from fettle.package.export import check_free, write_package
    from fettle.package.handlers.generate import read_chat
    from fettle.package.manifest import name_for
    from fettle.package.settings import ServeSettings
    from fettle.recipe_file import RecipeFile, read_recipe
    from fettle.workload import find_target

    named = find_target(target)
    tuned = read_recipe(recipe) if recipe is not None else RecipeFile()
    called = name or name_for(named.name)
    path = output or Path(f"{called}-{version}")
    check_free(path)
    files = add_files(labels, tokenizer)
    special: dict[str, str] = {}
    if handler == "generate":
        chat, special = read_chat(tokenizer, chat_template)
        files |= chat
    elif chat_template is not None:
        raise UsageError("a chat template is for --handler generate")
    with _show.status_line("building the workload", quiet=as_json) as progress, _quiet.users_code_quiet():
        package = write_package(
            named.load(), tuned.recipe, path, name=called, version=version, settings=ServeSettings(max_rows=max_rows),
            handler=as_handler(handler),
            handler_settings={**special, **toml_settings(handler_settings)},
            files=files, requires=requires or (), evidence=tuned.evidence,
            on_progress=progress,
        )  # fmt: skip
    show(package, path, as_json)


def show(package: Package, path: Path, as_json: bool) -> None:
    """What was written, for people or as JSON."""
    manifest = package.manifest
    _show.answer(
        as_json,
        lambda: {"path": str(path), **msgspec.to_builtins(manifest)},
        lambda console: _print(manifest, path, console),
    )


def _print(manifest: Manifest, path: Path, out: Console) -> None:
    from fettle.package.handlers.generate import Settings
    from fettle.package.handlers.parts import PAST

    for label, specs in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        text = ", ".join(f"{spec.name} {spec.datatype}{list(spec.shape)}" for spec in specs)
        out.print(f"{label:8} {text}", markup=False)
    if manifest.handler is not None:
        out.print(f"handler  {' '.join(_settings(msgspec.to_builtins(manifest.handler)))}", markup=False)
    if isinstance(manifest.handler, Settings) and all(spec.name != PAST for spec in manifest.inputs):
        out.print("         no keys and values are kept: every token runs the whole text again", style="yellow")
    out.print(f"recipe   {Recipe(manifest.recipe)}", markup=False)
    out.print(f"error    {manifest.accuracy['relative_error']:.3g} against {manifest.accuracy['against']}")
    if "divergence" in manifest.accuracy:
        out.print(f"KL       {manifest.accuracy['divergence']:.2g} nats, of the next token")
    out.print(f"{path} is written: fettle serve {path}", markup=False, soft_wrap=True)


def _settings(values: dict[str, Any]) -> Iterator[str]:
    """A handler's settings, those of the decoding among them, without the empty ones."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _settings(value)
        elif value not in ("", (), []):
            shown = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
            yield f"{key}={shown}"


def as_handler(text: str | None) -> Path | str | None:
    """A path, or the name of a ready handler."""
    return Path(text) if text is not None and ("/" in text or text.endswith(".py")) else text


def toml_settings(path: Path | None) -> dict[str, Any]:
    """The user's settings for a ready handler."""
    if path is None:
        return {}
    with refusing(f"{path} cannot be read:", (ValueError, RecursionError)):
        return read_toml(path)


def add_files(labels: Path | None, tokenizer: Path | None) -> dict[str, bytes]:
    """What the package keeps for its handler."""
    from fettle.package.handlers.parts import LABELS, labels_file
    from fettle.package.handlers.text import MAX_TOKENIZER_BYTES, TOKENIZER

    files = {LABELS: labels_file(labels)} if labels is not None else {}
    if tokenizer is not None:
        path = tokenizer / TOKENIZER if tokenizer.is_dir() else tokenizer
        files[TOKENIZER] = read_bytes(path, MAX_TOKENIZER_BYTES)
    return files
