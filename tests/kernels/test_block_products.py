"""Products in blocks of 8 and 4 bits: the kernel against the same in eager PyTorch, and both against plain products."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import library
from torch.utils import cpp_extension

from fettle.kernels.block_products import block_product_reference, block_products, packed_blocks, unpacked_blocks
from fettle.techniques import Facts, probe_facts
from fettle.workload import Workload


def facts_here() -> Facts:
    return probe_facts(Workload(torch.nn.Linear(2, 2), [torch.rand(2, 2)]))


@pytest.fixture(scope="module")
def multiply() -> Callable[..., Any]:
    if not facts_here().has_block_products or shutil.which(cpp_extension.get_cxx_compiler()) is None:
        pytest.skip("needs AVX2 or AVX-512 VNNI, and a C++ compiler")
    return block_products()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("bits", "most"), [(8, 0.006), (4, 0.1)])
def test_what_is_packed_is_nearly_what_it_was(bits: int, most: float) -> None:
    weight = torch.randn(50, 96) * torch.rand(50, 1)
    packed, scales = packed_blocks(weight, bits)
    assert packed.numel() == 64 * 96 * bits // 8
    again = unpacked_blocks(packed, scales, 50)
    assert again.shape == weight.shape
    assert (again - weight).norm() < most * weight.norm()
    assert torch.equal(unpacked_blocks(*packed_blocks(again, bits), 50), again) or bits == 4


def test_blocks_of_four_bits_come_out_as_they_were() -> None:
    steps, low = torch.rand(16, 3, 1).half().float() / 16, torch.randn(16, 3, 1).half().float()
    codes = torch.randint(16, (16, 3, 32))
    codes[..., 0], codes[..., 1] = 0, 15  # each block has its ends
    weight = (codes * steps + low).flatten(1)
    torch.testing.assert_close(unpacked_blocks(*packed_blocks(weight, 4), 16), weight, rtol=0, atol=2e-3)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([8, 4]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.integers(1, 21), blocks=st.integers(1, 9), size=st.integers(1, 70), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_kernel_is_the_eager_product(multiply, bits, dtype, rows, blocks, size, seed) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(rows, 32 * blocks) * 10 ** torch.randn(rows, 1)).to(dtype)
    packed, scales = packed_blocks(torch.randn(size, 32 * blocks), bits)
    found, wanted = multiply(x, packed, scales, size), block_product_reference(x, packed, scales, size)
    assert (found.dtype, found.shape) == (dtype, (rows, size))
    # where a number lies between two of 8 bits the two may round it apart
    exact = torch.linalg.vector_norm(wanted.float(), dim=1, keepdim=True) + 1e-6
    assert ((found.float() - wanted.float()).abs() / exact).max() < 0.02


def test_a_view_and_many_rows(multiply) -> None:
    weight, x = torch.randn(40, 64), torch.randn(64, 300)
    packed, scales = packed_blocks(weight, 8)
    found = multiply(x.T, packed, scales, 40)
    assert (found - x.T @ weight.T).norm() < 0.01 * (x.T @ weight.T).norm()
    assert torch.equal(multiply(x.T[7:8], packed, scales, 40), found[7:8])  # one row as many


@pytest.mark.parametrize("bits", [8, 4])
def test_no_rows_are_no_work(multiply, bits: int) -> None:
    """As an expert gets them to which no token was sent."""
    assert multiply(torch.rand(0, 64), *packed_blocks(torch.randn(40, 64), bits), 40).shape == (0, 40)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_makes_none(multiply, wrong: float, dtype: torch.dtype) -> None:
    packed, scales = packed_blocks(torch.randn(16, 64), 8)
    x = torch.randn(2, 64, dtype=dtype)
    x[1, 40] = wrong
    found = multiply(x, packed, scales, 16)
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()
    assert torch.equal(multiply(torch.zeros(1, 64, dtype=dtype), packed, scales, 16), torch.zeros(1, 16, dtype=dtype))


def test_it_is_one_operator_in_a_graph(multiply) -> None:
    packed, scales = packed_blocks(torch.randn(40, 64), 4)
    x = torch.randn(3, 64)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return multiply(x * 2, packed, scales, 40) + 1  # type: ignore[no-any-return]

    torch.testing.assert_close(torch.compile(twice, fullgraph=True)(x), twice(x))
    library.opcheck(multiply.default, (x, packed, scales, 40), test_utils=("test_schema", "test_faketensor"))


def test_what_does_not_fit_is_refused(multiply) -> None:
    packed, scales = packed_blocks(torch.randn(16, 64), 8)
    for x, weights, size in (
        (torch.randn(1, 32), packed, 16), (torch.randn(1, 64), packed[:, :, :2], 16),
        (torch.randn(1, 64), packed, 17), (torch.randn(1, 64).double(), packed, 16), (torch.randn(64), packed, 16),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, IndexError)):
            multiply(x, weights, scales, size)


def test_without_a_compiler_it_is_one_line(monkeypatch, tmp_path) -> None:
    if hasattr(torch.ops.block_products, "multiply"):
        pytest.skip("it is loaded already")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(ImportError, match=r"^products in blocks need a C\+\+ compiler: No such file"):
        block_products()
