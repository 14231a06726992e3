"""The study: all trials of one workload, kept in an Optuna storage as they become known.

Each trial is one Optuna trial: its parameters are the levels, its two objectives time and error, and the whole of it
is the user attribute ``fettle``. So a killed study goes on where it stopped, several machines can share one storage,
and optuna-dashboard opens it. Reading a study parses JSON and never runs code.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import warnings
from pathlib import Path
from typing import Any

import msgspec
import optuna
from optuna.trial import TrialState, create_trial

from fettle.errors import UsageError, first_line
from fettle.measure import Trial
from fettle.techniques import Facts, factors, known_levels

_WORKLOAD, _TRIAL, _MACHINE, _CODE = "fettle:workload", "fettle", "fettle:machine", "fettle:code"


class Study:
    """One study, open for reading and writing."""

    def __init__(self, study: optuna.Study, machine_id: str) -> None:
        self._study = study
        self._machine_id = machine_id

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
            raise UsageError(
                f"the study {name!r} in {_hidden(storage)} is of another workload (its weights, inputs or code differ)"
                ": choose another `study` or `output`"
            )
        mark = hashlib.sha256(f"{fingerprint} {structure}".encode()).hexdigest()[:8]
        study = cls._open(f"{name}-{mark}", storage, fingerprint, machine_id)
        study._is_of(fingerprint, structure)
        return study

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
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            study = optuna.create_study(
                study_name=name, storage=storage, directions=["minimize", "minimize"], load_if_exists=True
            )
            owner = study.user_attrs.get(_WORKLOAD)
            if owner is None:
                if study.trials:
                    raise UsageError(
                        f"the study {name!r} in {_hidden(storage)} is not fettle's: choose another `study`"
                    )
                study.set_user_attr(_WORKLOAD, fingerprint)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                    study.set_metric_names(["ms per sample", "relative error"])
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"cannot open the storage {_hidden(storage)}: {first_line(error)[:200]}") from error
        return cls(study, machine_id)

    @property
    def name(self) -> str:
        """The study's name."""
        return self._study.study_name

    @property
    def fingerprint(self) -> str:
        """That of the workload."""
        return str(self._study.user_attrs.get(_WORKLOAD, ""))

    def trials(self) -> list[Trial]:
        """The trials measured on this machine, oldest first."""
        found = []
        for trial in self._study.get_trials(deepcopy=False):
            text = trial.user_attrs.get(_TRIAL)
            if not isinstance(text, str) or trial.user_attrs.get(_MACHINE) != self._machine_id:
                continue
            try:
                found.append(Trial.from_json(json.loads(text)))
            except (ValueError, KeyError, msgspec.ValidationError) as error:
                raise UsageError(f"trial {trial.number} of the study cannot be read: {first_line(error)}") from error
        return found

    def add(self, trial: Trial, facts: Facts = Facts()) -> None:  # noqa: B008
        """Keep a finished trial: its parameters are what a recipe may set on such a workload."""
        params: dict[str, Any] = {}
        distributions: dict[str, optuna.distributions.BaseDistribution] = {}
        known = known_levels()  # the same on every machine: a storage is shared, and Optuna's choices are fixed
        for name, technique, _ in factors(facts):
            if facts.mode in technique.modes:
                params[name] = trial.recipe.levels.get(name, technique.default)
                distributions[name] = optuna.distributions.CategoricalDistribution(known[technique.name])
        failed = trial.status == "failed" or math.isnan(trial.time_ms)
        error = trial.accuracy.error
        kept = create_trial(
            state=TrialState.FAIL if failed else TrialState.COMPLETE,
            values=None if failed else [trial.time_ms / trial.samples, error if math.isfinite(error) else 1e9],
            params=params,
            distributions=distributions,
            user_attrs={
                _TRIAL: json.dumps(trial.to_json()),
                _MACHINE: self._machine_id,
                "recipe": str(trial.recipe),
                "status": trial.status,
                "reason": trial.reason,
            },
            # Optuna's own mark for a trial that breaks a constraint: positive means infeasible.
            system_attrs={"constraints": [1.0 if trial.status == "rejected" else 0.0]},
        )
        if kept.datetime_complete and math.isfinite(trial.seconds):  # a timeline without this has points, not bars
            kept.datetime_start = kept.datetime_complete - datetime.timedelta(seconds=trial.seconds)
        self._study.add_trial(kept)

    def note(self, key: str) -> Any:
        """A fact about the study as a whole on this machine, or None."""
        return self._study.user_attrs.get(f"fettle:{key}:{self._machine_id}")

    def set_note(self, key: str, value: Any) -> None:
        """Keep a fact about the study as a whole on this machine; plain JSON data."""
        self._study.set_user_attr(f"fettle:{key}:{self._machine_id}", value)


def storage_url(storage: str | None, folder: Path) -> str:
    """The Optuna storage: as given, or a SQLite file ``study.db`` in `folder`."""
    if storage:
        return storage if "://" in storage else f"sqlite:///{Path(storage).resolve()}"
    return f"sqlite:///{(folder / 'study.db').resolve()}"


def _hidden(url: str) -> str:
    """A storage URL without its password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}***@{rest.rpartition('@')[2]}" if "@" in rest else url
