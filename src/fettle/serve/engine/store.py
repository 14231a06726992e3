"""The store: a folder of packages, from which a running server may load models by their names."""

from __future__ import annotations

import logging
from pathlib import Path

from fettle.errors import UsageError
from fettle.package.manifest import MANIFEST, Package, check_name, open_package
from fettle.serve.engine.refusal import Rejected

log = logging.getLogger("fettle.serve")


def find_package(store: Path, name: str, number: str | None = None) -> Package:
    """The package of that name; the highest version where none is given. Raises `Rejected` (400, 404)."""
    try:
        check_name(name, number or "1")
    except UsageError as error:
        raise Rejected(400, str(error)) from None
    packages = [package for package in stored(store) if package.manifest.name == name]
    packages = [package for package in packages if number in (None, package.manifest.version)]
    if not packages:
        raise Rejected(404, f"the store has no model {name}" + (f" version {number}" if number else ""))
    return max(packages, key=lambda package: in_order(package.manifest.version))


def stored(store: Path) -> list[Package]:
    """The sound packages of a folder."""
    packages = []
    for path in sorted(store.iterdir()):
        if (path / MANIFEST).is_file() or path.suffix == ".zip":
            try:
                packages.append(open_package(path))
            except UsageError as error:
                log.warning("the store: %s", error)
    return packages


def in_order(version: str) -> tuple[tuple[int, int | str], ...]:
    """Versions in the order that people mean: 1.10 after 1.9."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in version.replace("-", ".").split("."))
