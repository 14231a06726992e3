"""The shell that all pages share, and the blocks that they are built of."""

import re
from pathlib import Path

import jinja2
import pytest

from fettle.page import Cell, Figure, Table, clean, shell, still

HOUSE = Path(shell.__file__).parents[1]
BAR = {"mark": "bar", "data": {"values": [{"a": 1}]}, "encoding": {"x": {"field": "a", "type": "quantitative"}},
       "width": "container"}  # fmt: skip
HOSTILE = "<script>alert(1)</script>"


def html_of(call: str, **context: object) -> str:
    """What a macro of the blocks makes."""
    loader = jinja2.PackageLoader("fettle.page", ".")
    made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return made.from_string('{% import "blocks.html.j2" as page %}{{ page.' + call + " }}").render(**context)


def test_a_page_without_figures_runs_no_script_and_one_with_them_brings_all_it_needs() -> None:
    bare = shell.render("fettle.parallel", "plan.html.j2", HOSTILE, made={}, drawn=still("", lambda narrow: BAR))
    assert "script-src" not in bare
    assert "<script" not in bare
    assert bare.count("<svg") == 4  # wide and narrow, light and dark
    drawn = shell.draw(BAR, "html").decode()
    assert "script-src 'unsafe-inline' 'unsafe-eval'" in drawn
    assert 'id="chart-one"' in drawn
    assert "<script src" not in drawn


def test_the_charts_scripts_are_joined_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_joined", lambda: "joined")
    for folder, kept in ((tmp_path, 1), (tmp_path / "file", 0)):
        monkeypatch.setenv("FETTLE_CACHE", str(folder))
        assert shell.bundle() == "joined"
        assert len(list(folder.glob("fettle/pages/vega-*.js"))) == kept
        (tmp_path / "file").touch()
    monkeypatch.setenv("FETTLE_CACHE", str(tmp_path))
    monkeypatch.setattr(shell, "_joined", lambda: "once more")
    assert shell.bundle() == "joined"


def test_a_table_escapes_its_cells_aligns_numbers_and_says_what_it_leaves_out() -> None:
    table = Table(
        ("where", "bytes"),
        [[Cell(HOSTILE, notes=[HOSTILE], stack=[HOSTILE]), "12"], [Cell("ok", tag="winner", bar=50.0), "3"]],
        numbers=("bytes",),
        more=4,
        kinds=("failed", ""),
    )
    made = html_of("table(t)", t=table)
    assert HOSTILE not in made
    assert made.count("&lt;script&gt;") == 3
    assert '<th class="n">bytes</th>' in made
    assert '<td class="n">12</td>' in made
    assert '<tr class="failed">' in made
    assert 'style="width:50.0%"' in made
    assert "4 more rows" in made
    assert html_of("table(t)", t=Table(("a",), [])) == ""


def test_rows_that_name_their_columns_make_a_table() -> None:
    table = Table.of([{"where": Cell("a"), "bytes": "1"}, {"where": Cell("b"), "bytes": "2"}], ["where"])
    assert (table.columns, table.numbers) == (["where", "bytes"], ["bytes"])
    assert table.rows == [[Cell("a"), "1"], [Cell("b"), "2"]]
    assert Table.of([], []).rows == []


def test_a_figure_has_its_words_and_a_list_without_lines_no_heading() -> None:
    figure = {"figure": Figure("one", "A title", HOSTILE, BAR), "svg": ""}
    made = html_of("figure(f)", f=figure)
    assert HOSTILE not in made
    assert "A title" in made
    assert html_of("listed('Why', [])").strip() == ""
    assert "<code>ddp</code>: no memory" in html_of(
        "listed('Why', lines)", lines=[Cell("ddp", code=True, rest=": no memory")]
    )


@pytest.mark.parametrize("path", sorted(HOUSE.rglob("*.html.j2")), ids=lambda path: str(path.relative_to(HOUSE)))
def test_every_page_uses_the_shell(path: Path) -> None:
    text = path.read_text()
    if path.name not in ("shell.html.j2", "blocks.html.j2"):
        assert text.startswith('{% extends "shell.html.j2" %}')
        assert "<style" not in text
        assert "<table" not in text


def test_no_module_writes_a_page_by_hand() -> None:
    """Save the server's list of endpoints, which is not a report."""
    by_hand = [path.name for path in HOUSE.rglob("*.py") if re.search("<!doctype|<html|<style", path.read_text(), re.I)]
    assert by_hand == ["openapi.py"]


def test_what_is_cleaned_keeps_its_types() -> None:
    assert clean((("a\x1b", [1]), {"b": ("\x00",)})) == (("a\ufffd", [1]), {"b": ("\ufffd",)})
