"""A study that somebody else made: a CSV file with one row an experiment. It is hostile until parsed."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, dropwhile
from pathlib import Path

from fettle.errors import UsageError
from fettle.files import read_text
from fettle.studies.table import Experiment, Response, Table

MOST_BYTES = 32 << 20
"""Half of it took 2 GB of memory."""
MOST_COLUMNS = 1_000
MOST_LEVELS = 12
"""Levels from which a column of numbers that nobody named a factor is taken for something measured."""
MOST_NAMED_LEVELS = 60
MOST_EFFECTS = 5_000
"""Levels and pairs of levels that are told apart. Each is a column of the model."""
MOST_GROUPS = 500
"""Each is a part of the page, with pictures of its own."""
_PLAIN = ("as given", "none", "false", "no", "off", "0", "baseline", "default", "float32", "fp32", "torch.float32", "")
"""Levels that usually stand for nothing done, the likeliest first."""
_LARGER = re.compile(
    r"throughput|/s\b|per.second|speed.?up|\bfps\b|accuracy|\bmiou\b|samples_s|tokens_s", re.IGNORECASE
)
_COMMA = re.compile(r"[-+]?[0-9.]*[0-9],[0-9][0-9.,]*")

Row = Mapping[str, str]


def read_csv(
    path: Path, *, response: Sequence[str] = (), factors: Sequence[str] = (), group_by: Sequence[str] = ()
) -> Table:
    """The table in a CSV file with a header.

    `response` are the columns that came out: ``time_ms``, or ``throughput:larger`` and ``time:smaller`` where the name
    does not say which is better. `factors` are the columns that were set, ``compile`` or ``compile=False`` with the
    level that stands for how it was given; without any, all that vary within a group and look like settings. Rows are
    analysed apart by the columns of `group_by`. Raises `UsageError` with one line for a file that is not such a table.
    """
    rows = _rows(path)
    columns = list(rows[0])
    named_responses = [_response(text, columns) for text in _names(response, columns)]
    responses = tuple({one.name: one for one in named_responses}.values())
    if not responses:
        raise UsageError(f"`response`: say which column came out; there are {_some(columns)}")
    group_by = _names(group_by, columns)
    for name in group_by:
        _known(name, columns, "group_by")
    named = dict(_factor(text, columns) for text in _names(factors, columns))
    taken = {*group_by, *(one.name for one in responses)}
    if both := taken & named.keys():
        raise UsageError(f"`factors`: {sorted(both)[0]} is a response or a group already")
    groups = [" ".join(row[name] for name in group_by) for row in rows]
    if (count := len(set(groups))) > MOST_GROUPS:
        raise UsageError(f"`group_by`: no more than {MOST_GROUPS} groups are analysed, and these are {count:,}")
    names = list(named) or [name for name in columns if name not in taken and _is_setting(name, rows, groups)]
    if not names:
        raise UsageError("no column looks like a setting that was varied: name them, `factors`")
    levels = {name: _levels(name, rows, named.get(name)) for name in names}
    _check_effects(levels)
    experiments = tuple(
        Experiment(
            levels={name: row[name] for name in names},
            values={one.name: _response_value(row, one.name) for one in responses},
            group=group,
        )
        for row, group in zip(rows, groups, strict=True)
    )
    chosen = [] if named else ["factors, as no others were named: " + ", ".join(names)]
    table = Table(levels, responses, experiments)
    return replace(table, notes=(*chosen, *_oddities(rows, table)))


def _check_effects(levels: Mapping[str, Sequence[str]]) -> None:
    several = [len(known) - 1 for known in levels.values()]
    count = sum(several) + sum(one * two for one, two in combinations(several, 2))
    if count > MOST_EFFECTS:
        raise UsageError(
            f"the levels of {len(levels)} factors and their pairs are {count:,} effects, and no more than "
            f"{MOST_EFFECTS:,} are told apart: name fewer columns, `factors`"
        )


def _oddities(rows: Sequence[Row], table: Table) -> Iterator[str]:
    """Notes on empty cells, missing responses and repeated rows. Raises `UsageError` where a response has no number."""
    for name, known in table.factors.items():
        if empty := sum(not row[name] for row in rows):
            given = "" if known[0] else ", and as the one as given"
            yield f"{empty} of {len(rows)} rows have nothing in {name!r}: that counts as a level of its own{given}"
    for one in table.responses:
        lost = sum(experiment.value(one.name) is None for experiment in table.experiments)
        if lost == len(rows):
            raise UsageError(f"the column {one.name!r} has no positive number")
        if lost:
            yield f"{lost} of {len(rows)} rows have no positive number in {one.name!r}: they stay missing"
    if copies := len(rows) - len({tuple(row.values()) for row in rows}):
        yield (
            f"{copies} of {len(rows)} rows are copies of others, in every column. They count as repeats: where they "
            "are none, the intervals are too narrow"
        )


def read_ladder(path: Path) -> dict[str, float]:
    """A ladder that somebody published: by step, how many times faster than its first one, which is as given.

    The CSV file has a column ``step`` and one other, of which the name says whether larger is better. Raises
    `UsageError` with one line for any other file.
    """
    rows = _rows(path)
    others = [name for name in rows[0] if name != "step"]
    if len(others) != 1 or "step" not in rows[0]:
        raise UsageError(f"{path}: a published ladder has two columns, step and what came out, such as throughput")
    response, ratios = _response(others[0], others), dict[str, float]()
    first = _number(rows[0][response.name])
    for row in rows:
        ratio = _number(row[response.name]) / first if first > 0 else math.nan
        if not (ratio > 0 and math.isfinite(ratio)) or row["step"] in ratios:
            raise UsageError(f"{path}: each step needs one row with a positive number: look at {row['step']!r}")
        ratios[row["step"]] = ratio if response.larger_is_better else 1 / ratio
    return ratios


def _names(texts: Sequence[str], columns: Sequence[str]) -> list[str]:
    """``a,b`` as two, unless a column has that name."""
    return [name.strip() for text in texts for name in ([text] if text in columns else text.split(",")) if name.strip()]


def _rows(path: Path) -> list[Row]:
    text = read_text(path, MOST_BYTES)
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    delimiter = next((sign for sign in ";\t" if sign in first and "," not in first), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        lines = [(reader.line_num, line) for line in reader if line]
    except csv.Error as error:
        raise UsageError(f"{path} is not a CSV file: {error}") from error
    lines = list(dropwhile(lambda item: item[1][0].startswith("#"), lines))  # comments on where the table comes from
    if len(lines) < 2:
        raise UsageError(f"{path} has no rows below a header")
    header = [name.strip() for name in lines[0][1]]
    if len(header) > MOST_COLUMNS:
        raise UsageError(f"{path} has {len(header)} columns, which is not a table of experiments")
    if len(set(header)) < len(header) or "" in header:
        raise UsageError(f"{path}: a column has no name, or two have the same")
    for number, line in lines[1:]:
        if len(line) != len(header):
            raise UsageError(f"{path}: line {number} has {len(line)} cells, the header {len(header)}")
    return [dict(zip(header, (cell.strip() for cell in line), strict=True)) for _, line in lines[1:]]


def _response(text: str, columns: Sequence[str]) -> Response:
    name, colon, better = text.rpartition(":")
    if not colon or better not in ("larger", "smaller") or text in columns:
        name, better = text, ""
    _known(name, columns, "response")
    larger = better == "larger" or (not better and bool(_LARGER.search(name)))
    return Response(name, larger)


def _factor(text: str, columns: Sequence[str]) -> tuple[str, str | None]:
    name, equals, level = text.rpartition("=")
    if not equals or text in columns:
        name, level = text, ""
    _known(name, columns, "factors")
    return name, level if equals and text not in columns else None


def _known(name: str, columns: Sequence[str], option: str) -> None:
    if name not in columns:
        raise UsageError(f"`{option}`: there is no column {name!r}; there are {_some(columns)}")


def _some(columns: Sequence[str]) -> str:
    return ", ".join(columns[:12]) + (f" and {len(columns) - 12} more" if len(columns) > 12 else "")


def _is_setting(name: str, rows: Sequence[Row], groups: Sequence[str]) -> bool:
    """Whether it varies within a group, in few levels; a number that takes another value in most rows was measured."""
    levels: dict[str, set[str]] = {}
    for row, group in zip(rows, groups, strict=True):
        levels.setdefault(group, set()).add(row[name])
    count = len(set().union(*levels.values()))
    return max(map(len, levels.values())) > 1 and count <= min(MOST_LEVELS, max(2, len(rows) // 4))


def _levels(name: str, rows: Sequence[Row], default: str | None) -> tuple[str, ...]:
    """The levels, the default first, numbers in their order."""
    values = {row[name] for row in rows}
    if len(values) > MOST_NAMED_LEVELS:
        raise UsageError(f"`factors`: {name} has {len(values)} levels: it looks measured, not set")
    if default is not None and default not in values:
        raise UsageError(f"`factors`: no row has {name}={default}")
    if default is None:
        usual = [level for word in _PLAIN for level in values if level.lower() == word]
        default = usual[0] if usual else min(values, key=_order)
    return (default, *sorted(values - {default}, key=_order))


def _order(level: str) -> tuple[bool, float, str]:
    number = _number(level)
    return math.isnan(number), 0.0 if math.isnan(number) else number, level


def _response_value(row: Row, name: str) -> float:
    if _COMMA.fullmatch(row[name]):
        raise UsageError(f"{name}: is {row[name]!r} a fraction or thousands? Write a decimal point and no other marks")
    return _number(row[name])


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
