"""Snippets of a notebook against each other."""

import time
from types import SimpleNamespace

import pytest

import fettle
from fettle.errors import UsageError
from fettle.snippets import compare, snippets_of


def shell(**names):
    known = {}
    made = SimpleNamespace(
        user_ns=names,
        register_magic_function=lambda function, magic_kind, magic_name: known.update({magic_name: function}),
    )
    fettle.load_ipython_extension(made)
    return known["fettle"], names


def test_a_slower_snippet_is_told_with_its_interval_and_names_stay_as_they_were():
    magic, names = shell(sleep=time.sleep)
    found = magic("--seconds 1", "# long\nsleep(0.02)\n---\n# short\nleft = 1\nsleep(0.002)\n")
    long, short = found.rows
    assert (long.name, short.name) == ("long", "short")
    assert short.speedup.low > 1.5  # ten times, less what a loaded machine adds to either
    assert "left" not in names
    assert [line[3] for line in found.lines()] == ["as given", "faster"]
    assert "<td>short</td>" in found._repr_html_()
    assert "rounds in this process" in str(found)


def test_equals_are_not_told_apart():
    found = compare({"a": "sleep(0.001)", "b": "sleep(0.001)"}, {"sleep": time.sleep}, seconds=0.1)
    assert found.rounds >= 3
    assert found.lines()[1][3] in ("same", "cannot tell")


def test_names_and_bad_cells():
    assert list(snippets_of("x = 1\n----\nx = 1\n---\n# other\ny")) == ["x = 1", "x = 1'", "other"]
    for cell in ("x = 1", "x = 1\n---\n"):
        with pytest.raises(UsageError, match="two snippets"):
            snippets_of(cell)
    with pytest.raises(UsageError, match="'b' is not Python"):
        compare({"a": "1", "b": "1 +"}, {})


@pytest.mark.parametrize(
    ("line", "says"),
    [("--seconds x", "invalid float"), ("--seconds 0", "above 0"), ("--fast", "takes --seconds"), ("'", "quotation")],
)
def test_a_bad_option_is_one_line(line, says, capsys):
    assert shell()[0](line, "1\n---\n2") is None
    (said,) = capsys.readouterr().err.splitlines()
    assert says in said


@pytest.mark.parametrize(("snippet", "raises"), [("1 / 0", ZeroDivisionError), ("int('x')", ValueError)])
def test_what_a_snippet_raises_comes_through(snippet, raises):
    with pytest.raises(raises):
        shell()[0]("", f"{snippet}\n---\n2")


def test_what_a_snippet_left_to_several_gpus_is_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.synchronize", waited.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda gpu: 1)
    compare({"a": "1", "b": "1"}, {}, seconds=0.0)
    assert set(waited) == {0, 1}
