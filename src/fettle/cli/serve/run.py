"""fettle serve run PACKAGE...: model packages behind HTTP."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fettle.cli import _options, _quiet, _show
from fettle.cli._console import console
from fettle.cli.serve._slo_packages import is_package
from fettle.errors import UsageError, needing
from fettle.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from fettle.package.manifest import Package
    from fettle.serve.engine.worker_start import Spawned
    from fettle.serve.server import Address, Server


def command(
    ctx: typer.Context,
    packages: Annotated[
        list[str] | None,
        typer.Argument(
            help="packages that fettle serve package wrote, or path/to/file.py:factory, which is packaged first"
        ),
    ] = None,
    p99: Annotated[
        str | None,
        typer.Option("--p99", help="first find the best setting under this latency limit, as fettle serve slo does"),
    ] = None,
    rate: Annotated[float, typer.Option(min=0.0, help="with --p99: requests a second to be served")] = 0.0,
    recipe: Annotated[Path | None, typer.Option(help="recipe.toml to package a target with")] = None,
    host: Annotated[str, typer.Option(help="anything but loopback needs --token-file or --insecure")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port")] = 8080,
    management_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="load, unload and change models here; off without it")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="folder of packages that may be loaded by name")] = None,
    state: Annotated[Path | None, typer.Option(help="remember in this file what is served, for the next start")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="file of the token that every request needs, made if missing; or FETTLE_TOKEN")
    ] = None,
    insecure: Annotated[bool, typer.Option(help="let anybody who can reach the port call, without a token")] = False,
    certificate: Annotated[Path | None, typer.Option(help="answer HTTPS only, with this PEM file")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of its private key, if that is another")] = None,
    trust: Annotated[list[str] | None, typer.Option(help="SHA-256 of a handler.py that may run")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="worker processes of each model")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="threads of each worker")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, max=8192, help="rows of the largest batch")] = None,
    cache_memory: Annotated[
        str | None,
        typer.Option(help="text: most that a worker keeps of keys and values, for example 4GiB"),
    ] = None,
    prefill_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens of prompts that are computed between two tokens of other texts")
    ] = None,
    delay: Annotated[str | None, typer.Option(help="time to wait for a batch to fill, for example 5ms")] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="cpu, cuda, or several: cuda:0,cuda:1; default: serve.toml's")
    ] = None,
    explain: Annotated[bool, typer.Option(help="answer /explain and /explanations by Captum")] = False,
    otel: Annotated[
        bool, typer.Option(help="send an OpenTelemetry span for each inference to OTEL_EXPORTER_OTLP_ENDPOINT")
    ] = False,
    log_requests: Annotated[bool, typer.Option(help="a line of JSON for each request, on standard error")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print in JSON where the server listens")] = False,
) -> None:
    """Serve models: the Open Inference Protocol v2 with binary tensors, and TorchServe's URLs. Ctrl-C drains and ends.

    Images, texts and prompts are answered where fettle serve package was given a --handler. What is served: /docs.

    fettle serve digits-1
    fettle serve store/bert-2.zip --workers 2 --threads 1 --port 9000
    fettle serve model.py --recipe recipe.toml --p99 100ms --rate 80
    fettle serve smollm-1 --max-rows 32 --cache-memory 2GiB
    fettle serve digits-1 --host 0.0.0.0 --token-file token --certificate server.pem --key server-key.pem
    fettle serve --store models --management-port 8081 --state served.json
    """
    _quiet.restore_output()
    if rate and p99 is None:
        raise UsageError("--rate is for --p99: the requests a second to be served within that limit")
    waits_ms = None if delay is None else _options.duration_s(delay, "--delay", bare="ms") * 1e3
    devices = ",".join(_options.devices(device))
    spare = _spare(packages, threads, workers) if p99 is None else None  # first of all: it imports torch meanwhile
    with needing("serve"):
        from fettle.loop import run
        from fettle.serve.engine.registry import Options
        from fettle.serve.engine.spans import Spans
        from fettle.serve.server import Address, clients_token, serve, token_from
    if not packages and store is None:
        raise UsageError("nothing to serve: name a package, or a folder of them with --store")
    if store is not None and not store.is_dir():
        raise UsageError(f"no such folder: {store}")
    override: dict[str, Any] = {
        "workers": workers, "threads": threads, "max_rows": max_rows, "delay_ms": waits_ms,
        "cache_bytes": None if cache_memory is None else parse_size(cache_memory, "--cache-memory"),
        "prefill_tokens": prefill_tokens,
    }  # fmt: skip
    address = Address(
        host, port, management_port, clients_token(token_file),
        token_from(_secret()) if management_port is not None else "", insecure,
        certificate, key, log_requests=log_requests, spans=Spans() if otel else None,
    )  # fmt: skip
    address.check()
    address.tls()  # a wrong file is reported before models are loaded
    options = Options(
        store, state, tuple(trust or ()), devices, explain, spare=spare,
        override={key: value for key, value in override.items() if value is not None},
    )  # fmt: skip
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO if log_requests else logging.WARNING, format="%(message)s"
    )
    say = functools.partial(console(error=True, soft_wrap=True).print, markup=False)  # addresses in one piece
    with _quiet.libraries_quiet():  # until it serves: what exporting and compiling print is no log of a server's
        opened = [_packaged(text, recipe, say) for text in packages or ()]
        if p99 is not None:
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                opened = [_tuned(ctx, package, p99, rate, device, trust) for package in opened]
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(
            _show.status_line(f"loading {', '.join(one.manifest.name for one in opened)}", quiet=as_json)
        )

        def ready(server: Server) -> None:
            waiting.close()
            _say_where(server, address, as_json, say)

        try:
            run(serve(address, options, opened, ready))
        finally:
            if spare is not None:
                spare.end()


def _say_where(server: Server, address: Address, as_json: bool, say: Callable[[str], None]) -> None:
    """Where it listens, and what can be asked there."""
    from fettle.package.handlers.generate import Settings

    base = f"{'http' if address.certificate is None else 'https'}://{address.name}:{server.ports[0]}"
    names = {name: number for name, number, _ in server.registry.versions()}
    if as_json:
        print(json.dumps({"url": base, "ports": server.ports, "models": names}), flush=True)
        return
    say(f"serving {', '.join(names) or 'nothing yet'} at {base}")
    for name in names:
        say(f"  POST {base}/v2/models/{name}/infer")
        say(f"  POST {base}/predictions/{name}")
    if any(isinstance(version.package.manifest.handler, Settings) for _, _, version in server.registry.versions()):
        say(f"  texts by OpenAI's protocol: {base}/v1")
    say(f"  all that can be asked: {base}/docs")
    if address.management_port is not None:
        say(f"management on port {server.ports[1]}, token in {_secret()}")


def _secret() -> Path:
    """The file of the token that the management port asks for."""
    from fettle.files import home

    return home() / ".config" / "fettle" / "management-token"


def _spare(packages: list[str] | None, threads: int | None, workers: int | None) -> Spawned | None:
    """A process for the first worker of the first package, if it is one. What is wrong is found out later."""
    from fettle.serve.engine.worker_start import likely_threads, spawn

    if not packages or not (Path(packages[0]) / "serve.toml").is_file():
        return None
    with contextlib.suppress(OSError):
        return spawn(likely_threads(Path(packages[0]), threads, workers))
    return None


def _packaged(text: str, recipe: Path | None, say: Callable[[str], None]) -> Package:
    """A package as it is; a target as the package that is made of it, in the current folder, where it stays."""
    from fettle.package.export import write_package
    from fettle.package.manifest import name_for, open_package
    from fettle.recipe_file import RecipeFile, load_recipe

    if is_package(text):
        if recipe is not None:
            raise UsageError(f"{text} is packaged with its recipe already: --recipe is for a target")
        return open_package(Path(text))
    target = _options.target_or_package(text)
    name = name_for(target.name)
    folder = Path(f"{name}-1")
    if folder.exists():
        raise UsageError(f"{folder} exists already: serve it with fettle serve {folder}, or move it away")
    tuned = load_recipe(recipe) if recipe is not None else RecipeFile()
    with _quiet.users_code_quiet():
        package = write_package(target.load(), tuned.recipe, folder, name=name, evidence=tuned.evidence)
    say(f"packaged as {folder}: the next start can serve that")
    return package


def _tuned(
    ctx: typer.Context, package: Package, p99: str, rate: float, device: list[str] | None, trust: list[str] | None
) -> Package:  # fmt: skip
    """The package with the best setting under the limit. Leaves with exit code 1 where the rate cannot be had."""
    from fettle.cli.serve.slo import command as slo
    from fettle.package.manifest import open_package

    try:
        slo(
            ctx, [str(package.folder)], p99, rate=rate, max_rows=min(32, package.manifest.max_rows), device=device,
            trust=trust,
        )  # fmt: skip
    except typer.Exit as leaving:
        if rate or leaving.exit_code != 1:
            raise
    return open_package(package.folder)
