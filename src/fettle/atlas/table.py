"""The table: one row a trial, with features of the model and the machine that it was measured on.

A file from outside is hostile: it is read by a process of its own with little memory, its columns must be the ones
below, and every value is checked against its type and bounds. Nothing in it is ever run.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import polars
from msgspec import Meta

from fettle.errors import UsageError, refusing
from fettle.estimates import Interval
from fettle.files import whole
from fettle.recipe import Recipe

if TYPE_CHECKING:
    from fettle.measure import Trial

MOST_BYTES = 64 << 20
MOST_ROWS = 50_000
_FARTHEST = 1e30

Text = Annotated[str, Meta(max_length=300)]
Number = Annotated[float, Meta(ge=0, le=_FARTHEST)] | None
"""What is not known is null, never zero."""
Share = Annotated[float, Meta(ge=0, le=1)] | None


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a machine: what all rows of one study share, and what a prediction goes by."""

    workload: Text
    """Name of the target, for people."""
    fingerprint: Text
    """Fingerprint of the weights and inputs, then ``-`` and a hash of the code where the study kept one (those of
    earlier versions of fettle lack it): rows with the same one are of one model."""
    family: Text
    """``transformer``, ``convolutional``, ``recurrent``, ...: as it was named, else guessed from the operators."""
    mode: Text
    device: Text
    dtype: Text
    parameters: Number = None
    parameter_bytes: Number = None
    samples: Number = None
    """Rows in one call."""
    flops: Number = None
    """FLOPs of one call."""
    bytes: Number = None
    """Read and written by the operators of one call, counted once each."""
    calls: Number = None
    """Operators in one call."""
    matrix: Share = None
    """Share of the time of a call that operators of this group take: products, convolutions and attention;"""
    pointwise: Share = None
    """element-wise work, norms, reductions;"""
    layout: Share = None
    """copies, layout changes and casts;"""
    index: Share = None
    """indexing, gathering, embedding."""
    convolution: Share = None
    """Share of the FLOPs in convolutions,"""
    attention: Share = None
    """in attention that is one operator,"""
    recurrent: Share = None
    """and share of the time in recurrent layers."""
    shapes: Text = ""
    """Largest outputs of the costliest products, ``8x64x56x56 8x1000``."""
    machine: Text
    """`fettle.machine.Machine.id`: rows with another are never pooled silently."""
    cpu: Text = ""
    gpu: Text = ""
    cores: Number = None
    vector: Text = ""
    """The widest vector instructions: ``avx2``, ``avx512f``, ``neon``, ``sve``."""
    matrix_units: Text = ""
    """``amx_bf16 amx_int8``, ``sm90``; empty where there are none."""
    peak_fp32: Number = None
    """FLOP/s of a large product, measured;"""
    peak_bf16: Number = None
    peak_copy: Number = None
    """bytes/s, read and written."""
    torch: Text = ""
    versions: Text = ""
    """Versions of the other packages that recipes go by: ``openvino=2026.4 torchao=0.18``."""


class Row(Subject, frozen=True, kw_only=True):
    """One trial."""

    recipe: Annotated[str, Meta(max_length=4_000)]
    """Of a pipeline it names each part."""
    status: typing.Literal["measured", "rejected", "failed"]
    reason: Text = ""
    speedup: Number = None
    """Over the workload as given, as all races of the study say together;"""
    low: Number = None
    high: Number = None
    """its interval, at 95%."""
    given_ms: Number = None
    """Time of a call of the workload as given."""
    error: Number = None
    peak_bytes: Number = None
    given_peak_bytes: Number = None
    start_s: Number = None
    """What one process took until it was ready to be timed,"""
    given_start_s: Number = None
    """and one of the workload as given."""
    rounds: Number = None
    quiet: bool = False
    """Whether the machine was."""

    @property
    def comparable(self) -> tuple[str, ...]:
        """What is the same where times may be set against each other: the model, its device, the machine and torch.

        A name is not the model: everybody's ``model.py`` is called ``model``."""
        return self.fingerprint, self.mode, self.device, self.machine, self.torch

    @property
    def key(self) -> tuple[str, ...]:
        """What is the same where a trial was made again: all that, and the recipe."""
        return *self.comparable, self.recipe

    @property
    def gain(self) -> float | None:
        """Log of the speed-up."""
        return math.log(self.speedup) if self.speedup else None


def _column(annotation: Any) -> Any:
    if annotation in (Number, Share):
        return polars.Float64
    return polars.Boolean if annotation is bool else polars.String


SCHEMA: dict[str, Any] = {
    name: _column(annotation) for name, annotation in typing.get_type_hints(Row, include_extras=True).items()
}
"""Type of each column, in their order."""


def weights_of(fingerprint: str) -> str:
    """The part of a model's fingerprint that earlier versions kept alone: its weights and inputs without its code."""
    return fingerprint.partition("-")[0]


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Both; where a trial was made again the later one."""
    by_key: dict[tuple[str, ...], Row] = {}
    for row in (*old, *new):
        by_key.pop(row.key, None)
        by_key.pop((weights_of(row.fingerprint), *row.key[1:]), None)
        by_key[row.key] = row
    return list(by_key.values())


def frame_of(rows: Sequence[Row]) -> polars.DataFrame:
    """The rows as a table."""
    return polars.DataFrame([msgspec.structs.asdict(row) for row in rows], schema=SCHEMA)


def write_atlas(rows: Sequence[Row], path: Path) -> None:
    """Write the table to `path`, whole or not at all, as Parquet. Raises `UsageError` where it cannot be written."""
    if len(rows) > MOST_ROWS:
        raise UsageError(
            f"an atlas has {MOST_ROWS:,} rows at most, and this would have {len(rows):,}: put the new ones into another"
        )
    with whole(path) as partial:
        frame_of(rows).write_parquet(partial)


def parse(path: Path) -> list[Row]:
    """The rows of a Parquet file, checked; for a process that may run out of memory (`reading`)."""
    with refusing(f"{path} is not a Parquet file:"):  # whatever a damaged file brings up in the reader
        file = polars.scan_parquet(path, glob=False)  # brackets and stars are of its name
        if wrong := _differing(dict(file.collect_schema())):
            raise UsageError(f"{path} is not an atlas of this version of fettle: {wrong}")
        rows = file.select(polars.len()).collect().item()
        if rows > MOST_ROWS:
            raise UsageError(f"{path} has {rows:,} rows; an atlas has {MOST_ROWS:,} at most")
        dicts = file.collect().to_dicts()
    return checked(dicts, str(path))


def _differing(schema: dict[str, Any]) -> str:
    """What is wrong with the columns of a file; empty where nothing is."""
    if not SCHEMA.keys() & schema.keys():
        return "it has none of its columns"
    for name in (*SCHEMA, *schema):
        if name not in schema:
            return f"it lacks the column {name!r}, as those of earlier versions do"
        if name not in SCHEMA:
            return f"a newer one may have written its column {str(name)[:40]!r}"
        if schema[name] != SCHEMA[name]:
            return f"its column {name!r} holds {schema[name]}, not {SCHEMA[name]}"
    return ""


def checked(rows: Sequence[dict[str, Any]], name: str) -> list[Row]:
    """Rows of a table, each value checked. Raises `UsageError` with the first that is wrong."""
    sound: list[Row] = []
    for number, row in enumerate(rows, 1):
        plain = {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
        try:
            sound.append(msgspec.convert(plain, Row))
            _sensible(sound[-1])
        except (msgspec.ValidationError, UsageError) as error:
            raise UsageError(f"{name}: row {number} is not a trial: {error}") from error
    return sound


def _sensible(row: Row) -> None:
    """Raise `UsageError` for what no measurement gives."""
    Recipe.parse(row.recipe)
    if row.speedup is not None and not 1e-6 < row.speedup < 1e6:
        raise UsageError(f"a speed-up of {row.speedup:g}")
    if row.speedup is not None and not (row.low or 0) <= row.speedup <= (math.inf if row.high is None else row.high):
        raise UsageError(f"a speed-up of {row.speedup:g} outside of its interval")


def rows_of(about: Subject, trials: Sequence[Trial]) -> list[Row]:
    """A row for each trial; none where the workload as given did not run, for then there is nothing to compare with.

    Speed-ups are those that the trials say, which should be what all races of the study say together.
    """
    baseline = next((trial for trial in trials if not trial.recipe.levels and trial.status != "failed"), None)
    if baseline is None:
        return []
    return [_row(about, trial, baseline) for trial in trials]


def _row(about: Subject, trial: Trial, baseline: Trial) -> Row:
    ratio = trial.speedup if trial.recipe.levels else Interval(1.0, 1.0, 1.0)
    low, estimate, high = _bounds(None if trial.status == "failed" else ratio)
    return Row(
        **msgspec.structs.asdict(about), recipe=str(trial.recipe), status=trial.status, reason=trial.reason[:300],
        speedup=estimate, low=low, high=high, given_ms=_number(baseline.time_ms), error=_number(trial.accuracy.error),
        peak_bytes=_number(trial.peak_bytes), given_peak_bytes=_number(baseline.peak_bytes),
        start_s=_number(trial.start_s), given_start_s=_number(baseline.start_s), rounds=float(trial.rounds),
        quiet=trial.is_quiet and baseline.is_quiet,
    )  # fmt: skip


def _bounds(ratio: Interval | None) -> tuple[float | None, float | None, float | None]:
    """Low, estimate and high as the table can hold them; an interval that is finite stays so, however wide."""
    if ratio is None or not 1e-6 < ratio.estimate < 1e6:
        return None, None, None
    high = max(ratio.high, ratio.estimate)
    high_or_none = min(high, _FARTHEST) if math.isfinite(high) else None
    return _number(min(ratio.low, ratio.estimate)), ratio.estimate, high_or_none


def _number(value: float | None) -> float | None:
    """As the table can hold it."""
    return float(value) if value is not None and 0 <= value <= _FARTHEST else None
