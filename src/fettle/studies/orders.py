"""The orders of a study's workers, kept in the storage that they share: which targets, which design, how many rounds.

A worker reads data and no code; the target must lie on its machine. Who can write to the storage chooses what a worker
calls, so a worker that is not given its targets by whoever starts it takes no more than a factory that is defined in a
file of the folder it is started in.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import optuna
from optuna.exceptions import DuplicatedStudyError

from fettle.errors import UsageError, refusing
from fettle.files import read_text
from fettle.procs.interpreter import find_interpreters
from fettle.recipe import Recipe
from fettle.result import MAX_ERROR
from fettle.storage import ORDERS, check_there, hidden, open_storage, opening, storage_url
from fettle.studies.settings import Settings
from fettle.workload import find_target

MOST_BYTES = 4 << 20
_BEGUN_S = 5.0
"""How long whoever made a study may take to say what it is to measure."""
_NAME = re.compile(r"[\w.-]{1,60}", re.ASCII)


class Orders(msgspec.Struct, frozen=True):
    """What is the same for every worker. Folders, other environments' paths and limits of time are each one's own."""

    targets: tuple[str, ...]
    """As they were named, from the folder in which the study was begun."""
    names: tuple[str, ...]
    """What each is called."""
    design: str
    techniques: dict[str, str | tuple[str, ...]]
    arguments: dict[str, tuple[str, ...]]
    environments: tuple[str, ...]
    order: tuple[str, ...]
    start: str | None
    cells: int | None
    rounds: int
    mode: str
    max_error: float | None
    confidence: float
    only: bool = False
    max_metric_drop: float | None = None
    under_load: bool = False


_OF_SETTINGS = tuple(name for name in Orders.__struct_fields__ if name in Settings.__dataclass_fields__)
"""What is told as the settings have it."""


def agree(targets: Sequence[str], settings: Settings) -> Orders:
    """The orders for others who are to work at this study. Raises `UsageError` for what they could not do alike, and
    where the study has other orders already."""
    check_name(settings.name)
    if settings.storage is None:
        raise UsageError("`study` names a study in a storage that others reach: name that too, `storage`")
    if settings.budget_s is not None:
        raise UsageError("`budget`: what fits into it differs between machines: `cells` is the same for all")
    if settings.grow_batch is not None or not settings.is_shared:
        raise UsageError(f"`design={settings.design}`: its steps follow from one another, so nobody can share them")
    told = {name: getattr(settings, name) for name in _OF_SETTINGS} | {
        "targets": [_from_here(text) for text in targets],
        "names": [find_target(text).name for text in targets],
        "environments": [one.name for one in find_interpreters(settings.pythons)],
        "start": None if settings.start is None else str(settings.start),
    }
    wanted = msgspec.convert(told, Orders)
    known = orders_of(settings.name, _url(settings))
    if known is not None and (differing := _differing(known, wanted)):
        raise UsageError(
            f"the study {settings.name!r} in {hidden(_url(settings))} was begun with another `{differing}`: choose "
            "another `study`"
        )
    return wanted


def announce(orders: Orders, settings: Settings) -> None:
    """Keep the orders where workers find them, unless they are there."""
    with opening(_url(settings)):
        kept = open_storage(_url(settings))
        # of several that begin at once one makes the study, and only that one writes
        with contextlib.suppress(DuplicatedStudyError):
            study = optuna.create_study(study_name=settings.name, storage=kept, directions=["minimize", "minimize"])
            study.set_user_attr(ORDERS, msgspec.to_builtins(orders))
    agree(orders.targets, settings)  # of two that began at once with other orders, one is refused


def settings_of(settings: Settings, targets: Sequence[str] = ()) -> tuple[list[str], Settings]:
    """The targets and settings of the study that `settings` names, by name and storage, with what is this worker's own.

    `targets` say where the study's targets lie here. Raises `UsageError` where there is no such study, for targets that
    are not its own, and for those that a worker takes from nobody but whoever starts it.
    """
    check_name(settings.name)
    if settings.storage is None:
        raise UsageError("name the storage that the study is in, `storage`")
    url = _url(settings)
    check_there(url)
    orders = orders_of(settings.name, url)
    if orders is None:
        known = ", ".join(map(repr, begun(url))) or "none"
        raise UsageError(f"there is no study {settings.name!r} for workers in {hidden(url)}; there are: {known}")
    if targets:
        if sorted(find_target(text).name for text in targets) != sorted(orders.names):
            raise UsageError(
                f"the study {settings.name!r} is of {', '.join(orders.names)}: name those targets, or none"
            )
        named: dict[str, list[str]] = {}  # two may have one name: they are told apart by their order
        for text in targets:
            named.setdefault(find_target(text).name, []).append(text)
        texts = [named[name].pop(0) for name in orders.names]
    else:
        texts = [_harmless(text) for text in orders.targets]
    if settings.under_load and not orders.under_load:
        raise UsageError(f"the study {settings.name!r} measures quiet machines: it was begun without `under_load`")
    here = [one.name for one in find_interpreters(settings.pythons)]
    if sorted(here) != sorted(orders.environments):
        missing = [name for name in orders.environments if name not in here] or ["no others"]
        raise UsageError(f"the study compares environments: name here {', '.join(missing)}, `python='NAME=PATH'`")
    told = {name: getattr(orders, name) for name in _OF_SETTINGS} | {
        "start": None if orders.start is None else Recipe.parse(orders.start),
        # What earlier versions kept where nobody gave one.
        "max_error": None if orders.max_error == MAX_ERROR else orders.max_error,
    }
    return texts, replace(settings, **told)


def check_name(name: str) -> None:
    """Raises `UsageError` for one that a storage, a file or a cluster would stumble over."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"`study={name}`: at most 60 letters, digits, dots, dashes and underscores make a name")


def _url(settings: Settings) -> str:
    return storage_url(settings.storage, settings.output)


def orders_of(name: str, url: str) -> Orders | None:
    """The orders of the study of that name; None where nobody has begun it."""
    with opening(url):
        kept = open_storage(url)
        if name not in optuna.get_all_study_names(kept):
            return None
        end = time.monotonic() + _BEGUN_S
        while time.monotonic() < end:
            study = optuna.load_study(study_name=name, storage=kept)
            with refusing(f"the orders of {name!r} cannot be read, another version may have written them:"):
                if ORDERS in study.user_attrs:
                    orders = msgspec.convert(study.user_attrs[ORDERS], Orders)
                    if odd := [one for one in orders.arguments if not one.isidentifier()]:  # files bear their names
                        raise UsageError(f"the study {name!r} varies {odd[0]!r}, which is no argument's name")
                    return orders
            if study.user_attrs or study.trials:
                break
            time.sleep(0.2)
    raise UsageError(f"the study {name!r} in {hidden(url)} was not begun for workers: choose another `study`")


def begun(url: str) -> list[str]:
    """The studies in a storage that workers can be started for, by name."""
    with opening(url):
        every = optuna.get_all_study_summaries(open_storage(url), include_best_trial=False)
        return [one.study_name for one in every if ORDERS in one.user_attrs]


def _differing(known: Orders, wanted: Orders) -> str:
    """The first setting that differs; paths may."""
    a: dict[str, Any] = msgspec.to_builtins(known)
    b: dict[str, Any] = msgspec.to_builtins(wanted)
    spelled = {"names": "target", "environments": "python", "techniques": "technique", "arguments": "factor",
               "start": "recipe"}  # fmt: skip
    may_differ = {"targets"}
    if (known.max_error, wanted.max_error) == (MAX_ERROR, None):  # what earlier versions kept where nobody gave one
        may_differ.add("max_error")
    return next((spelled.get(key, key) for key in a if key not in may_differ and a[key] != b[key]), "")


def _file(location: str) -> Path:
    """The file itself, whatever links lead to it. Raises nothing, as `Path` does for a link to itself or for nobody's
    home."""
    return Path(os.path.realpath(os.path.expanduser(location)))


def _from_here(text: str) -> str:
    """A target as others can find it in a folder of their own: a file in this folder by its path from here."""
    location, colon, factory = (text, "", "") if text.endswith(".py") else text.rpartition(":")
    if not location.endswith(".py"):
        return text
    path, here = _file(location), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}{colon}{factory}"


def _harmless(text: str) -> str:
    """A target that the storage names. Raises `UsageError` for all but a factory defined in a file of this folder."""
    location, _, factory = (text, "", "workload") if text.endswith(".py") else text.rpartition(":")
    with refusing(f"the study is of {location!r}:", ValueError):  # a name that no file can have
        path = _file(location)
    if not location.endswith(".py") or not path.is_relative_to(Path.cwd()):
        raise UsageError(
            f"the study is of {text}, which is not a file in this folder: to run it, name it: fettle worker {text}"
        )
    if not path.is_file():
        raise UsageError(f"the study is of {text}, and there is no such file here: start the worker where it lies")
    with refusing(f"{location}:", (SyntaxError, ValueError)):
        tree = ast.parse(read_text(path, MOST_BYTES))
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    if factory not in defined:
        raise UsageError(f"{location} defines no {factory}: to run it, name it: fettle worker {text}")
    return text
