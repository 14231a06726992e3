"""The pages of the reference that are made from the code: every command, column and level is on them, and what fettle
writes as JSON is what its schema says."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from fettle.comparing import Comparison, comparison_json
from fettle.diagnose import Diagnosis, Finding, diagnosis_json
from fettle.doctor import CHECKS
from fettle.gate import Bisection, Gate, Judged, bisection_json, gate_json
from fettle.gate.bisecting import Step
from fettle.machine import this_machine
from fettle.measure import Interval, Trial
from fettle.recipe import Recipe
from fettle.report import to_json
from fettle.techniques import CATALOGUE
from fettle.trace.analyses.sql import TABLES
from tests.report.made_up import resnet

ROOT = Path(__file__).parent.parent


def _hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reference_{name}", ROOT / "docs" / "reference" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return _hook("pages")


def _written(run_fettle: Any) -> dict[str, Any]:
    """An output of each kind, as its command writes it."""
    trial, change, machine = Trial(Recipe({"precision": "bf16"}), "measured"), Interval(1.1, 1.0, 1.2), this_machine()
    return {
        "result": to_json(resnet()),
        "comparison": comparison_json(Comparison("net", "6c0f", machine, [trial], ["faster"])),
        "gate": gate_json(
            Gate("net", "old", "new", machine, [trial, trial], [Judged("time", change, 0.03, "worse")], [], 1)
        ),
        "bisection": bisection_json(
            Bisection("a", "b", 2, change, [Step("c", "c", None, "slow")], ["c"], "It is c.", "5%")
        ),
        "diagnosis": diagnosis_json(Diagnosis("net", [Finding("casts", "Casts.")], {"rest": 1.0}, 0.01)),
        "doctor": json.loads(run_fettle("doctor", "--json").out),
    }


def test_what_is_written_is_what_its_schema_says(
    pages: ModuleType, run_fettle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(CHECKS, "changed-files")  # reads every file of this environment, which takes seconds
    written = _written(run_fettle)
    assert {output.name for output in pages.outputs()} == set(written)
    for output in pages.outputs():
        made = pages.schema(output)
        jsonschema.Draft202012Validator.check_schema(made)
        jsonschema.validate(json.loads(json.dumps(written[output.name])), made)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**written[output.name], "more": 1}, made)


def test_every_command_and_option_is_on_the_page(pages: ModuleType) -> None:
    text = pages.cli()
    for path, command, _ in pages.commands():
        section = text.partition(f"\n## {path}\n")[2].partition("\n## ")[0]
        assert "```text" in section, path
        assert "```console\n$ " in section, path
        for param in command.params:
            if getattr(param, "hidden", False):  # an earlier spelling
                continue
            name = param.opts[0] if param.opts[0].startswith("-") else param.name.upper()
            assert name in section, f"{path} {name}"
    assert "[bold]" not in text


def test_every_level_is_on_the_page(pages: ModuleType) -> None:
    text = pages.techniques()
    for technique in CATALOGUE:
        section = text.partition(f"\n## {technique.name}\n")[2].partition("\n## ")[0]
        levels = technique.every_level()
        assert all(f"`{level}`" in section for level in levels) or (len(levels) > 20 and f"`{levels[-1]}`" in section)


def test_every_table_of_a_trace_has_its_columns(pages: ModuleType) -> None:
    text = pages.traces()
    for name in TABLES:
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert section.count("\n| `") >= 3, name


def test_every_field_of_the_json_has_words_where_its_class_has_some(pages: ModuleType) -> None:
    text = pages.json_page()
    assert "| `bound` | number or null | Time: the most that mending it could take off" in text
    assert "schemas/result.json" in text


def test_what_a_gpu_showed_is_on_the_page(tmp_path: Path) -> None:
    gpus = _hook("gpus").gpus
    text = gpus()
    assert "| `@attention=products` | 2.22 | 1.00 (1.00 to 1.00) | 11.44 |  |" in text
    assert "| torch.compile | `compile=default grad=inference_mode mode=eval` | 3.4 | 2.45 [1.92, 2.99] |" in text
    assert "| ViT-B, all tokens, bfloat16 | fused | 0.502 | 6 | 0.002 |" in text
    assert "No GPU has been at hand" in gpus(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "about.json").write_text('{"machine": "an A"}')
    (tmp_path / "a" / "digits.json").write_text('{"failure": "ended", "seconds": 1}')
    assert "## a\n\nan A.\n\n### digits\n\nIt failed." in gpus(tmp_path)


@pytest.mark.slow
def test_the_documentation_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "reference" / "schemas" / "result.json").exists()
