"""FLOPs, bytes and rooflines of products: every number by hand."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from fettle.trace import product_summary, product_table
from fettle.trace.analyses.flops import Limits, limits_of
from fettle.trace.costs import Cost, attention_cost, call_cost, convolution_cost, matrix_cost
from tests.conftest import Run
from tests.trace.build import Build

HALF = ["c10::BFloat16"] * 3


def products(folder: Path, **metadata: object) -> Build:
    """Two equal calls of a product of (8, 16) and (16, 4) around a kernel of 2 us each, and one of another shape."""
    build = Build(**metadata)
    for i, n in enumerate((4, 4, 32)):
        t = 100 + 50 * i
        told = {"Input Dims": [[n], [8, 16], [16, n]], "Input type": HALF, "Concrete Inputs": ["", "", ""]}
        build.op("aten::linear", t, 20).op("aten::addmm", t + 2, 15, **told)
        build.kernel("gemm", t + 25, 2, call=t + 5)
    return build


def test_costs_of_products() -> None:
    assert matrix_cost([8, 16], [16, 4]) == Cost(1, 8, 4, 16, 2 * 8 * 16 * 4, 8 * 16 + 16 * 4 + 8 * 4)
    assert matrix_cost([3, 8, 16], [3, 16, 4]) == Cost(3, 8, 4, 16, 3 * 1024, 3 * 224)
    assert matrix_cost([8, 16], [16]) == Cost(1, 8, 1, 16, 256, 8 * 16 + 16 + 8)
    assert matrix_cost([8, 16], [15, 4]) is None
    assert call_cost("aiter::gemm_a16w16", [[8, 16], [4, 16], []], []) == matrix_cost([8, 16], [16, 4])
    # Two images of 3 x 9 x 9, four filters of 3 x 3 x 3: each of 2 * 7 * 7 places costs 4 * 27 multiplications.
    assert convolution_cost([2, 3, 9, 9], [4, 3, 3, 3], [2, 4, 7, 7], 1) == Cost(
        1, 98, 4, 27, 2 * 98 * 4 * 27, 2 * 3 * 81 + 4 * 27 + 98 * 4
    )
    one = attention_cost([1, 2, 10, 8], [1, 2, 20, 8], [1, 2, 20, 8])
    assert one is not None
    assert one.flops == 2 * 2 * 2 * 10 * 20 * 8


@pytest.mark.parametrize(
    ("strides", "groups", "flops"),
    [
        (["[1, 1]", "[0, 0]", "[1, 1]"], "1", 2 * 2 * 49 * 4 * 27),
        (["[2]", "[1]", "[1]"], "1", 2 * 2 * 25 * 4 * 27),  # one number for both directions
        (["[1, 1]", "[2, 2]", "[2, 2]"], "1", 2 * 2 * 81 * 4 * 27),
    ],
)
def test_a_convolution_takes_its_strides_from_the_values(strides: list[str], groups: str, flops: int) -> None:
    values = ["", "", "", *strides, "False", "[0, 0]", groups]
    cost = call_cost("aten::convolution", [[2, 3, 9, 9], [4, 3, 3, 3]], values)
    assert cost is not None
    assert cost.flops == flops
    backward = ["", "", "", "[0]", *strides, "False", "[0, 0]", groups, "[False, True, False]"]
    space = flops // (2 * 2 * 4 * 27)
    side = round(space**0.5)
    back = call_cost("aten::convolution_backward", [[2, 4, side, side], [2, 3, 9, 9], [4, 3, 3, 3]], backward)
    assert back is not None
    assert back.flops == flops  # of the weight's gradient alone


def test_a_transposed_convolution_moves_its_result() -> None:
    """Two images of 6 x 5 x 5 to 8 x 11 x 11, in two groups: each place of the input times 3 filters of 4 x 3 x 3."""
    data, weight, result = [2, 6, 5, 5], [6, 4, 3, 3], [2, 8, 11, 11]
    values = ["", "", "", "[2, 2]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "2"]
    flops, elements = 2 * 2 * 50 * 3 * 36, 2 * 6 * 25 + 6 * 36 + 2 * 8 * 121
    assert call_cost("aten::convolution", [data, weight], values) == Cost(2, 50, 3, 36, flops, elements)
    backward = ["", "", "", "[0]", *values[3:], "[True, False, False]"]
    back = call_cost("aten::convolution_backward", [result, data, weight], backward)
    assert back == Cost(2, 50, 3, 36, flops, elements)
    wider = call_cost("aten::convolution", [data, weight], [*values[:7], "[1, 1]", "2"])
    assert wider is not None
    assert wider.elements - elements == 2 * 8 * (144 - 121)


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["", "", "", "x", "[0", "{}", "1"],
        ["", "", "", "[0]", "[0]", "[1]", "False", "", "1"],
        ["", "", "", '["1"]', "[0]", "[1]", "False", "", "1"],
    ],
)
def test_what_was_not_recorded_costs_nothing(values: list[str]) -> None:
    cost = call_cost("aten::convolution", [[2, 3, 9, 9], [4, 3, 3, 3]], values)
    assert cost is None or cost.flops == 0
    assert call_cost("aten::mm", [[2**70, 3], [3, 4]], []) is None
    assert call_cost("aten::mm", [{"a": 1}, "b"], []) is None


def test_calls_of_more_than_any_device_could_do_are_left_out(tmp_path: Path) -> None:
    build, vast = products(tmp_path), 2**39
    for at, sides in enumerate(([[vast, vast], [vast, vast]], [[vast, vast, vast, 0, 3], [vast, vast, vast, 3, 0]])):
        build.op("aten::mm", 1000 + 50 * at, 9, **{"Input Dims": sides, "Input type": HALF})
    assert set(product_table(build.load(tmp_path))["operator"]) == {"aten::addmm"}


def test_a_product_whose_bytes_no_number_holds_is_left_out(tmp_path: Path) -> None:
    told = {"Input Dims": [[2**30, 0], [0, 2**29]], "Input type": ["c10::complex<double>"] * 2}
    build = products(tmp_path).op("aten::mm", 1000, 9, **told)
    assert set(product_table(build.load(tmp_path))["operator"]) == {"aten::addmm"}


def test_the_table_is_by_shapes_and_types(tmp_path: Path) -> None:
    trace = products(tmp_path).load(tmp_path)
    small, large = Limits({2: 1.0}, 1e9), product_table(trace)
    assert large["count"].to_list() == [2, 1]
    assert large["types"].to_list() == ["c10::BFloat16"] * 2
    assert large["flops"].to_list() == [1024, 8192]
    assert large["bytes"].to_list() == [2 * 228, 2 * (128 + 512 + 256 + 32)]  # the bias is moved, too
    assert large["time_ns"].to_list() == [4_000, 2_000]
    assert large["tflop_per_s"].to_list() == pytest.approx([2048 / 4_000 / 1e3, 8192 / 2_000 / 1e3])
    assert large["bound"].to_list() == [None, None]
    table = product_table(trace, small)
    assert table["bound"].to_list() == ["compute", "compute"]
    assert table["roof_share"].to_list() == pytest.approx([2048 / 4_000 / 1e3, 8192 / 2_000 / 1e3])
    starved = product_table(trace, Limits({2: 1e9}, 1.0))
    assert starved["bound"].to_list() == ["memory", "memory"]
    assert starved["roof_share"][0] == pytest.approx(456 * 2 / 4_000)
    assert product_summary(table)["count"].to_list() == [3]
    known = products(tmp_path, deviceProperties=[{"name": "NVIDIA H100 80GB HBM3"}]).load(tmp_path, "h100.json")
    assert product_table(known)["bound"].to_list() == ["memory", "memory"]


def test_the_file_is_read_once(tmp_path: Path) -> None:
    trace = products(tmp_path).load(tmp_path)
    trace.path.unlink()
    assert product_table(trace)["types"].to_list() == ["c10::BFloat16"] * 2


def test_the_command(tmp_path: Path, run_fettle: Run) -> None:
    path = products(tmp_path).write(tmp_path / "t.json")
    said = run_fettle(
        "trace", "flops", path, "--json", "--peak", "100", "--bandwidth", "1000", "--output", tmp_path / "c.json"
    )
    assert json.loads(said.out)["operators"][0]["flops"] == 2 * 1024 + 8192
    assert (tmp_path / "c.json").exists()
    assert "give --peak and --bandwidth" in run_fettle("trace", "flops", path).out
    assert run_fettle("trace", "flops", path, "--peak", "100").code == 2
    none = Build().op("aten::relu", 0, 5).write(tmp_path / "none.json")
    assert run_fettle("trace", "flops", none).code == 2


@pytest.mark.parametrize(
    ("name", "gb_per_s"),
    [("NVIDIA H100 80GB HBM3", 3350), ("NVIDIA H100 PCIe", 2000), ("NVIDIA H200", 4800), ("NVIDIA GH200 480GB", 4000),
     ("NVIDIA A100-SXM4-80GB", 2039), ("NVIDIA A100-PCIE-40GB", 1555), ("Tesla V100-PCIE-16GB", 900),
     ("Tesla V100S-PCIE-32GB", 1134), ("NVIDIA GH200 144G HBM3e", 4900)],
)  # fmt: skip
def test_the_roof_is_of_the_very_device(tmp_path: Path, name: str, gb_per_s: float) -> None:
    limits = limits_of(Build(deviceProperties=[{"name": name}]).op("aten::mm", 0, 1).load(tmp_path))
    assert limits is not None
    assert limits.gb_per_s == gb_per_s


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000", "NVIDIA A100X", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"])
def test_a_device_whose_name_only_begins_like_anothers_has_no_roof(tmp_path: Path, name: str) -> None:
    assert limits_of(Build(deviceProperties=[{"name": name}]).op("aten::mm", 0, 1).load(tmp_path)) is None


def test_products_in_8_bits_have_bytes(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[16, 64], [64, 32]], "Input type": ["signed char", "signed char"]}
    table = product_table(Build().op("aten::_int_mm", 0, 10, **shapes).load(tmp_path))
    assert table.row(0, named=True)["bytes"] == 16 * 64 + 64 * 32 + 16 * 32


def test_attention_on_a_cpu_is_a_product(tmp_path: Path) -> None:
    one = {"Input Dims": [[1, 2, 16, 8]] * 3, "Input type": ["float"] * 3}
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    table = product_table(Build().op(name, 0, 10, **one).load(tmp_path))
    assert table.row(0, named=True)["flops"] == 2 * 2 * 2 * 16 * 16 * 8


def test_a_product_of_nothing_leaves_the_others_their_share(tmp_path: Path) -> None:
    """An expert that got no tokens."""
    build = Build().op("aten::mm", 0, 10, **{"Input Dims": [[0, 64], [64, 32]], "Input type": ["float"] * 2})
    build.op("aten::mm", 20, 10, **{"Input Dims": [[16, 64], [64, 32]], "Input type": ["float"] * 2})
    table = product_table(build.load(tmp_path), Limits({4: 1.0}, 100.0))
    (some,) = table.filter(pl.col("flops") > 0)["roof_share"].to_list()
    assert product_summary(table)["roof_share"].to_list() == [pytest.approx(some)]


def test_bytes_are_by_the_type_of_the_operands(tmp_path: Path) -> None:
    """Scales of operands in 8 bits, and the sums and the seed of attention's backward, are of wider types."""
    scaled = {"Input Dims": [[16, 64], [64, 32], [], []], "Input type": ["c10::Float8_e4m3fn"] * 2 + ["float"] * 2}
    one = [1, 2, 16, 8]
    build = Build().op("aten::_scaled_mm", 0, 10, **scaled)
    types = ["c10::BFloat16"] * 5 + ["float", "long int"]
    backward = {"Input Dims": [*[one] * 5, one[:3], []], "Input type": types}
    build.op("aten::_scaled_dot_product_flash_attention_backward", 20, 5, **backward)
    table = product_table(build.load(tmp_path))
    # Read are q, k, v, the output and its gradient, written three gradients.
    assert table["bytes"].to_list() == [16 * 64 + 64 * 32 + 16 * 32, 2 * 8 * 256]
    assert table["types"].to_list() == ["c10::Float8_e4m3fn, float", "c10::BFloat16, float, long int"]
