"""Where what a search of an input pipeline has measured is kept by default, and of which version of the program."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from fettle.errors import is_program
from fettle.workload import find_target


def default_path(target: str) -> Path | None:
    """Beside the target's file, or in the current folder; None where nothing can be written there."""
    place, _, name = find_target(target).reference.rpartition(":")
    folder, stem = (Path(place).parent, Path(place).stem) if place.endswith(".py") else (Path(), place)
    return folder / f".{stem}-{name}.fettle-data" if os.access(folder, os.W_OK) else None


def content_hash(target: str) -> str:
    """Hash of the target's own file and of what it imports from files beside it, in this folder or in a package that is
    installed from its source, so that an edited program is measured anew; empty where there is none."""
    place = target.rpartition(":")[0]
    digest = hashlib.sha256()
    folders = [Path(place).parent, Path()] if place.endswith(".py") else [Path()]
    waiting = [Path(place)] if place.endswith(".py") else _files(place, folders)
    known: set[Path] = set()
    while waiting:
        path = waiting.pop().resolve()
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            if path in known:
                continue
            known.add(path)
            text = path.read_bytes()
            digest.update(text)
            waiting += [file for name in _imports(ast.parse(text)) for file in _files(name, [path.parent, *folders])]
    return digest.hexdigest()[:16] if known else ""


def _imports(tree: ast.AST) -> Iterator[str]:
    """Whatever is imported by name, in their order; of a relative import the part that follows its dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ([node.module] if node.module else [])
            yield from (".".join(filter(None, (node.module, item.name))) for item in node.names)


def _files(module: str, folders: Sequence[Path]) -> list[Path]:
    """The file of a module that lies in one of these folders, or else where the user's own source is installed from."""
    stem = module.replace(".", "/")
    return [path for folder in (*folders, *_sources(module.partition(".")[0]))
            for path in (folder / f"{stem}.py", folder / stem / "__init__.py") if path.is_file()][:1]  # fmt: skip


def _sources(package: str) -> list[Path]:
    """The folders that hold a package of the user's own, such as the ``src`` of a project. It is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    places = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
    return [Path(place).parent for place in places if is_program(place)]
