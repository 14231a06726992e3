"""`fettle serve`: package a model, serve it, find its best setting, put load on it."""

import typer

from fettle.cli._lazy import SETTINGS, LazyGroup

COMMANDS = {
    "Serve": {
        "run": "models behind HTTP; 'fettle serve PACKAGE' is short for it",
        "package": "a model and its recipe as a folder or zip of data",
        "slo": "the best way to serve under a latency limit",
        "load": "load on any server, with intervals",
    },
    "From and to other servers": {
        "export": "a package as a Ray Serve application",
        "import-mar": "a TorchServe archive as a package",
    },
}


class _Serve(LazyGroup):
    package, commands_of = "fettle.cli.serve", COMMANDS


app = typer.Typer(cls=_Serve, name="serve", help="Serve models, and find out what a server can do.", **SETTINGS)


@app.callback()
def _root() -> None:
    """Serve models, and find out what a server can do."""
