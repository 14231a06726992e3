"""The files of an image: Containerfile, lock, entry point, compose and Kubernetes."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from fettle.container.lock import OWN, closure, locks, torch_index
from fettle.errors import UsageError
from fettle.files import write_text
from fettle.kept_files import whole_folder
from fettle.machine import this_machine
from fettle.package.manifest import check_apart, check_place, check_trust, open_package
from fettle.recipe import Recipe
from fettle.recipe_file import load_recipe
from fettle.techniques import Facts, changed

_LIBRARIES = {"jemalloc": ("libjemalloc2", "libjemalloc.so.2"),
              "tcmalloc": ("libtcmalloc-minimal4", "libtcmalloc_minimal.so.4")}  # fmt: skip
"""Debian's packages of allocators, and their files."""
_USER = 10001

_ENTRY = """#!/bin/sh
# As many threads as the quota has cores, unless the recipe or the caller says how many.
set -eu
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc)
    if [ -r /sys/fs/cgroup/cpu.max ]; then
        read -r quota period < /sys/fs/cgroup/cpu.max
        if [ "$quota" != max ] && [ $(((quota + period - 1) / period)) -lt "$cores" ]; then
            cores=$(((quota + period - 1) / period))
        fi
    fi
    export OMP_NUM_THREADS="$cores"
fi
exec "$@"
"""


@dataclass(frozen=True)
class Image:
    """What an image is made of."""

    name: str
    levels: Mapping[str, str]
    """The recipe."""
    python: str
    versions: Mapping[str, str]
    """Distributions."""
    serves: bool
    """A package behind HTTP; else an environment with the recipe in it."""
    wheel: str = ""
    """File name of fettle's own wheel, where it is not from an index."""
    files: tuple[str, ...] = ()
    """What was written."""
    gpus: int = 0
    """NVIDIA's, that it serves on."""
    trust: str = ""
    """SHA-256 of the package's own ``handler.py``, which the image lets run."""

    @property
    def locks(self) -> list[str]:
        """What pip installs from, in this order."""
        return [*(["torch.lock"] if torch_index(self.versions.get("torch", "")) else []), "requirements.lock"]

    @property
    def debian(self) -> list[str]:
        """Packages of the system: an allocator, and a compiler where something is compiled."""
        preloaded = self.variables.get("LD_PRELOAD", "")
        libraries = [package for package, file in _LIBRARIES.values() if file == preloaded]
        compiles = any(level in technique.compiles for technique, level in changed(Recipe(self.levels)))
        return [*libraries, *(["g++"] if compiles else [])]

    @property
    def variables(self) -> dict[str, str]:
        """The environment that the recipe's processes had."""
        values = {"HOME": "/cache", "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor",
                  "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TRITON_CACHE_DIR": "/cache/triton"}  # fmt: skip
        # Libraries by their names: the loader knows its architecture's folder.
        recipe, facts = Recipe(self.levels), Facts(libraries={name: file for name, (_, file) in _LIBRARIES.items()})
        for technique, level in changed(recipe):
            # Threads of ranks are theirs only where it is known how many there are: torchrun is told that.
            if not technique.of_module and not technique.uses_ranks(level):
                values |= technique.code(level, recipe, facts).environment
        return values


def write_image(source: Path, output: Path, wheel: Path | None = None, trust: str = "") -> Image:
    """Write an image's files into `output`, for a package of `fettle serve package` or a ``recipe.toml``.

    It must be called in the environment that the study was measured in: `UsageError` where a version differs from what
    the recipe or the package says, and where fettle was installed from a folder and no `wheel` of it is given. The
    image of a package with a ``handler.py`` lets that run: `trust` must be its SHA-256.
    """
    if wheel is not None and not (wheel.is_file() and wheel.name.startswith("torch_fettle-")):
        raise UsageError(f"`wheel`: {wheel} is not a wheel of fettle: build one with pip wheel --no-deps")
    serves = source.is_dir() or source.suffix == ".zip"
    if serves:
        package, place = open_package(source), output / "model"
        check_place(place)
        check_apart(package, output)
        check_trust(package, [trust])
        levels, recorded, name = dict(package.manifest.recipe), dict(package.manifest.machine), package.manifest.name
        needs = list(package.manifest.requires)
        gpus = gpus_of(package.settings.devices) if "cuda" in recorded else 0
    else:
        recipe = load_recipe(source)
        if trust:
            raise UsageError(f"`trust` is for the handler.py of a package, and {source} is a recipe")
        levels, recorded = dict(recipe.levels), dict(recipe.machine.get("versions", {}))
        name, needs, gpus = str(recipe.workload.get("name") or "recipe"), [], 0
    extras = "[serve]" if serves else ""
    versions = closure([OWN + extras, *dict.fromkeys([*needs, *_libraries(levels, recorded)])])
    _check(versions, recorded)
    if wheel is None and '"dir_info"' in (metadata.distribution(OWN).read_text("direct_url.json") or ""):
        raise UsageError(
            "fettle was installed from a folder: build its wheel there, `pip wheel --no-deps -w dist .`, and name it, "
            "`wheel='dist/...whl'`"
        )
    image = Image(
        _slug(name), levels, platform.python_version(), versions, serves, wheel.name if wheel else "", gpus=gpus,
        trust=trust,
    )  # fmt: skip
    carried = ["entrypoint.sh", "model" if serves else "recipe.toml", *image.locks, *([wheel.name] if wheel else [])]
    texts = {
        **locks(versions, wheel), "Containerfile": containerfile(image), "entrypoint.sh": _ENTRY,
        "compose.yaml": compose(image), "kubernetes.yaml": kubernetes(image),
        ".containerignore": "*\n" + "".join(f"!{name}\n" for name in carried),
    }  # fmt: skip
    for file, text in texts.items():
        write_text(output / file, text)
    if serves:
        if place.resolve() != package.folder.resolve():
            with whole_folder(place) as made:
                shutil.copytree(package.folder, made, dirs_exist_ok=True)
    else:
        _copy(source, output / "recipe.toml")
    if wheel is not None:
        _copy(wheel, output / wheel.name)
    return replace(image, files=tuple(sorted(texts)))


def _copy(file: Path, place: Path) -> None:
    if file.resolve() != place.resolve():
        shutil.copyfile(file, place)


def containerfile(image: Image) -> str:
    """The Containerfile (docker and podman)."""
    apt = ""
    if image.debian:
        apt = f"""# hadolint ignore=DL3008
RUN apt-get update \\
    && apt-get install -y --no-install-recommends {" ".join(image.debian)} \\
    && rm -rf /var/lib/apt/lists/*
"""
    variables = " \\\n    ".join(f'{name}="{value}"' for name, value in sorted(image.variables.items()))
    probe = (
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/v2/health/ready', timeout=3)"
        if image.serves
        else "import fettle, torch"
    )
    trusting = f', "--trust", "{image.trust}"' if image.trust else ""
    command = (
        'EXPOSE 8080\nCMD ["fettle", "serve", "run", "/app/model", "--host", "0.0.0.0", "--port", "8080", "--insecure"'
        f"{trusting}]"
        if image.serves
        else '# Your program: COPY it, and apply the recipe with fettle.apply(model, "/app/recipe.toml", batches).\n'
        'CMD ["fettle", "techniques"]'
    )
    return f"""# Written by fettle container: what {image.name} was measured with. Build: podman build -t {image.name} .
FROM docker.io/library/python:{image.python}-slim
{apt}WORKDIR /app
COPY {" ".join([*image.locks, *([image.wheel] if image.wheel else [])])} ./
RUN {" && ".join(f"pip install --no-cache-dir --require-hashes --no-deps -r {name}" for name in image.locks)}
RUN mkdir -p /cache && chown {_USER}:{_USER} /cache
ENV {variables}
# What is wrong with the environment stops the build.
RUN fettle doctor --fail-on error
COPY --chmod=755 entrypoint.sh ./
COPY --chmod=755 {"model ./model" if image.serves else "recipe.toml ./"}
USER {_USER}:{_USER}
VOLUME /cache
HEALTHCHECK --interval=30s --timeout=10s --start-period=180s CMD ["python", "-c", "{probe}"]
ENTRYPOINT ["/app/entrypoint.sh"]
{command}
"""


def gpus_of(devices: Sequence[str]) -> int:
    """How many GPUs must be there for all of these names of devices: `cuda:1` is the second."""
    names = [device.partition(":") for device in devices]
    return max((int(index or 0) + 1 for kind, _, index in names if kind == "cuda"), default=0)


def compose(image: Image) -> str:
    """A compose file: the cache is a volume, what is compiled outlives the container."""
    ports = "    ports: ['127.0.0.1:8080:8080']  # without a token: not for other machines\n" if image.serves else ""
    devices = "[{driver: nvidia, count: all, capabilities: [gpu]}]"
    gpus = f"    deploy: {{resources: {{reservations: {{devices: {devices}}}}}}}\n" if image.gpus else ""
    return f"""services:
  "{image.name}":
    build: {{context: ., dockerfile: Containerfile}}
    image: "{image.name}"
{ports}{gpus}    volumes: ['cache:/cache']
    read_only: true
    tmpfs: [/tmp]
    shm_size: 1gb
    stop_grace_period: 60s
    cap_drop: [ALL]
    security_opt: ['no-new-privileges:true']
volumes:
  cache: {{}}
"""


def kubernetes(image: Image) -> str:
    """A Deployment with its volume, and a Service where the image serves."""
    port = "          ports: [{containerPort: 8080}]\n" if image.serves else ""
    gpu = f", nvidia.com/gpu: {image.gpus}" if image.gpus else ""
    probes = """          readinessProbe: {httpGet: {path: /v2/health/ready, port: 8080}, periodSeconds: 5}
          livenessProbe: {httpGet: {path: /v2/health/live, port: 8080}, periodSeconds: 15}
          startupProbe: {httpGet: {path: /v2/health/ready, port: 8080}, failureThreshold: 60, periodSeconds: 5}
""" if image.serves else ""  # fmt: skip
    service = f"""---
apiVersion: v1
kind: Service
metadata: {{name: "{image.name}"}}
spec:
  selector: {{app: "{image.name}"}}
  ports: [{{port: 8080, targetPort: 8080}}]
""" if image.serves else ""  # fmt: skip
    return f"""apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {image.name}-cache}}
spec:
  accessModes: [ReadWriteOnce]
  resources: {{requests: {{storage: 5Gi}}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: "{image.name}"}}
spec:
  replicas: 1
  strategy: {{type: Recreate}}  # the volume is of one node at a time
  selector: {{matchLabels: {{app: "{image.name}"}}}}
  template:
    metadata: {{labels: {{app: "{image.name}"}}}}
    spec:
      terminationGracePeriodSeconds: 60
      securityContext:
        runAsNonRoot: true
        runAsUser: {_USER}
        fsGroup: {_USER}
        seccompProfile: {{type: RuntimeDefault}}
      containers:
        - name: "{image.name}"
          image: "{image.name}"
{port}          resources: {{requests: {{cpu: "2", memory: 4Gi}}, limits: {{cpu: "2", memory: 4Gi{gpu}}}}}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {{drop: [ALL]}}
{probes}          volumeMounts: [{{name: cache, mountPath: /cache}}, {{name: tmp, mountPath: /tmp}}]
      volumes:
        - {{name: cache, persistentVolumeClaim: {{claimName: {image.name}-cache}}}}
        - {{name: tmp, emptyDir: {{}}}}
{service}"""


def _libraries(levels: Mapping[str, str], recorded: Mapping[str, str]) -> list[str]:
    """Distributions that the recipe's levels need, of those that their techniques look for and that are here, or were
    where it was measured."""
    installed = {str(dist.metadata["Name"]).lower().replace("_", "-") for dist in metadata.distributions()}
    packages = [name for technique, level in changed(Recipe(levels)) for name in technique.packages_of(level)]
    return [name for name in dict.fromkeys(packages) if name in recorded or name.replace("_", "-") in installed]


def _check(versions: Mapping[str, str], expected: Mapping[str, str]) -> None:
    named = this_machine().versions  # torch names itself more exactly than its distribution does: 2.13.0+cu130
    for name, version in expected.items():
        here = named.get(name, versions.get(name, version))
        if name in versions and name != OWN and re.match(r"\d", version) and here != version:
            raise UsageError(
                f"it was measured with {name} {version}, and {here} is installed here: run this where it was measured"
            )


def _slug(name: str) -> str:
    """A name as Kubernetes takes it: that of a Service begins with a letter."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return slug if slug[:1].isalpha() else f"model-{slug}".strip("-")
