"""What libraries print, kept off the user's terminal: there is only what fettle says.

Warnings, logs and progress bars are switched off, and what C++ code writes to standard error goes nowhere.
fettle's own lines go to the terminal as before. A crash of the process itself is still shown.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fettle.cli._console import stream

_ENVIRONMENT = {
    "KINETO_LOG_LEVEL": "99",  # the profiler's log
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
_undo = ExitStack()


@contextmanager
def libraries_quiet() -> Iterator[None]:
    """Only fettle may print inside of this, until `restore_output`."""
    global _undo
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with ExitStack() as _undo:
        _undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        _undo.callback(logging.disable, logging.NOTSET)
        _undo.enter_context(_descriptor_apart())
        yield


def restore_output() -> None:
    """Let logs and libraries be heard again: for a server, whose standard error is its log."""
    _undo.close()
    atexit.register(_discard_stderr)


def _discard_stderr() -> None:
    """What extension modules report as the interpreter ends (nanobind: objects that were not freed) is no log."""
    with contextlib.suppress(ValueError, OSError, AttributeError), open(os.devnull, "w") as nowhere:
        sys.stderr.flush()
        os.dup2(nowhere.fileno(), 2)


@contextmanager
def users_code_quiet() -> Iterator[None]:
    """For a factory that runs in this process: what it prints, and what programs print that it starts, is not what the
    command answers; nobody knows what to type where it asks, and the arguments are not its own."""
    arguments = sys.argv[1:]
    with ExitStack() as undo, open(os.devnull, "r+b") as nowhere:
        undo.callback(sys.argv.extend, arguments)
        del sys.argv[1:]
        # A script may set how its lines are written. A log that it begins keeps the file, which so stays open.
        unread = stream(os.open(os.devnull, os.O_WRONLY), closefd=True, encoding="utf-8", errors="replace")
        undo.enter_context(contextlib.redirect_stdout(unread))
        undo.enter_context(contextlib.redirect_stderr(unread))
        for descriptor in (0, 1):
            with contextlib.suppress(OSError):  # closed
                before = os.dup(descriptor)
                undo.callback(os.close, before)
                undo.callback(os.dup2, before, descriptor)
                os.dup2(nowhere.fileno(), descriptor)
        yield


@contextmanager
def _descriptor_apart() -> Iterator[None]:
    """Give `sys.stderr` a descriptor of its own, and send descriptor 2, which C++ code writes to, to nowhere."""
    try:
        ours = sys.stderr.fileno() == 2
    except (OSError, ValueError, AttributeError):  # replaced, as by a test, or closed
        ours = False
    if not ours:
        yield
        return
    terminal, before = os.dup(2), sys.stderr
    opened = stream(terminal, closefd=True, line_buffering=True, errors="backslashreplace")
    with open(os.devnull, "wb") as unread, opened as mine:
        before.flush()
        os.dup2(unread.fileno(), 2)
        sys.stderr = mine
        faulthandler.enable(mine)
        try:
            yield
        finally:
            mine.flush()
            faulthandler.disable()
            os.dup2(terminal, 2)
            sys.stderr = before
