"""The registry: which models and versions are served, and which version answers a request."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.package.host import cores
from fettle.package.manifest import MANIFEST, Package, check_name, check_trust, open_package, read_manifest
from fettle.package.requires import check_here
from fettle.package.settings import ServeSettings, settings_from
from fettle.procs.limits import affinity
from fettle.serve.engine.metrics import Metrics
from fettle.serve.engine.pool import Pool
from fettle.serve.engine.refusal import NO_MODEL, Refusal
from fettle.serve.engine.state_file import Remembered, StateFile
from fettle.serve.engine.worker_start import Spawned, cores_for
from fettle.units import count_text

log = logging.getLogger("fettle.serve")
DRAIN_S = 30.0
"""How long an unloaded version may take for what it has accepted."""


@dataclass
class Model:
    """All versions of one name, and how requests are divided among them."""

    versions: dict[str, Pool] = field(default_factory=dict)
    default: str = ""
    weights: dict[str, float] = field(default_factory=dict)
    """Share of the requests that name no version; empty: all to the default."""
    shadow: str = ""
    """A version that gets a copy of every request with tensors, and whose answers nobody sees."""


@dataclass(frozen=True)
class Options:
    """How a server starts its pools."""

    store: Path | None = None
    """The folder of packages from which models may be loaded by name. None: nothing can be loaded while running."""
    state: Path | None = None
    """Where to remember what is served, so that a restart serves the same."""
    trust: tuple[str, ...] = ()
    """Digests of handlers that may run."""
    device: str = ""
    """Stands above every package's ``devices``; several with commas between them."""
    explain: bool = False
    """Whether workers can explain: they load the model a second time."""
    spare: Spawned | None = None
    """A process that was started already, for the first worker that fits."""
    override: Mapping[str, Any] = field(default_factory=dict)
    """Settings that stand above every package's ``serve.toml``."""


class Registry:
    """The models of one server."""

    def __init__(self, metrics: Metrics, options: Options) -> None:
        self.metrics, self.options = metrics, options
        self.models: dict[str, Model] = {}
        self._unserved: dict[tuple[str, str], Pool] = {}
        """Versions that are being loaded or drained, or could not be loaded."""
        self.state = StateFile(options.state)
        self._lock = asyncio.Lock()
        self._later: set[asyncio.Task[Any]] = set()

    # -- loading -----------------------------------------------------------------------------------------------------

    async def load(self, package: Package, changed: Mapping[str, Any] | None = None) -> Pool:
        """Load, warm, and only then serve a package, with `changed` settings. The first version is the default.

        A version that is served already is replaced without a failed request: the new pool takes over when it is warm,
        and the old one finishes what it has. Raises `Refusal` where it cannot be loaded.
        """
        name, number = package.manifest.name, package.manifest.version
        try:
            check_here(name, package.manifest.requires)
            check_trust(package, self.options.trust)
        except UsageError as error:
            raise Refusal(400, str(error)) from None
        async with self._lock:
            settings = self._settings(package, changed)
            model = self.models.get(name) or Model()
            old = model.versions.get(number)
            pool = Pool(
                package, settings, self.metrics.of(name, number),
                cores=cores_for(settings.workers, settings.threads, sorted(affinity()), self._taken(apart=old)),
                trust=package.handler_digest or "",
                explain=self.options.explain, spare=self.options.spare,
            )  # fmt: skip
            self._unserved[name, number] = pool
            try:
                await pool.start(pool.workers)
            except Refusal as error:
                pool.state, pool.problem = "UNAVAILABLE", error.reason
                raise
            except BaseException:
                self._forget(pool)
                raise
            self._forget(pool)
            pool.state = "READY"
            model.versions[number] = pool
            model.default = model.default or number
            self.models[name] = model
            self.remember()
        if old is not None:
            await self._retire(old)
        return pool

    async def unload(self, name: str, number: str | None = None) -> None:
        """Stop serving a version, or the whole model: new requests are refused, accepted ones are answered."""
        async with self._lock:
            was_lost = self.state.forget(name, number)
            model = self.models.get(name, Model()) if was_lost else self._model(name)
            numbers = [number] if number else list(model.versions)
            old = [model.versions.pop(one) for one in numbers if one in model.versions]
            if not old and not was_lost:
                raise Refusal(404, f"the model {name} has no version {number}")
            for one in numbers:
                model.weights.pop(one, None)
                if model.shadow == one:
                    model.shadow = ""
                if model.default == one:
                    model.default = max(model.versions, key=in_order, default="")
            if not any(model.weights.values()):  # they were those of what is gone
                model.weights.clear()
            if not model.versions:
                self.models.pop(name, None)
            self.remember()
        await asyncio.gather(*(self._retire(version) for version in old))

    async def scale(self, name: str, number: str | None, workers: int) -> None:
        """Another number of workers for a version, the default one where none is named; returns when they are warm."""
        async with self._lock:
            settings, cores = self.share(name, number, workers)
            await self.find_version(name, number).scale(settings, cores)
            self.remember()

    def share(self, name: str, number: str | None, workers: int) -> tuple[ServeSettings, list[list[int]]]:
        """What so many workers of a version would be set to, and their cores. Raises `Refusal` for too many."""
        pool = self.find_version(name, number)
        taken, usable = self._taken(apart=pool), sorted(affinity())
        # Its own cores first: workers that stay where they are need not start again.
        free = [core for core in dict.fromkeys([*sorted(pool.cores), *usable]) if core not in taken]
        need, there = workers * (pool.settings.threads or 1), len(free) if usable else cores()
        if workers > pool.settings.workers and need > there:
            wanted = f"{count_text(workers, 'worker')} of {name} would need {count_text(need, 'core')}"
            raise Refusal(409, f"{wanted}, and there are {there} for it")
        settings = _with(pool.settings, {"workers": workers})
        return settings, cores_for(workers, settings.threads, free, ())

    async def load_named(self, name: str, number: str | None = None, changed: Mapping[str, Any] | None = None) -> Pool:
        """Load a package from the store by its name: never from a path or an address that a client gives."""
        if self.options.store is None:
            raise Refusal(403, "this server loads nothing while it runs: it has no store")
        # It reads every byte of it, while others are served.
        package = await asyncio.to_thread(find_package, self.options.store, name, number)
        return await self.load(package, changed)

    def change(self, name: str, wanted: Mapping[str, Any]) -> None:
        """Set a model's default, weights, shadow, or batching. Raises `Refusal` (400); then nothing has changed.

        A default without weights gets everything: who rolls back names one version.
        """
        model = self._model(name)
        unknown = set(wanted) - {"default", "weights", "shadow", "batch"}
        if unknown:
            raise Refusal(400, f"no such setting: {min(unknown)[:80]!r}")
        default, shadow = wanted.get("default", model.default), wanted.get("shadow", model.shadow)
        weights = wanted.get("weights", {} if "default" in wanted else model.weights)
        if not (isinstance(default, str) and isinstance(shadow, str)):
            raise Refusal(400, "default and shadow are versions, as text")
        named = [default, *([shadow] if shadow else [])]
        if not isinstance(weights, Mapping) or not all(
            isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
            for value in weights.values()
        ):
            raise Refusal(400, "weights are numbers by version")
        if weights and not sum(weights.values()) > 0:
            raise Refusal(400, "the weights add up to nothing")
        for number in [*named, *weights]:
            if number not in model.versions:
                raise Refusal(400, f"the model {name} has no version {str(number)[:80]!r}")
        served = model.versions.values() if "batch" in wanted else ()
        changed = [(version, _with_batching(version.settings, wanted["batch"])) for version in served]
        model.default, model.shadow, model.weights = default, shadow, dict(weights)
        for version, settings in changed:
            version.change(settings)
        self.remember()

    # -- choosing ----------------------------------------------------------------------------------------------------

    def choose(self, name: str, number: str | None = None, sticky: str = "") -> Pool:
        """The version that answers. `sticky` (a request or session id) always goes the same way among weights."""
        model = self.models.get(name) or self._model(name)  # which raises
        if number is None:
            number = model.default
            if model.weights:
                draw = random.Random(sticky).choices if sticky else random.choices
                number = draw(list(model.weights), list(model.weights.values()))[0]
        version = model.versions.get(number)
        if version is None:
            reason = f"the model {name} has no version {number[:80]}"
            raise Refusal(404, reason, param="model", code=NO_MODEL)
        return version

    def find_version(self, name: str, number: str | None) -> Pool:
        """The version of that number, the default one where none is named."""
        return self.choose(name, number or self._model(name).default)

    def shadow_of(self, name: str, chosen: Pool) -> Pool | None:
        """The version that gets a copy, if it is another one that takes the same inputs: a call is made of bytes, in
        which a copy of another type would take the place of somebody's request."""
        model = self.models.get(name)
        shadow = model.versions.get(model.shadow) if model is not None and model.shadow else None
        return shadow if shadow is not None and shadow is not chosen and shadow.specs == chosen.specs else None

    @property
    def ready(self) -> bool:
        """Whether every version of every model is ready, and there is one."""
        return bool(self.models) and all(
            version.ready for model in self.models.values() for version in model.versions.values()
        )

    def versions(self) -> list[tuple[str, str, Pool]]:
        """All that is served: name, version, and the version itself."""
        return [(name, number, v) for name, model in self.models.items() for number, v in model.versions.items()]

    def index(self) -> list[tuple[str, str, str, str]]:
        """Name, version, state and reason of what is served, what comes and goes, and what could not be loaded."""
        rows = []
        for name, number, version in self.versions():
            state = ("READY", "") if version.ready else ("UNAVAILABLE", "a worker is not ready")
            rows.append((name, number, *state))
        served = {row[:2] for row in rows}
        for key, version in self._unserved.items():
            if key not in served:
                rows.append((*key, version.state, version.problem if version.state == "UNAVAILABLE" else ""))
        return rows

    # -- restart -----------------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Write to the state file what is served."""
        served = {
            name: Remembered(
                {number: os.path.abspath(v.package.folder) for number, v in model.versions.items()},
                model.default, model.weights, model.shadow,
                {
                    number: changed
                    for number, v in model.versions.items()
                    if (changed := _changed(v.settings, self._settings(v.package)))
                },
            )
            for name, model in self.models.items()
        }  # fmt: skip
        self.state.write(served)

    # -- parts -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        await asyncio.gather(*(self._retire(version) for _, _, version in self.versions()))
        self.models.clear()

    async def _retire(self, version: Pool) -> None:
        key = (version.package.manifest.name, version.package.manifest.version)
        version.state = "UNLOADING"
        self._unserved.setdefault(key, version)  # another of that number may be on its way already
        await version.close(DRAIN_S)
        self._forget(version)
        if key not in {row[:2] for row in self.index()}:
            self.metrics.forget(*key)

    def _forget(self, version: Pool) -> None:
        key = (version.package.manifest.name, version.package.manifest.version)
        if self._unserved.get(key) is version:
            del self._unserved[key]

    def _model(self, name: str) -> Model:
        model = self.models.get(name)
        if model is None:
            raise Refusal(404, f"there is no model {name[:80]}", param="model", code=NO_MODEL)
        return model

    def _settings(self, package: Package, changed: Mapping[str, Any] | None = None) -> ServeSettings:
        wanted = {**self.options.override, **(changed or {})}
        if self.options.device:
            wanted["devices"] = self.options.device.split(",")
        settings = _with(package.settings, wanted)
        if settings.max_rows > package.manifest.max_rows:
            most = count_text(package.manifest.max_rows, "row")
            raise Refusal(400, f"{package.manifest.name} takes at most {most} a batch")
        return settings

    def _taken(self, apart: Pool | None) -> set[int]:
        """Cores that workers are bound to, apart from those of one version."""
        return {core for _, _, version in self.versions() if version is not apart for core in version.cores}

    def later(self, coroutine: Any) -> None:
        """Run something that no request waits for."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._later.add(task)
        task.add_done_callback(self._later.discard)


def find_package(store: Path, name: str, number: str | None = None) -> Package:
    """The package of that name in a folder of packages; the highest sound version where none is given. Raises
    `Refusal` (400, 404).

    Of the others nothing is read but what they say they are: a store may hold hundreds of gigabytes.
    """
    try:
        check_name(name, number or "1")
    except UsageError as error:
        raise Refusal(400, str(error)) from None
    found: list[tuple[str, Path]] = []
    for path in sorted(store.iterdir()):
        if (path / MANIFEST).is_file() or path.suffix == ".zip":
            try:
                said = read_manifest(path)
            except UsageError as error:
                log.warning("the store: %s", error)
                continue
            if said.name == name and number in (None, said.version):
                found.append((said.version, path))
    for _, path in sorted(found, key=lambda pair: in_order(pair[0]), reverse=True):
        try:
            return open_package(path)
        except UsageError as error:
            log.warning("the store: %s", error)
    raise Refusal(404, f"the store has no model {name}" + (f" version {number}" if number else ""))


def in_order(version: str) -> tuple[tuple[int, int | str], ...]:
    """Versions in the order that people mean: 1.10 after 1.9."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in version.replace("-", ".").split("."))


def _with_batching(settings: ServeSettings, wanted: Any) -> ServeSettings:
    allowed = {"max_rows", "delay_ms", "max_queue_rows", "timeout_ms", "limit_ms"}
    if not isinstance(wanted, Mapping) or set(wanted) - {*allowed, "policy", "pad"}:
        raise Refusal(400, f"batch may only hold {', '.join(sorted(allowed))}")
    changed = _with(settings, wanted)
    # Only batch sizes that were warmed: a larger one would compile while clients wait.
    if changed.max_rows > settings.max_rows:
        most = count_text(settings.max_rows, "row")
        raise Refusal(400, f"the model was warmed up for {most} at most: load it again for more")
    return changed


def _with(settings: ServeSettings, wanted: Mapping[str, Any]) -> ServeSettings:
    """Settings with others in their place. Raises `Refusal` (400) for what cannot be."""
    try:
        return settings_from({**msgspec.to_builtins(settings), **wanted}, "a change while serving")
    except ValueError as error:
        raise Refusal(400, str(error)[:200]) from None


def _changed(settings: ServeSettings, at_start: ServeSettings) -> dict[str, Any]:
    """What was set otherwise while running."""
    before = msgspec.to_builtins(at_start)
    return {key: value for key, value in msgspec.to_builtins(settings).items() if value != before[key]}
