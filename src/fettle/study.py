"""The study: all trials of one workload, kept in an Optuna storage as they become known.

Each trial is one Optuna trial: its parameters are the levels, its two objectives time and error, and the whole of it
is the user attribute ``fettle``. So a killed study goes on where it stopped, several machines can share one storage,
and optuna-dashboard opens it. Reading a study parses JSON and never runs code.

Of several that work at one study on machines alike each `Study.claim`s what it is about to measure: an Optuna trial
that is running, with a heartbeat for as long as its process lives. Whose heartbeat stops has lost its claims.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import math
import os
import platform
import secrets
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from fettle.errors import UsageError, first_line, refusing
from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.storage import (
    GRACE_S,
    LOCKED,
    LOCKED_S,
    ORDERS,
    OUTAGE_S,
    STORAGE_ERRORS,
    hidden,
    is_server,
    open_storage,
    opening,
    outlast,
)
from fettle.techniques import Facts, factors, known_levels, run_by

_WORKLOAD, _TRIAL, _MACHINE, _CODE = "fettle:workload", "fettle", "fettle:machine", "fettle:code"
_VERSIONS = "fettle:versions"
_OWNER, _GIVEN_BACK, _HOST = "fettle:worker", "fettle:given back", "fettle:host"
HEARTBEAT_S = 10
"""How often a worker says that it lives."""
DEATHS = 3
"""A recipe whose worker vanished so often has failed: it may be what ends them."""


class OtherWorkload(UsageError):
    """The study of that name is of another workload."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _lasting(call: Callable[Concatenate[Study, _P], _R]) -> Callable[Concatenate[Study, _P], _R]:
    """Ask the storage again while it does not answer: a server for `OUTAGE_S` at most, a file for `LOCKED_S`. Then it
    is a `UsageError`."""

    @functools.wraps(call)
    def asking(self: Study, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            seconds, passes = (LOCKED_S, LOCKED) if self.is_file else (OUTAGE_S, "")
            return outlast(lambda: call(self, *args, **kwargs), seconds, passes=passes)
        except STORAGE_ERRORS as error:
            why = first_line(error.__cause__ or error)[:200]
            raise UsageError(f"the study {self.name!r} cannot be read or written: {why}") from error

    return asking


class Study:
    """One study, open for reading and writing."""

    def __init__(self, study: optuna.Study, machine_id: str) -> None:
        self._study = study
        self._machine_id = machine_id
        self._owner = f"{platform.node()}:{os.getpid()}:{secrets.token_hex(3)}"
        self._claims: dict[Recipe, int] = {}
        """What this process is about to measure, and the number that Optuna's storage has for each trial."""
        self._first_seen: dict[int, float] = {}
        """When a claim without a heartbeat was first seen, by the number of its trial."""
        self._ended: threading.Event | None = None
        self.packages: Mapping[str, str] | None = None
        """Versions of what is installed here: trials of recipes that run by another one are unknown, as those of other
        machines are. None: they are known, the newest of each recipe."""

    @classmethod
    def open(
        cls, name: str, storage: str, fingerprint: str, machine_id: str, *, structure: str = "", beside: bool = False
    ) -> Study:
        """Open the study of that name, or begin it.

        `fingerprint` and `structure` are those of the workload. Where the name belongs to another one (the model or
        its inputs have been edited since) the study is opened or begun `beside` it, under the name and a hash of both.
        Raises `UsageError` when the storage cannot be reached, and for another workload's name without `beside`.
        """
        study = cls._open(name, storage, fingerprint, machine_id)
        if study._is_of(fingerprint, structure):
            return study
        if not beside:
            raise OtherWorkload(
                f"the study {name!r} in {hidden(storage)} is of another workload (its weights, inputs or code differ)"
                ": choose another `study` or `output`"
            )
        mark = hashlib.sha256(f"{fingerprint} {structure}".encode()).hexdigest()[:8]
        study = cls._open(f"{name}-{mark}", storage, fingerprint, machine_id)
        study._is_of(fingerprint, structure)
        return study

    @_lasting
    def _is_of(self, fingerprint: str, structure: str) -> bool:
        """Whether the study is of this workload. Code is compared on one machine only, and where it was kept."""
        key = f"{_CODE}:{self._machine_id}"
        if self._study.user_attrs[_WORKLOAD] != fingerprint or self._study.user_attrs.get(key, structure) != structure:
            return False
        if structure and key not in self._study.user_attrs:
            self._study.set_user_attr(key, structure)
        return True

    @classmethod
    def _open(cls, name: str, storage: str, fingerprint: str, machine_id: str) -> Study:
        with opening(storage):
            kept = open_storage(storage, HEARTBEAT_S, GRACE_S)
            study = outlast(lambda: _begun(kept, name, storage, fingerprint), OUTAGE_S if is_server(storage) else 0.0)
        return cls(study, machine_id)

    @property
    def name(self) -> str:
        """The study's name."""
        return self._study.study_name

    @property
    def fingerprint(self) -> str:
        """That of the workload."""
        return str(self._study.user_attrs.get(_WORKLOAD, ""))

    @property
    def version(self) -> str:
        """The fingerprint and, where it was kept, a hash of the code: what an atlas takes for one model."""
        code = self._study.user_attrs.get(f"{_CODE}:{self._machine_id}", "")
        return f"{self.fingerprint}-{code}" if code else self.fingerprint

    @property
    def is_file(self) -> bool:
        """Whether the storage is a file and no server."""
        backend = getattr(self._study._storage, "_backend", self._study._storage)
        return not isinstance(backend, RDBStorage) or not is_server(backend.url)

    def on(self, machine_id: str) -> Study:
        """The same study as another machine sees it."""
        return Study(self._study, machine_id)

    @_lasting
    def machines(self) -> dict[str, Any]:
        """What is known of each machine that took part, by its id."""
        start = f"{_MACHINE}:"
        attrs = self._study.user_attrs
        return {key.removeprefix(start): value for key, value in attrs.items() if key.startswith(start)}

    @_lasting
    def workers(self) -> dict[str, int]:
        """How many recipes each process measured that claimed them, on machines like this one; ``HOST:PID:MARK``."""
        return dict(Counter(str(trial.user_attrs[_OWNER]) for trial in self._finished() if _OWNER in trial.user_attrs))

    @_lasting
    def claimed(self) -> int:
        """How many recipes somebody on a machine like this one is about to measure."""
        return sum(not trial.state.is_finished() for trial in self._ours())

    @_lasting
    def hosts(self) -> dict[str, str]:
        """The name of the machine that measured each recipe, by the recipe; of trials that know it."""
        by_host: dict[str, str] = {}
        for trial in self._finished():
            by_host.setdefault(str(trial.user_attrs.get("recipe")), str(trial.user_attrs.get(_HOST, "")))
        return by_host

    @_lasting
    def trials(self) -> list[Trial]:
        """The trials measured on this machine, oldest first."""
        by_recipe: dict[Recipe, Trial] = {}
        for trial in self._finished():
            with refusing(f"trial {trial.number} of the study cannot be read:"):
                read = Trial.from_json(json.loads(trial.user_attrs[_TRIAL]))
            first = by_recipe.setdefault(read.recipe, read)  # the first measurement counts
            if first.versions != read.versions or first.status == "failed" or not first.is_compared:
                by_recipe[read.recipe] = read
        return list(by_recipe.values())

    def _finished(self) -> list[FrozenTrial]:
        return [trial for trial in self._ours() if isinstance(trial.user_attrs.get(_TRIAL), str)]

    def _ours(self) -> list[FrozenTrial]:
        """All trials of machines like this one, those that are claimed and those that were given up as well."""
        every = self._study.get_trials(deepcopy=False)
        ours = [trial for trial in every if trial.user_attrs.get(_MACHINE) == self._machine_id]
        here = self.packages
        if here is None:
            return ours
        ran_by = [trial.user_attrs.get(_VERSIONS, {}) for trial in ours]
        return [trial for trial, versions in zip(ours, ran_by, strict=True)
                if all(here.get(name) == version for name, version in versions.items())]  # fmt: skip

    @_lasting
    def add(self, trial: Trial, facts: Facts = Facts()) -> None:  # noqa: B008
        """Keep a finished trial. One whose claim was lost is dropped: another has measured it, or is about to."""
        failed = trial.status == "failed" or math.isnan(trial.time_ms)
        error = trial.accuracy.error
        values = None if failed else [trial.time_ms / trial.samples, error if math.isfinite(error) else 1e9]
        state = TrialState.FAIL if failed else TrialState.COMPLETE
        summary = {"recipe": str(trial.recipe), "status": trial.status, "reason": trial.reason,
                   _HOST: platform.node(), _VERSIONS: dict(trial.versions),
                   _TRIAL: json.dumps(trial.to_json())}  # fmt: skip
        # Optuna's own mark for a trial that breaks a constraint: positive means infeasible.
        constraints = [1.0 if trial.status == "rejected" else 0.0]
        if trial.recipe in self._claims:
            storage, number = self._study._storage, self._claims[trial.recipe]
            with contextlib.suppress(UpdateFinishedTrialError):
                storage.set_trial_system_attr(number, "constraints", constraints)
                for key, value in summary.items():
                    storage.set_trial_user_attr(number, key, value)
                storage.set_trial_state_values(number, state, values)
            del self._claims[trial.recipe]
            return
        kept = create_trial(state=state, values=values, **self._levels(trial.recipe, facts),
                            user_attrs={**summary, _MACHINE: self._machine_id},
                            system_attrs={"constraints": constraints})  # fmt: skip
        if kept.datetime_complete and math.isfinite(trial.seconds):  # a timeline without this has points, not bars
            kept.datetime_start = kept.datetime_complete - datetime.timedelta(seconds=trial.seconds)
        self._study.add_trial(kept)

    # -- several at one study ----------------------------------------------------------------------------------------

    def claim(self, recipes: Sequence[Recipe], most: int, facts: Facts = Facts()) -> tuple[list[Recipe], int]:  # noqa: B008
        """Claim up to `most` of `recipes` that nobody on a machine like this one has measured or claimed; they are this
        process's until `add` or `give_back`. Returns them, and a number that no other claim has.

        A recipe whose worker vanished is claimed alone: if it is what killed the worker, it costs no other recipe its
        measurement. After `DEATHS` vanished workers it is a failed trial.
        """
        self._bury()
        free, deaths = self._free(recipes)
        lost = [recipe for recipe in free if deaths[str(recipe)]]
        wanted = [recipe for recipe in free if recipe not in lost][:most] or lost[:1]
        for recipe in wanted:
            self._begin(recipe, facts)
        # Each writes its claim before it reads the others', and numbers grow: both of two see whose is smaller.
        won = self._won(wanted)
        self.give_back([recipe for recipe in wanted if recipe not in won])
        for recipe in [recipe for recipe in won if deaths[str(recipe)] >= DEATHS]:
            del won[recipe]
            reason = f"the worker that measured it vanished {DEATHS} times"
            self.add(Trial(recipe, "failed", reason, versions=run_by(recipe, facts.packages)), facts)
        return list(won), min(won.values(), default=0)

    @_lasting
    def give_back(self, recipes: Sequence[Recipe] | None = None) -> None:
        """Leave what was claimed and not measured to others; by default all of it."""
        for recipe in list(self._claims) if recipes is None else recipes:
            number = self._claims[recipe]
            with contextlib.suppress(UpdateFinishedTrialError):
                self._study._storage.set_trial_user_attr(number, _GIVEN_BACK, True)
                self._study._storage.set_trial_state_values(number, TrialState.FAIL)
            del self._claims[recipe]
        if not self._claims and self._ended is not None:
            self._ended.set()
            self._ended = None

    @_lasting
    def _begin(self, recipe: Recipe, facts: Facts) -> None:
        """Claim a recipe: first as waiting, then with a heartbeat, then as running."""
        storage: Any = self._study._storage  # Optuna does not say that it can keep heartbeats
        attrs = {_MACHINE: self._machine_id, _OWNER: self._owner, "recipe": str(recipe),
                 _VERSIONS: run_by(recipe, facts.packages)}  # fmt: skip
        waiting = create_trial(state=TrialState.WAITING, **self._levels(recipe, facts), user_attrs=attrs)
        number = self._claims[recipe] = storage.create_new_trial(self._study._study_id, waiting)
        storage.record_heartbeat(number)
        with contextlib.suppress(UpdateFinishedTrialError):  # the claim expired while this process was stopped
            storage.set_trial_state_values(number, TrialState.RUNNING)
        if self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._beat, args=(self._ended,), daemon=True).start()

    def _beat(self, ended: threading.Event) -> None:
        storage: Any = self._study._storage
        while not ended.wait(HEARTBEAT_S):
            for number in list(self._claims.values()):
                with contextlib.suppress(Exception):  # a server that is away for a while
                    storage.record_heartbeat(number)

    @_lasting
    def _free(self, recipes: Sequence[Recipe]) -> tuple[list[Recipe], Counter[str]]:
        """The recipes that nobody measured or claims, and how often a recipe's worker vanished."""
        taken, deaths = set(), Counter[str]()
        for trial in self._ours():
            if _TRIAL in trial.user_attrs or not trial.state.is_finished():
                taken.add(trial.user_attrs.get("recipe"))
            elif _OWNER in trial.user_attrs and _GIVEN_BACK not in trial.user_attrs:
                deaths[trial.user_attrs["recipe"]] += 1
        return [recipe for recipe in recipes if str(recipe) not in taken], deaths

    @_lasting
    def _won(self, recipes: Sequence[Recipe]) -> dict[Recipe, int]:
        """What this process won of what it claimed, with the place of each claim in the study."""
        first: dict[str, FrozenTrial] = {}
        for trial in self._ours():
            if _TRIAL in trial.user_attrs or not trial.state.is_finished():
                first.setdefault(str(trial.user_attrs.get("recipe")), trial)
        owned = {recipe: first[str(recipe)] for recipe in recipes if str(recipe) in first}
        return {recipe: one.number for recipe, one in owned.items() if one._trial_id == self._claims[recipe]}

    @_lasting
    def _bury(self) -> None:
        """End the claims of processes that vanished, and of our own those that an outage made twice."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(self._study)
        now = time.monotonic()
        for trial in self._ours():
            if trial.state.is_finished() or trial._trial_id in self._claims.values():
                continue
            waited_s = now - self._first_seen.setdefault(trial._trial_id, now)
            ours = trial.user_attrs.get(_OWNER) == self._owner
            if ours or (trial.state == TrialState.WAITING and waited_s > GRACE_S):
                with contextlib.suppress(UpdateFinishedTrialError):
                    self._study._storage.set_trial_user_attr(trial._trial_id, _GIVEN_BACK, True)
                    self._study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    def _levels(self, recipe: Recipe, facts: Facts) -> dict[str, Any]:
        """A recipe as Optuna has it: what may be set on such a workload, and what is. Optuna's choices are fixed: a
        technique that another version of fettle began the study with, and that has other levels now, is left out."""
        params: dict[str, Any] = {}
        distributions: dict[str, optuna.distributions.BaseDistribution] = {}
        known = known_levels()  # the same on every machine: a storage is shared
        fixed = {
            name: choices for trial in self._study.get_trials(deepcopy=False)
            for name, choices in trial.distributions.items()
        }  # fmt: skip
        for name, technique, _ in factors(facts):
            choices = optuna.distributions.CategoricalDistribution(known[technique.name])
            if facts.mode in technique.modes and fixed.get(name, choices) == choices:
                params[name] = recipe.levels.get(name, technique.default)
                distributions[name] = choices
        return {"params": params, "distributions": distributions}

    @property
    def seconds(self) -> float:
        """What it has taken on this machine, as far as it says so."""
        kept = self.note("seconds")
        return float(kept) if isinstance(kept, (int, float)) and 0 < kept < 1e12 else 0.0

    # -- notes -------------------------------------------------------------------------------------------------------

    @_lasting
    def note(self, key: str) -> Any:
        """A fact about the study as a whole on this machine, or None."""
        return self._study.user_attrs.get(f"fettle:{key}:{self._machine_id}")

    @_lasting
    def notes(self, start: str) -> list[Any]:
        """All facts whose keys begin so, on this machine."""
        start, end = f"fettle:{start}", f":{self._machine_id}"
        attrs = self._study.user_attrs
        return [value for key, value in attrs.items() if key.startswith(start) and key.endswith(end)]

    @_lasting
    def set_note(self, key: str, value: Any) -> None:
        """Keep a fact about the study as a whole on this machine; plain JSON data."""
        self._study.set_user_attr(f"fettle:{key}:{self._machine_id}", value)


def _begun(kept: RDBStorage, name: str, url: str, fingerprint: str) -> optuna.Study:
    """Optuna's study of that name, made where there is none."""
    study = optuna.create_study(study_name=name, storage=kept, directions=["minimize", "minimize"], load_if_exists=True)
    if _WORKLOAD not in study.user_attrs:
        if study.trials or ORDERS in study.user_attrs:
            what = "holds workers' orders" if ORDERS in study.user_attrs else "is not fettle's"
            raise UsageError(f"the study {name!r} in {hidden(url)} {what}: choose another `study`")
        study.set_user_attr(_WORKLOAD, fingerprint)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(["ms per sample", "relative error"])
    return study
