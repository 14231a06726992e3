"""Benchmarks run for minutes and not in the tests: here only, that what they import from fettle is there."""

import ast
import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "bench").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_a_benchmark_imports_is_there(script: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if node.level == 0 and str(node.module).split(".")[0] == "fettle":
            module = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names):
                assert hasattr(module, name) or importlib.import_module(f"{node.module}.{name}")
