"""Where studies lie: an Optuna storage, a SQLite file or a server, opened by its URL."""

from __future__ import annotations

import contextlib
import re
import secrets
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DataError, DBAPIError, ProgrammingError

from fettle.errors import UsageError, extra, refusing

ORDERS = "fettle:orders"
"""Attribute of a study that only says what the workers of other studies are to measure."""
GRACE_S = 45
"""How long a worker may be silent."""
OUTAGE_S = 300.0
"""How long a server that has answered may be away."""
LOCKED_S = 30.0
"""How long a file that was opened may be locked by another process, or have no room,"""
LOCKED = "locked|busy|full"
"""and what SQLite says then."""
_BEGINNING_S = 2.0
"""How long several that begin at once on an empty server may keep each other from making the tables."""
_BEGINNING = "UNIQUE constraint|already exists"
"""What SQLite says of a file whose tables another is making."""

STORAGE_ERRORS = (StorageInternalError, DBAPIError)
_REFUSALS = (ProgrammingError, DataError)
"""What a server says of a lacking permission or table, and of what it cannot hold."""
_R = TypeVar("_R")
_answered = set[str]()
"""URLs of the servers that have answered this process."""


def outlast(call: Callable[[], _R], seconds: float, *, passes: str = "") -> _R:
    """Ask a storage again while it does not answer, for so many seconds at most, and only where the error says one of
    the words that the pattern `passes` has. What a server refuses is not waited for, once its tables must be there."""
    began = time.monotonic()
    while True:
        try:
            return call()
        except STORAGE_ERRORS as error:
            is_refused = isinstance(error, _REFUSALS) or isinstance(error.__cause__, _REFUSALS)
            most = min(seconds, _BEGINNING_S) if is_refused else seconds
            if time.monotonic() - began > most or not re.search(passes, f"{error} {error.__cause__}"):
                raise
            time.sleep(0.5 + secrets.randbelow(1000) / 1000)


def is_server(url: str) -> bool:
    """Whether the storage at a URL is a server and no file."""
    return not url.startswith("sqlite")


@contextlib.contextmanager
def opening(storage: str) -> Iterator[None]:
    """Say in one line what keeps a storage from being opened."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with refusing(f"cannot open the storage {hidden(storage)}:"):
        try:
            yield
        except ImportError as error:
            missing = getattr(error.__cause__, "name", None) or error.name  # Optuna raises another from it
            needs = f"the storage {hidden(storage)} needs {missing or 'its driver'}"
            if storage.startswith("postgresql"):
                raise extra(needs, "postgresql") from error
            raise UsageError(f"{needs}, which is not installed") from error


def open_storage(url: str, heartbeat_s: int | None = None, grace_s: int = GRACE_S) -> RDBStorage:
    """The storage at a URL. A server that has answered before is waited for."""
    options: dict[str, Any] = {"pool_pre_ping": True} if is_server(url) else {}
    if url.startswith("postgresql"):  # one that is stopped within a transaction must not hold up all others
        options["connect_args"] = {"options": f"-c idle_in_transaction_session_timeout={grace_s}s"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        wait_s = OUTAGE_S if url in _answered else _BEGINNING_S if is_server(url) else LOCKED_S
        storage = outlast(
            lambda: RDBStorage(url, options, heartbeat_interval=heartbeat_s, grace_period=grace_s), wait_s,
            passes="" if is_server(url) else _BEGINNING,
        )  # fmt: skip
    if is_server(url):
        _answered.add(url)
    return storage


def storage_url(storage: str | None, folder: Path) -> str:
    """The Optuna storage: as given, or a SQLite file ``study.db`` in `folder`."""
    if storage and "://" in storage:
        return storage
    file = Path(storage) if storage else folder / "study.db"
    return URL.create("sqlite", database=str(file.resolve())).render_as_string()  # with `?` and `%` as URLs have them


def check_there(url: str) -> None:
    """Raise `UsageError` for a SQLite file that is not there or has no studies: who only reads would make tables."""
    if not url.startswith("sqlite:///"):
        return
    path = Path(make_url(url).database or "")
    if not path.is_file():
        raise UsageError(f"no such storage: {path}")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
            base.execute("SELECT study_id FROM studies LIMIT 1")
    except sqlite3.Error as error:  # whoever opens it says what else is wrong
        if "no such table" in str(error):
            raise UsageError(f"{path} is not a storage of studies: it has no table of them") from error


def hidden(url: str) -> str:
    """A storage URL without its password."""
    scheme, separator, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    place = re.sub(r"(?i)(?<=[?&])(\w*passw\w*=)[^&]*", r"\1***", place)
    return f"{scheme}{separator}{user}{colon}{'***' * bool(colon)}{at}{place}"
