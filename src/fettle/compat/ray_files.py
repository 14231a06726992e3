"""The files of a Ray Serve application: settings that make Ray fast and closed, and the package's own tuning.

Ray's defaults: 254 requests/s of a tiny model on two cores, 2254 with the two settings of ``env.sh``; 5 requests in a
replica at a time, which caps every batch; no limit on what waits; no authentication.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fettle.errors import UsageError
from fettle.package.host import host_id
from fettle.package.manifest import Package, check_apart, check_trust
from fettle.package.settings import ServeSettings
from fettle.serve.engine.worker_start import threads_each
from fettle.slo.simulate import Costs, capacity

ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_AUTH_MODE": "token",
}
"""For every process of the cluster: set before ``ray start``."""
APP = '''"""Made by fettle serve export ray: the application of the package beside this file."""

from fettle.compat.ray import application


def build(args):
    return application(args)
'''
START = """#!/bin/sh
# Starts Ray on this machine and serves. On further machines: . ./env.sh; ray start --address HEAD:6379
# With HA_PROXY the replicas listen on every interface of the machine, whatever http_options says: keep the cluster
# behind a firewall, and set FETTLE_TOKEN in serve.yaml so that each request must bring it.
set -eu
cd "$(dirname "$0")"
. ./env.sh
command -v ray > /dev/null || { echo "ray is not installed here: pip install 'ray[serve]>=2.46'" >&2; exit 2; }
ray get-auth-token --generate > /dev/null
ray start --head --dashboard-host 127.0.0.1
exec serve run serve.yaml
"""


@dataclass(frozen=True)
class Scale:
    """How many requests one replica should have at a time, and where that is from."""

    target: float
    why: str


def scale(settings: ServeSettings, machine: str) -> Scale:
    """Requests in a replica at its best rate within the limit: Little's law, rate times time.

    From the package's measured curve and limit; without them half of what a replica may have.
    """
    curve = settings.cost_curve(machine)
    if curve is None or not settings.limit_ms:
        why = "no curve of this machine with a limit: run fettle serve slo, and export again"
        return Scale(max(1.0, most_ongoing(settings) / 2), why)
    costs = Costs({rows: (seconds,) for rows, seconds in zip(curve.rows, curve.seconds, strict=True)})
    rate, simulated = capacity(settings, costs, settings.limit_ms / 1e3)
    if simulated is None:
        return Scale(1.0, f"one request alone takes longer than {settings.limit_ms:g} ms")
    wait = float(simulated.latency_s.mean())
    return Scale(max(1.0, rate * wait), f"{rate:.4g} requests/s x {wait * 1e3:.3g} ms within {settings.limit_ms:g} ms")


def most_ongoing(settings: ServeSettings) -> int:
    """Requests that Ray may give a replica: enough to fill a batch while another is computed."""
    return max(2 * settings.max_rows * settings.workers, 16)


def write_ray(package: Package, folder: Path, *, max_replicas: int = 4, trust: str = "", device: str = "cpu") -> Scale:
    """Write application, settings, start script and package to a new folder. Raises `UsageError`."""
    if folder.exists():
        raise UsageError(f"{folder} exists already: give another `output`")
    check_apart(package, folder)
    check_trust(package, [trust])
    settings = package.settings
    scaling = scale(settings, host_id())
    threads = threads_each(settings.threads, settings.workers)
    name = package.manifest.name
    args: dict[str, Any] = {"package": str((folder / "package").resolve()), "threads": threads}
    args |= {"trust": trust} if trust else {}
    args |= {"device": device} if device != "cpu" else {}
    actor: dict[str, Any] = {"num_cpus": threads * settings.workers}
    actor |= {"num_gpus": 1} if device != "cpu" else {}
    knobs = ("max_rows", "delay_ms", "timeout_ms", "limit_ms")
    deployment = {
        "name": name,
        "max_ongoing_requests": most_ongoing(settings),
        "max_queued_requests": settings.max_queue_rows,
        "autoscaling_config": {
            "min_replicas": 1,
            "max_replicas": max_replicas,
            "target_ongoing_requests": round(scaling.target, 2),
        },
        "graceful_shutdown_timeout_s": 40,
        "health_check_timeout_s": 30,
        "ray_actor_options": actor,
        "user_config": {knob: getattr(settings, knob) for knob in knobs},
    }
    application = {
        "name": name,
        "route_prefix": "/",
        "import_path": "app:build",
        "args": args,
        "runtime_env": {"env_vars": {"FETTLE_TOKEN": ""}},
        "deployments": [deployment],
    }
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [application],
    }
    lines = [
        f"# {name} {package.manifest.version} on Ray Serve, made by fettle serve export ray.",
        "# args.package is a path on every machine of the cluster: copy this folder to the same place, or share it.",
        f"# target_ongoing_requests: {scaling.why}.",
        json.dumps(config, indent=2),  # which is YAML
    ]
    folder.mkdir(parents=True)
    shutil.copytree(package.folder, folder / "package")
    (folder / "app.py").write_text(APP)
    (folder / "serve.yaml").write_text("\n".join(lines) + "\n")
    (folder / "env.sh").write_text("".join(f"export {key}={value}\n" for key, value in ENVIRONMENT.items()))
    (folder / "start.sh").write_text(START)
    (folder / "start.sh").chmod(0o755)
    return scaling
