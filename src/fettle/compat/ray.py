"""A package as a Ray Serve application: each replica holds the registry, batcher and workers of `fettle serve`.

Ray brings machines, replicas and their number; what a request sees is the same code as on one machine. The files that
use this module are written by `fettle serve export ray`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve

from fettle.errors import UsageError
from fettle.package.manifest import open_package
from fettle.serve.engine.metrics import Metrics
from fettle.serve.engine.refusal import Refusal
from fettle.serve.engine.registry import Options, Registry
from fettle.serve.http import App
from fettle.serve.http.asgi import Asgi

_apps: list[App] = []
"""The applications of this replica's process: filled by the replica, read by `_asgi` right after."""


def _asgi() -> Asgi:
    """The face of this process's replica."""
    return Asgi(_apps[-1])


class Replica:
    """One replica: a registry with one package, behind the protocols of `fettle serve`.

    It asks for the token in ``FETTLE_TOKEN`` where that is set.
    """

    async def __init__(self, package: str, threads: int = 0, trust: str = "", device: str = "cpu") -> None:  # type: ignore[misc]
        opened = open_package(Path(package))
        override = {"threads": threads} if threads else {}
        options = Options(trust=(trust,) if trust else (), device=device, override=override)
        self.name = opened.manifest.name
        self.registry = Registry(Metrics([opened.settings.limit_ms / 1e3]), options)
        try:
            await self.registry.load(opened)
        except Refusal as error:
            raise UsageError(f"{self.name} cannot be served: {error.reason}") from error
        _apps.append(App(self.registry, token=os.environ.get("FETTLE_TOKEN", "")))

    async def reconfigure(self, batch: Mapping[str, Any]) -> None:
        """Take other batching settings while running: what ``user_config`` holds."""
        if batch:
            self.registry.change(self.name, {"batch": dict(batch)})

    async def check_health(self) -> None:
        """Raise where no worker is ready: Ray replaces a replica that says so several times in a row."""
        if not any(worker.ready for _, _, pool in self.registry.versions() for worker in pool.workers):
            raise RuntimeError(f"{self.name} is not served")

    async def __del__(self) -> None:
        registry = getattr(self, "registry", None)
        if registry is not None:
            await registry.close()


def application(args: Mapping[str, Any], **deployment: Any) -> Any:
    """The Ray Serve application of a package: `args` of the written ``serve.yaml``, and options of the deployment."""
    known = {"package", "threads", "trust", "device"}
    if "package" not in args or set(args) - known:
        raise UsageError(f"the application takes {', '.join(sorted(known))}, and package must be there")
    name = open_package(Path(str(args["package"]))).manifest.name
    made: Any = serve.deployment(name=name, **deployment)(serve.ingress(_asgi)(Replica))
    return made.bind(**args)
