"""What is imported is declared, and a command whose extra is missing names it in one line."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fettle.errors import extra

ROOT = Path(__file__).parents[1]
AT_ONCE = ("serve/", "load/client.py", "compat/ray.py", "package/attending.py")
"""What only those import who have asked for an extra."""
OTHERS = {"IPython", "tensorrt", "torch_tensorrt", "transformer_engine", "xformers"}
"""What is there already where it is used, in no index that pip knows, or built for one GPU's libraries."""
BARE = """
import sys
sys.modules["httptools"] = None
from fettle.cli import main
for words in ("load http://127.0.0.1:9/v2/models/m", "slo m-1 --p99 9ms", "run m-1"):
    sys.argv = ["fettle", "serve", *words.split()]
    try:
        main()
    except SystemExit as leaving:
        print(leaving.code)
"""


def _names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(one).name) for one in requirements}


def _imported(node: ast.AST, at_once: bool = True) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((one.name.partition(".")[0], at_once) for one in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield str(child.module).partition(".")[0], at_once
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from _imported(child, at_once and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always = _names(project["dependencies"])
    extras = set[str]().union(*map(_names, project["optional-dependencies"].values()))
    known, used = metadata.packages_distributions(), set()
    for path in (ROOT / "src" / "fettle").rglob("*.py"):
        place = path.relative_to(ROOT / "src" / "fettle").as_posix()
        for name, at_once in set(_imported(ast.parse(path.read_text()))) - {("fettle", True), ("fettle", False)}:
            if name not in sys.stdlib_module_names | OTHERS:
                found = set(map(canonicalize_name, known.get(name, [name])))
                allowed = always if at_once and not place.startswith(AT_ONCE) else always | extras
                assert found & allowed, f"{place} imports {name}"
                used |= found
    assert not always - used


def test_without_its_extra_a_command_names_it() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True)
    assert done.stdout.split() == ["2"] * 3, done.stderr
    assert done.stderr.splitlines() == [f"fettle: {extra('httptools is not installed', 'serve')}"] * 3
