"""The distributions of this environment that fettle and a recipe need, as locks with hashes."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from fettle.errors import UsageError

OWN = "torch-fettle"
_TORCH_INDEX = "https://download.pytorch.org/whl"
_TIMEOUT_S = 600


def closure(roots: Iterable[str]) -> dict[str, str]:
    """Versions here of these requirements and all that they need, by canonical name. Those that are not installed are
    left out, but for the roots themselves and what their extras are: `UsageError`."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(Requirement(root), True) for root in roots]
    while queue:
        wanted, is_root = queue.pop()
        name = canonicalize_name(wanted.name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            if is_root:
                raise UsageError(f"{wanted.name} is not installed here, and the image needs it") from error
            continue
        versions[name] = distribution.version
        for extra in ["", *wanted.extras]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in distribution.requires or ():
                try:
                    needed = Requirement(text)
                except InvalidRequirement:  # an old package's: pip would not install it either
                    continue
                # without an extra a marker that names one is false; with one those without any are known already
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    queue.append((needed, is_root and bool(extra)))
    return dict(sorted(versions.items()))


def torch_index(version: str) -> str:
    """Where a build of torch comes from: empty for the package index that pip knows."""
    label = version.partition("+")[2]
    return f"{_TORCH_INDEX}/{label}" if label else ""


def locks(versions: Mapping[str, str], wheel: Path | None) -> dict[str, str]:
    """``requirements.lock``: each distribution with its version and the hashes of what pip would install of it here;
    and ``torch.lock`` before it, for a build of torch that has an index of its own. pip never looks in both for one
    name, so that neither can put its own package in place of the other's.

    fettle itself is the `wheel`, which lies beside them. pip is asked, which asks the package index: `UsageError` where
    that has no such version for this machine, or cannot be reached.
    """
    index = torch_index(versions.get("torch", ""))
    of_build = [name for name, version in versions.items() if index and torch_index(version) == index]
    rest = [name for name in versions if name not in of_build and (name != OWN or wheel is None)]
    texts = {}
    if of_build:
        texts["torch.lock"] = "\n".join([f"--index-url {index}", *_pinned(of_build, versions, index)]) + "\n"
    lines = _pinned(rest, versions, "")
    if wheel is not None and OWN in versions:
        lines.append(f"./{wheel.name} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    return {**texts, "requirements.lock": "\n".join(lines) + "\n"}


def _pinned(names: Sequence[str], versions: Mapping[str, str], index: str) -> list[str]:
    """A line for each: its version, and its hashes in this index, or in the one that pip knows."""
    entries = _report([f"{name}=={versions[name]}" for name in names], index)
    hashes = {str(canonicalize_name(item["metadata"]["name"])): _hashes(item) for item in entries}
    for name in names:
        if not hashes.get(name):
            raise UsageError(f"pip gives no hash for {name}=={versions[name]}: it is not from a package index")
    return [
        " ".join([f"{name}=={versions[name]}", *(f"--hash=sha256:{one}" for one in hashes[name])]) for name in names
    ]


def _hashes(item: Mapping[str, Any]) -> list[str]:
    archive = item.get("download_info", {}).get("archive_info", {})
    digest = archive.get("hashes", {}).get("sha256") or archive.get("hash", "").partition("sha256=")[2]
    return [digest] if re.fullmatch(r"[0-9a-f]{64}", digest or "") else []


def _report(requirements: Sequence[str], index: str) -> list[Mapping[str, Any]]:
    """What pip would install for these: the entries of its installation report."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text("\n".join(requirements) + "\n")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet",
                   "--disable-pip-version-check", "--only-binary=:all:", "--report", "-", "-r", str(wanted),
                   *(["--index-url", index] if index else [])]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise UsageError("pip did not answer: is the package index reachable?") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it failed"]
        errors = [line for line in said if line.startswith("ERROR")]
        raise UsageError(f"pip cannot resolve the image's requirements: {(errors or said)[-1]}")
    entries: list[Mapping[str, Any]] = json.loads(done.stdout)["install"]
    return entries
