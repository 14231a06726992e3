"""The store: a folder of packages, from which a running server may load models by their names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from fettle.errors import UsageError
from fettle.package.manifest import MANIFEST, Manifest, Package, check_name, open_package, read_manifest
from fettle.serve.engine.refusal import Rejected

log = logging.getLogger("fettle.serve")


def find_package(store: Path, name: str, number: str | None = None) -> Package:
    """The package of that name; the highest sound version where none is given. Raises `Rejected` (400, 404).

    Of the others nothing is read but what they say they are: a store may hold hundreds of gigabytes.
    """
    try:
        check_name(name, number or "1")
    except UsageError as error:
        raise Rejected(400, str(error)) from None
    versions = [(said.version, path) for path, said in _stored(store) if said.name == name]
    for version, path in sorted(versions, key=lambda pair: in_order(pair[0]), reverse=True):
        if number in (None, version):
            try:
                return open_package(path)
            except UsageError as error:
                log.warning("the store: %s", error)
    raise Rejected(404, f"the store has no model {name}" + (f" version {number}" if number else ""))


def _stored(store: Path) -> Iterator[tuple[Path, Manifest]]:
    """The packages of a folder, and what they say they are."""
    for path in sorted(store.iterdir()):
        if (path / MANIFEST).is_file() or path.suffix == ".zip":
            try:
                yield path, read_manifest(path)
            except UsageError as error:
                log.warning("the store: %s", error)


def in_order(version: str) -> tuple[tuple[int, int | str], ...]:
    """Versions in the order that people mean: 1.10 after 1.9."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in version.replace("-", ".").split("."))
