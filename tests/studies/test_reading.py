"""A table from outside is hostile until parsed: one clear line for what is wrong."""

import pytest

from fettle.errors import UsageError
from fettle.studies import analyse
from fettle.studies.output import write_table
from fettle.studies.reading import read_csv
from fettle.studies.table import Experiment, Response, Table

CUBE = """# Source: made up
model,eval,autocast-dtype,batch,params,throughput (it/s),first-batch (ms)
small,False,float32,1,10,100,311
small,True,float32,1,10,101,212
small,False,float16,1,10,150,313
small,True,float16,1,10,152,414
small,False,float32,16,10,300,115
small,True,float32,16,10,305,116
small,False,float16,16,10,460,217
small,True,float16,16,10,,118
large,False,float32,1,99,10,919
large,True,float32,1,99,12,920
large,False,float16,1,99,15,721
large,True,float16,1,99,15,722
"""


def read(tmp_path, text=CUBE, **options):
    path = tmp_path / "cube.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_csv(path, **{"response": ["throughput (it/s)"], "group_by": ["model"], **options})


def test_factors_are_found_and_what_was_given_comes_first(tmp_path):
    made = read(tmp_path)
    assert made.factors == {"eval": ("False", "True"), "autocast-dtype": ("float32", "float16"), "batch": ("1", "16")}
    assert made.responses[0].larger_is_better
    assert made.groups == ["small", "large"]
    assert any("1 of 12 rows have no positive number" in note for note in made.notes)
    assert made.experiments[7].value("throughput (it/s)") is None
    assert made.label(made.experiments[7]) == "eval=True autocast-dtype=float16 batch=16"


def test_an_empty_cell_of_a_factor_is_told_and_stands_for_what_was_given_only_where_nothing_else_does(tmp_path):
    text = "a,b,ms\n" + "".join(f"{a},{b},{ms}\n" for a in ("", "off", "on") for b in ("", "fast") for ms in (1, 2))
    made = read(tmp_path, text, response=["ms"], group_by=[])
    assert made.factors == {"a": ("off", "", "on"), "b": ("", "fast")}
    assert "4 of 12 rows have nothing in 'a': that counts as a level of its own" in made.notes
    assert "6 of 12 rows have nothing in 'b': that counts as a level of its own, and as the one as given" in made.notes


def test_factors_can_be_named_with_what_was_given(tmp_path):
    made = read(tmp_path, factors=["eval=True,batch"], response=["throughput (it/s):smaller", "first-batch (ms)"])
    assert made.factors == {"eval": ("True", "False"), "batch": ("1", "16")}
    assert [response.larger_is_better for response in made.responses] == [False, False]


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (CUBE, {"response": []}, "`response`: say which column came out; there are model, eval"),
        (CUBE, {"response": ["time"]}, "`response`: there is no column 'time'"),
        (CUBE, {"response": ["model"], "group_by": []}, "the column 'model' has no positive number"),
        (CUBE, {"group_by": ["arch"]}, "`group_by`: there is no column 'arch'"),
        (CUBE, {"factors": ["evil"]}, "`factors`: there is no column 'evil'"),
        (CUBE, {"factors": ["eval=maybe"]}, "`factors`: no row has eval=maybe"),
        (CUBE, {"factors": ["model"]}, "`factors`: model is a response or a group already"),
        ("", {}, "has no rows below a header"),
        ("a,b\n", {}, "has no rows below a header"),
        ("a,a\n1,2\n", {}, "a column has no name, or two have the same"),
        ("a,\n1,2\n", {}, "a column has no name, or two have the same"),
        ("a,b\n1,2\n3\n", {}, "line 3 has 1 cells, the header 2"),
        ("# x\n\na,b\n1,2\n3\n", {}, "line 5 has 1 cells, the header 2"),
        ("a;y\non;3,5\noff;2,5\n", {"response": ["y"], "group_by": []}, "y: is '3,5' a fraction or thousands?"),
        ('a,y\non,"1,234"\noff,"2,5"\n', {"response": ["y"], "group_by": []}, "y: is '1,234' a fraction or thousands?"),
        (b"\xff\xfe\x00", {}, "is not text in UTF-8"),
        ('a,b\n"1\n' + "x" * 200_000 + '",2\n', {}, "is not a CSV file"),
        ("a\n1\n2\n", {"response": ["a"], "group_by": []}, "no column looks like a setting that was varied"),
        ("a,y\n" + "".join(f"{n},1\n" for n in range(80)), {"response": ["y"], "group_by": [], "factors": ["a"]},
         "a has 80 levels: it looks measured, not set"),
        (f"{','.join(f'f{n}' for n in range(100))},y\n" + "".join(f"{f'{n},' * 100}{n + 1}\n" for n in (0, 1)),
         {"response": ["y"], "group_by": []},
         "the levels of 100 factors and their pairs are 5,050 effects, and no more than 5,000 are told apart"),
        ("a,run,y\n" + "".join(f"{n % 2},{n // 2},1\n" for n in range(1002)), {"response": ["y"], "group_by": ["run"]},
         "`group_by`: no more than 500 groups are analysed, and these are 501"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_said_in_one_line(tmp_path, text, options, says):
    with pytest.raises(UsageError) as raised:
        read(tmp_path, text, **options)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("sign", [";", "\t"])
def test_other_separators_are_read(tmp_path, sign):
    made = read(tmp_path, CUBE.replace(",", sign))
    assert made.factors == read(tmp_path).factors
    assert made.experiments == read(tmp_path).experiments


def test_copied_rows_are_told_and_a_response_counts_once(tmp_path):
    head, *rows = CUBE.splitlines()[1:]
    made = read(tmp_path, "\n".join([head, *rows, rows[0]]), response=["throughput (it/s)", "throughput (it/s):larger"])
    assert any("1 of 13 rows are copies of others" in note for note in made.notes)
    assert len(made.responses) == 1


def test_columns_of_ours_do_not_overwrite_a_factor_of_that_name(tmp_path):
    text = "model,group,reason\n" + "".join(f"{model},{group},{1 + group}\n" for model in "ab" for group in (0, 1))
    made = read(tmp_path, text, response=["reason"], group_by=["model"])
    write_table(made, tmp_path / "out.csv")
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[:2] == ["group_,group,reason,reason_", 'a,0,1.0,""']


def test_what_came_out_does_not_overwrite_a_factor_of_that_name(tmp_path):
    """An argument of a factory may be called `error`."""
    made = Table({"error": ("a", "b")}, (Response("error"),), (Experiment({"error": "b"}, {"error": 0.5}),))
    write_table(made, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().splitlines() == ["group,error,error_,reason", '"",b,0.5,""']


def test_a_level_that_one_model_never_had_is_said(tmp_path):
    times = {"fp32": 10, "bf16": 5, "fp16": 2.5}
    rows = [f"{model},{precision},{time * (1 + 0.001 * number)}" for model in "ab" for precision, time in times.items()
            for number in range(4) if (model, precision) != ("b", "fp32")]  # fmt: skip
    a, b = analyse(read(tmp_path, "\n".join(["model,precision,ms", *rows]), response=["ms"], group_by=["model"]))
    assert not any("was not measured" in doubt.text for doubt in a.checks.doubts)
    assert b.checks.doubts[0].text == (
        "precision=fp32 was not measured here: effects of precision are over precision=bf16"
    )


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*absent\.csv: No such file"):
        read_csv(tmp_path / "absent.csv", response=["y"])


def test_numbers_that_have_no_logarithm_are_missing(tmp_path):
    text = "a,y\n" + "".join(
        f"{'on' if n % 2 else 'off'},{value}\n" for n, value in enumerate(["0", "-1", "nan", "inf", "2", "3"])
    )
    made = read(tmp_path, text, response=["y"], group_by=[])
    assert [row.value("y") for row in made.experiments] == [None, None, None, None, 2.0, 3.0]
