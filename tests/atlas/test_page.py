"""docs/atlas.md is what its command makes of the atlas, and the verdicts on the literature fall either way."""

import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fettle.atlas import Row, rows_of
from fettle.recipe import Recipe
from tests.atlas.made_up import about, trial

ROOT = Path(__file__).parents[2]
PAIR = ("channels_last=on", "precision=autocast-bf16")
CLAIM = "channels_last pays more with mixed precision"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        return importlib.import_module("atlas")
    finally:
        sys.path.remove(str(ROOT / "bench"))


def test_the_page_is_the_one_that_its_command_makes(maker: ModuleType, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(maker, "PAGE", tmp_path / "atlas.md")
    monkeypatch.setattr(sys, "argv", ["atlas.py", "--page"])
    maker.main()
    made = (tmp_path / "atlas.md").read_text()
    assert made == (ROOT / "docs" / "atlas.md").read_text(), "python bench/atlas.py --page"
    assert f"{len(maker.read_atlas(maker.ATLAS)):,} trials of" in made


def _rows(models: int, together: float) -> list[Row]:
    """Convolutional models on which each of the two is worth 1.2x, and both `together` (a log) more or less."""
    found = []
    for number in range(models):
        trials = [trial(Recipe(), 0.0)]
        trials += [trial(Recipe.parse(level), 0.2 + 0.01 * number) for level in PAIR]
        trials.append(trial(Recipe.parse(" ".join(PAIR)), 0.4 + 0.02 * number + together + 0.01 * (number % 2)))
        found += rows_of(about(f"net{number}", 1.0), trials)
    return found


@pytest.mark.parametrize(
    ("models", "together", "verdict"),
    [(5, 0.3, "**yes**: 1.3"), (5, -0.3, "**no, the contrary**: 0.7"), (5, 0.0, "**cannot tell**"),
     (2, 0.3, "**cannot be checked with these data**: 2 points; 1.36x on 2 models |"),
     (0, 0.3, f"**cannot be checked with these data**: 0 points; `{PAIR[0]}` with `{PAIR[1]}` ran 0 times |")],
)  # fmt: skip
def test_a_claim_has_the_verdict_that_its_trials_give(
    maker: ModuleType, models: int, together: float, verdict: str
) -> None:
    (line,) = [line for line in maker.claims(_rows(models, together)) if CLAIM in line]
    assert verdict in line


def test_a_fraction_in_which_no_two_differ_in_one_level_has_a_verdict_by_all_of_it(maker: ModuleType) -> None:
    levels = (*PAIR, "freeze=on", "threads=1", "compile=default")
    rows = []
    for number in range(4):
        trials = [trial(Recipe(), 0.0)]
        for on in itertools.product((0, 1), repeat=5):
            if sum(on) % 2 == 0 and any(on):
                text = " ".join(level for level, is_on in zip(levels, on, strict=True) if is_on)
                gain = 0.2 * on[0] + 0.3 * on[1] - 0.1 * on[3] + 0.4 * (on[0] and on[1])
                trials.append(trial(Recipe.parse(text), gain + 0.01 * ((3 * sum(on) + number + on[2]) % 3)))
        rows += rows_of(about(f"net{number}", 1.0), trials)
    (line,) = [line for line in maker.claims(rows) if CLAIM in line]
    assert "**yes**: 1.4" in line or "**yes**: 1.5" in line
    assert "on 4 models, by a fit to all their 64 trials" in line


def test_a_page_of_many_trials_does_not_say_that_they_are_few(maker: ModuleType, monkeypatch) -> None:
    rows = _rows(4, 0.3)
    assert "**These are few**" in maker.page(rows)
    monkeypatch.setattr(maker, "_MANY", len(rows))
    assert "**These are few**" not in maker.page(rows)
