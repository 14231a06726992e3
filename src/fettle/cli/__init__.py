"""The command line: one file a command.

`main` is the entry point. A command is a plain function in a file of its own, named in a table here or in its group; it
raises `UsageError` for what the caller can fix (one line, exit code 2) and `typer.Exit(1)` for limits not met.
"""

from __future__ import annotations

import errno
import io
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

import fettle
from fettle.cli import _old_spellings, _quiet
from fettle.cli._console import console, stream
from fettle.cli._lazy import SETTINGS, LazyGroup
from fettle.errors import UsageError
from fettle.procs.process import open_standard_streams

COMMANDS = {
    "Make it fast": {
        "improve": "the whole workflow, step by step, on one page",
        "tune": "find the fastest recipe within limits",
        "bench": "compare named recipes in one interleaved race",
        "study": "every combination, and how techniques interact",
        "worker": "help to measure a study that others began",
        "export": "such workers as a job of Slurm, Kubernetes or Ray",
        "atlas": "what helped whom, where: one table of many studies",
        "check": "is a recipe still faster, and still right, here?",
        "report": "draw the report of a study again, charts as PNG and SVG",
        "techniques": "the catalogue, and why a level cannot be used here",
        "ui": "everything in a folder, in a browser, live",
        "join": "lend this machine's ranks to a study on another",
    },
    "Find out why it is slow or big": {
        "diagnose": "where the time and memory go, and what to do",
        "data": "measure and tune an input pipeline",
        "plan": "the peak memory of each parallel strategy, predicted",
        "trace": "analyse profiler traces",
        "memory": "analyse allocator snapshots",
        "doctor": "what is wrong or unsafe in this environment",
    },
    "Serve it": {
        "serve": "package a model, serve it, find its best setting, load it",
        "container": "an image that pins what a study was measured with",
    },
}
"""The help's groups: in each, the commands (their modules are in this folder) and one line on each."""

_INTERRUPTED = 128 + signal.SIGINT

# What the parser raises for a wrong option or command. Typer brings click along, its own copy in later versions, and
# exports only this descendant of it.
_ParseError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class _Root(LazyGroup):
    package, commands_of = "fettle.cli", COMMANDS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the arguments in the spelling of earlier versions too, and say how they are written now."""
        args, notes = _old_spellings.renewed(args)
        for line in notes:
            print(f"fettle: {line}", file=sys.stderr)
        return super().parse_args(ctx, args)


def build() -> typer.Typer:
    """The whole command line as one Typer application. A command's module is imported when it is called."""
    app = typer.Typer(
        cls=_Root,
        name="fettle",
        help="Find the fastest configuration of a PyTorch model that keeps its answers, with the evidence.",
        **SETTINGS,
    )

    @app.callback(epilog="TARGET is path/to/file.py:factory; begin with: fettle tune model.py")
    def _root(
        version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the versions and exit")
        ] = False,
    ) -> None:
        pass

    return app


def _print_version(asked: bool) -> None:
    if asked:
        from fettle.machine import installed

        print(f"fettle {fettle.__version__}")
        print(f"python {platform.python_version()}")
        for name, version in installed().items():
            if name != "torch-fettle":
                print(f"{name} {version}")
        raise typer.Exit


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM, which a cluster or a CI system sends before it takes the machine away, and SIGHUP, which comes when a
    terminal closes, are interrupts like Ctrl-C: what is known is written, and claims are given back, on the way out. A
    signal that is ignored, as by nohup, stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = os.getpid()

    def interrupt(number: int, frame: object) -> None:
        if os.getpid() == ours:
            if number == hang_up:  # a shell sends it, and then the kernel
                signal.signal(number, signal.SIG_IGN)
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)  # a fork of ours, which a pool ends so
        os.kill(os.getpid(), number)

    hang_up = getattr(signal, "SIGHUP", None)
    numbers = {signal.SIGTERM, hang_up or signal.SIGTERM}
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def main() -> None:
    """Run the command line: exit 0 done, 1 limits not met or comparison failed, 2 bad usage, 130 interrupted."""
    open_standard_streams()  # a journal in the place of one would take what a program prints
    if isinstance(out := sys.stdout, io.TextIOWrapper) and out is sys.__stdout__:  # and none of a test's
        # an arrow or a bar may not be in the terminal's encoding
        sys.stdout = stream(1, encoding=out.encoding, errors="replace", line_buffering=out.line_buffering)
    try:
        os.getcwd()
    except OSError as error:  # where it was deleted, MKL ends the process, and says so where nobody hears it
        _fail(f"the current folder cannot be used ({error.strerror}): change to another")
    try:
        with _quiet.libraries_quiet(), _signals_interrupt():
            status = build()(standalone_mode=False)
        if status == _INTERRUPTED:  # also what the parser makes of Ctrl-C
            _fail("interrupted", _INTERRUPTED)
        sys.exit(status if isinstance(status, int) else 0)
    except UsageError as error:
        _fail(_old_spellings.as_options(str(error), _known_options()), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", _INTERRUPTED)
    except _ParseError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if not message:  # no command: the help was printed instead
            sys.exit(2)
        _fail(message)
    except (MemoryError, ImportError) as error:
        if isinstance(error, ImportError) and "failed to map segment" not in str(error):
            raise
        _fail("out of memory, or of what ulimit -v lets a process have: allow it more")
    except OSError as error:
        if error.errno == errno.EIO and error.filename is None:  # the terminal has gone
            os._exit(_INTERRUPTED)
        no_place = "temporary directory" in (error.strerror or "")  # the tempfile module's own words
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT) and not no_place:
            raise
        # a name that is too long, a disk that fails, or is full while a table is written to it
        mend = ": set TMPDIR to a folder that can be written" if no_place else ""
        _fail(f"{error.filename or 'cannot write'}: {error.strerror}{mend}")


def _known_options() -> set[str]:
    """The options of the command that was called."""
    command: Any = typer.main.get_command(build())
    for word in _old_spellings.renewed(sys.argv[1:])[0]:
        command = (command.get_command(None, word) if hasattr(command, "get_command") else None) or command
    return {name for param in command.params for name in param.opts}


def _fail(message: str, code: int = 2) -> NoReturn:
    # a message may hold brackets, [batch] and torch-fettle[ray], and what a file from outside says to a terminal
    line = escape(re.sub("[\x00-\x1f\x7f-\x9f]", "\ufffd", " ".join(message.split())))
    console(error=True, soft_wrap=True).print(f"[bold red]fettle:[/] {line}")
    sys.exit(code)
