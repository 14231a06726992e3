"""What torch.compile did to a function: breaks, recompilations, specialised values, the limit."""

import logging
from pathlib import Path

import pytest
import torch

from fettle.diagnose import compile_health, watch_compile
from fettle.diagnose.collectors.compile_watch import is_compiled
from fettle.errors import UsageError

pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def line_of(text: str) -> int:
    """The number of the line in this file that ends in the comment."""
    return next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {text}"))


def breaks(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    print("here")  # the break
    return x * 2


def by_value(x: torch.Tensor) -> torch.Tensor:
    s = x.sum().item()  # the item
    return x * 2 if s > 0 else x * 3


def clean(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).relu()


def test_a_graph_break_has_its_line_and_reason() -> None:
    with watch_compile() as watch:
        torch.compile(breaks, backend="eager")(torch.ones(3))
    (found,) = watch.health().breaks
    assert (found.file, found.line, found.count) == (__file__, line_of("the break"), 1)
    assert "print" in found.reason
    assert found.hint


@pytest.mark.parametrize("how", ["all of it", "each logger"])
def test_a_program_that_has_switched_logging_off_is_seen_all_the_same(how: str) -> None:
    logger = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    try:
        logging.disable(logging.CRITICAL if how == "all of it" else logging.NOTSET)
        logger.disabled = how == "each logger"
        with watch_compile() as watch:
            torch.compile(breaks, backend="eager")(torch.ones(3))
        assert logger.disabled == (how == "each logger")
        assert not logger.isEnabledFor(logging.DEBUG)
    finally:
        logging.disable(logging.NOTSET)
        logger.disabled = False
    assert len(watch.health().breaks) == 1


def test_shapes_that_recompile_name_the_guard() -> None:
    compiled = torch.compile(clean, backend="eager", dynamic=False)
    with watch_compile() as watch:
        for size in (2, 3, 4):
            compiled(torch.ones(size))
    health = watch.health()
    (found,) = health.recompiles
    assert (found.kind, found.count, found.function) == ("shape", 2, "clean")
    assert "size mismatch at index 0" in found.guard
    assert health.compilations == 3
    assert not health.limits


def test_item_specialises_and_hits_the_limit() -> None:
    compiled = torch.compile(by_value, backend="eager", dynamic=False)
    with watch_compile() as watch:
        for value in range(12):
            compiled(torch.full((2,), float(value + 1)))
    health = watch.health()
    (special,) = health.specialised
    assert special.from_item
    assert (special.file, special.line) == (__file__, line_of("the item"))
    assert len(special.values) == 8 or len(special.values) == 7
    (limit,) = health.limits
    assert limit.limit == 8
    assert limit.file == __file__
    assert [one.kind for one in health.recompiles] == ["value"]


def test_clean_code_is_healthy_and_the_loggers_are_put_back() -> None:
    logger = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with watch_compile() as watch:
        torch.compile(clean, backend="eager")(torch.ones(3))
    health = watch.health()
    assert health.healthy
    assert (health.graphs, health.compilations) == (1, 1)
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_a_workload_in_a_process_of_its_own(tmp_path: Path) -> None:
    target = tmp_path / "work.py"
    target.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        x = x + 1\n"
        "        print('hello')\n"
        "        return x * 2\n"
        "def workload():\n"
        "    return Net(), [torch.ones(n, 3) for n in (2, 3, 4)]\n"
    )
    health = compile_health(f"{target}:workload", backend="eager", dynamic=False)
    assert {(one.file, one.line) for one in health.breaks} == {(str(target), 5)}
    assert {one.kind for one in health.recompiles} == {"shape"}
    assert health.calls == 9
    assert health.steady_recompiles == 0
    assert health.first_call_s > 0


def test_a_model_that_fails_is_told_in_one_line(tmp_path: Path) -> None:
    target = tmp_path / "work.py"
    target.write_text(
        "import torch\n"
        "def model(x):\n    raise ValueError('no such thing')\n"
        "def workload():\n    return model, [torch.ones(2)]\n"
    )
    health = compile_health(f"{target}:workload", backend="eager")
    assert any("no such thing" in line for line in health.errors)
    assert not health.healthy


def test_a_factory_that_fails_is_a_usage_error(tmp_path: Path) -> None:
    target = tmp_path / "work.py"
    target.write_text("def workload():\n    return 3\n")
    with pytest.raises(UsageError, match="returned an int"):
        compile_health(f"{target}:workload", backend="eager")


class Part(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Disabled(Part):
    forward = torch.compiler.disable(Part.forward)


def test_a_model_is_compiled_in_place_in_a_part_or_by_its_forward_too() -> None:
    given, in_place, by_forward = Part(), Part(), Part()
    in_place.compile(backend="eager")
    by_forward.forward = torch.compile(by_forward.forward, backend="eager")
    assert not is_compiled(given)
    assert not is_compiled(Disabled())
    assert is_compiled(torch.compile(given, backend="eager"))
    assert is_compiled(in_place)
    assert is_compiled(by_forward)
    assert is_compiled(torch.nn.Sequential(given, torch.compile(Part(), backend="eager")))
    assert is_compiled(torch.compile(clean, backend="eager"))
    assert not is_compiled(clean)


def test_of_a_pipeline_each_part_is_compiled(tmp_path: Path) -> None:
    target = tmp_path / "work.py"
    target.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        print('hello')\n"
        "        return x * 2\n"
        "def workload():\n"
        "    model = torch.nn.ModuleDict({'one': Net(), 'two': torch.nn.Linear(3, 3)})\n"
        "    call = lambda model, x: model['two'](model['one'](x))\n"
        "    return {'model': model, 'inputs': [torch.ones(2, 3)], 'call': call, 'parts': ['one', 'two']}\n"
    )
    health = compile_health(f"{target}:workload", backend="eager", rounds=1)
    assert health.errors == ()
    assert {(one.file, one.line) for one in health.breaks} == {(str(target), 4)}
    assert health.graphs >= 2
