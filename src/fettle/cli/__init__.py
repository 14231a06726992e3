"""The command line: one file a command.

`main` is the entry point. A command is a plain function registered in `_COMMANDS`; it raises `UsageError` for what
the caller can mend (one line, exit code 2) and `typer.Exit(1)` for limits that were not met.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

import fettle
from fettle.errors import UsageError

# The help's groups: in each, command name -> module in this folder with a function `command` (or a `typer.Typer` named
# `app` for a group of commands).
_COMMANDS: dict[str, dict[str, str]] = {
    "Make it fast": {
        "tune": "tune",
        "join": "join",
        "bench": "bench",
        "apply": "apply",
        "report": "report",
        "techniques": "techniques",
    },
    "Find out why it is slow or big": {
        "diagnose": "diagnose",
        "data": "data",
        "trace": "trace",
        "memory": "memory",
        "plan": "plan",
    },
    "Serve it": {
        "package": "package",
        "import-mar": "import_mar",
        "serve": "serve",
        "slo": "slo",
        "load": "load",
        "export": "export",
    },
}

_INTERRUPTED = 128 + signal.SIGINT

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

    @app.callback(epilog="TARGET is path/to/file.py:factory; begin with: fettle tune model.py --budget 10m")
    def _root(
        version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and exit")
        ] = False,
    ) -> None:
        pass

    for panel, commands in _COMMANDS.items():
        for name, module_name in commands.items():
            module = importlib.import_module(f"fettle.cli.{module_name}")
            if hasattr(module, "app"):
                app.add_typer(module.app, name=name, rich_help_panel=panel)
            else:
                app.command(name, rich_help_panel=panel)(module.command)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fettle {fettle.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line: exit 0 done, 1 limits not met or comparison failed, 2 bad usage, 130 interrupted."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own log, which is nothing for a person
    try:
        status = build()(standalone_mode=False)
        if status == _INTERRUPTED:  # also what the parser makes of Ctrl-C
            _fail("interrupted", _INTERRUPTED)
        sys.exit(status if isinstance(status, int) else 0)
    except UsageError as error:
        _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", _INTERRUPTED)
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)
    except _ParseError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if not message:  # no command: the help was printed instead
            sys.exit(2)
        _fail(message)
    except BrokenPipeError:  # the reader of our output (`| head`) has gone: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}")  # a name that is too long, a disk that fails


def _fail(message: str, code: int = 2) -> NoReturn:
    line = escape(" ".join(message.split()))  # a message may hold brackets: [batch], torch-fettle[ray]
    Console(stderr=True, soft_wrap=True).print(f"[bold red]fettle:[/] {line}", highlight=False)
    sys.exit(code)
