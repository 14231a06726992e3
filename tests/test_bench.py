"""Benchmarks run for minutes and not in the tests: here only, that what they import from fettle is there."""

import ast
import importlib
from pathlib import Path

import pytest

from fettle.recipe import Recipe
from fettle.techniques import Facts

SCRIPTS = sorted((Path(__file__).parents[1] / "bench").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_a_benchmark_imports_is_there(script: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if node.level == 0 and str(node.module).split(".")[0] == "fettle":
            module = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names):
                assert hasattr(module, name) or importlib.import_module(f"{node.module}.{name}")


def test_a_peer_is_left_out_where_no_part_of_a_pipeline_can_have_what_it_names() -> None:
    """It would be the model as given under the peer's name."""
    from bench.tune_vs_peers import PEERS, _possible

    able = Facts(packages=dict.fromkeys(("onnxruntime", "onnx", "onnxscript"), "1"))
    asked = Recipe.parse(PEERS["ONNX Runtime"])
    assert _possible(asked, Facts(parts={"encoder": Facts()})) is None
    assert _possible(asked, Facts(parts={"encoder": Facts(), "decoder": able})) == Recipe(
        {"runtime[decoder]": "onnxruntime"}
    )
    assert _possible(Recipe.parse(PEERS["eager"]), Facts(parts={"encoder": Facts()})) == Recipe()
