"""Estimated SM efficiency and occupancy: every number by hand."""

import json
from pathlib import Path

import pytest

from fettle.trace import kernels_by_sm, sm_efficiency
from tests.conftest import Run
from tests.trace.build import Build, training


def launched(blocks: float, occupancy: float) -> dict[str, float]:
    return {"blocks per SM": blocks, "est. achieved occupancy %": occupancy}


def build() -> Build:
    """Two steps of 100 us: two small kernels of which one runs beside the other, one that fills the device, and one
    whose blocks the profiler did not know."""
    made = Build().step(1, 1000, 100).step(2, 1100, 100)
    made.kernel("small", 1010, 40, **launched(0.5, 25)).kernel("beside", 1030, 20, stream=8, **launched(0.25, 50))
    return made.kernel("large", 1120, 60, **launched(3, 100)).kernel("unknown", 1190, 5, **launched(-1, 0))


def test_kernels_that_run_together_fill_the_device_together(tmp_path: Path) -> None:
    (row,) = sm_efficiency(build().load(tmp_path)).to_dicts()
    assert (row["device"], row["kernel_share"]) == (0, 0.5)
    assert row["sm_share"] == pytest.approx((20 * 0.5 + 20 * 0.75 + 60) / 200)
    assert row["occupancy_share"] == pytest.approx((40 * 0.25 + 20 * 0.5 + 60) / 120)


def test_what_leaves_most_unused_comes_first(tmp_path: Path) -> None:
    table = kernels_by_sm(build().load(tmp_path))
    assert table["name"].to_list() == ["small", "beside", "large"]
    assert table["unused_ns"].to_list() == [20_000, 15_000, 0]
    assert table["sm_share"].to_list() == [0.5, 0.25, 1]
    assert table["blocks_per_sm"].to_list() == [0.5, 0.25, 3]


def test_the_command(tmp_path: Path, run_fettle: Run) -> None:
    path = build().write(tmp_path / "t.json.gz")
    told = json.loads(run_fettle("trace", "occupancy", path, "--json").out)
    assert [row["name"] for row in told["kernels"]] == ["small", "beside", "large"]
    assert run_fettle("trace", "report", path, "--output", tmp_path / "page.html").code == 0
    assert "estimated SM efficiency" in (tmp_path / "page.html").read_text()
    said = run_fettle("trace", "occupancy", training(2).write(tmp_path / "none.json"))
    assert (said.code, "blocks per SM" in said.err) == (2, True)


def test_the_file_is_not_read_again(tmp_path: Path) -> None:
    trace = build().load(tmp_path)
    trace.path.unlink()
    assert sm_efficiency(trace).height == 1
    assert kernels_by_sm(trace).height == 3


def test_numbers_that_are_none_cost_the_others_nothing(tmp_path: Path) -> None:
    made = build().kernel("odd", 1195, 5, **{"blocks per SM": [1], "est. achieved occupancy %": "x"})
    trace = made.kernel("unsaid", 1198, 1, **{"blocks per SM": 1}).load(tmp_path)
    assert trace.side["launches"]["blocks_per_sm"].to_list() == [0.5, 0.25, 3, 1]
    assert trace.side["launches"]["occupancy"].to_list() == [25, 50, 100, None]
