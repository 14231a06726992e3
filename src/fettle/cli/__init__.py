"""The command line: one file a command.

`main` is the entry point. A command is a plain function registered in `_COMMANDS`; it raises `UsageError` for what
the caller can mend (one line, exit code 2) and `typer.Exit(1)` for limits that were not met.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

import typer
from rich.console import Console
from rich.markup import escape

from fettle.errors import UsageError

# Command name -> module in this folder with a function `command` (or a `typer.Typer` named `app` for a group).
_COMMANDS: dict[str, str] = {
    "tune": "tune",
    "plan": "plan",
    "bench": "bench",
    "apply": "apply",
    "report": "report",
    "techniques": "techniques",
    "diagnose": "diagnose",
    "data": "data",
    "package": "package",
    "import-mar": "import_mar",
    "export": "export",
    "serve": "serve",
    "load": "load",
    "slo": "slo",
    "memory": "memory",
    "trace": "trace",
}

# What the parser raises for a wrong option or command. Typer brings click along, its own copy in later versions, and
# exports only this descendant of it.
_ParseError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def build() -> typer.Typer:
    """The whole command line as one Typer application."""
    app = typer.Typer(
        name="fettle",
        help="Find the fastest configuration of a PyTorch model that keeps its answers, with the evidence.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def _root() -> None:
        """Keeps `fettle COMMAND` a group even while there is one command only."""

    for name, module_name in _COMMANDS.items():
        module = importlib.import_module(f"fettle.cli.{module_name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(module.command)
    return app


def main() -> None:
    """Run the command line: exit 0 done, 1 limits not met or comparison failed, 2 bad usage, 130 interrupted."""
    try:
        status = build()(standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except UsageError as error:
        _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(128 + signal.SIGINT)
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)
    except _ParseError as error:
        _fail(error.format_message())  # type: ignore[attr-defined]
    except BrokenPipeError:  # the reader of our output (`| head`) has gone: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _fail(message: str) -> None:
    line = escape(" ".join(message.split()))  # a message may hold brackets: [batch], torch-fettle[ray]
    Console(stderr=True, soft_wrap=True).print(f"[bold red]fettle:[/] {line}", highlight=False)
    sys.exit(2)
