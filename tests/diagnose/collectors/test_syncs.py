"""Operations that would make the host wait, found on a CPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fettle.diagnose import Sync, SyncReport, confirm, find_cuda_syncs, find_syncs, watch_syncs
from fettle.diagnose.collectors import sync_modes, syncs


def ones_like_on_device(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], device=x.device)


WAITS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "aten._local_scalar_dense"),
    "float": (lambda x: float(x[0, 0]), "aten._local_scalar_dense"),
    "if": (lambda x: 1 if x.sum() > 0 else 2, "aten._local_scalar_dense"),
    "list index": (lambda x: [1, 2, 3][x[0, 0].bool().int()], "aten._local_scalar_dense"),
    "isnan any": (lambda x: bool(x.isnan().any()), "aten._local_scalar_dense"),
    "contains": (lambda x: 3.0 in x, "aten._local_scalar_dense"),
    "arange of a tensor": (lambda x: torch.arange(x[0, 0].abs()), "aten._local_scalar_dense"),
    "where": (lambda x: torch.where(x > 0), "aten.nonzero"),
    "nonzero": (lambda x: x.nonzero(), "aten.nonzero"),
    "mask": (lambda x: x[x > 0], "aten.index"),
    "mask set to tensor": (lambda x: x.clone().__setitem__(x == x, x.flatten()), "aten.index_put_"),
    "host index": (lambda x: x[[0, 1]], "aten.index"),
    "masked_select": (lambda x: torch.masked_select(x, x > 0), "aten.masked_select"),
    "unique": (lambda x: x.unique(), "aten._unique2"),
    "equal": (lambda x: torch.equal(x, x.clone()), "aten.equal"),
    "allclose": (lambda x: torch.allclose(x, x), "aten.allclose"),
    "repeat_interleave": (lambda x: x[0].repeat_interleave(x[0].abs().long()), "aten.repeat_interleave"),
    "bincount": (lambda x: x[0].abs().long().bincount(), "aten.bincount"),
    "inverse": (lambda x: torch.linalg.inv(x), "aten._linalg_check_errors"),
    "one_hot without classes": (lambda x: F.one_hot(x[0].abs().long()), "torch.nn.functional.one_hot"),
    "cond": (lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)), "cond"),
    "tolist": (lambda x: x.tolist(), "torch.Tensor.tolist"),
    "cpu": (lambda x: x.cpu(), "torch.Tensor.cpu"),
    "to cpu": (lambda x: x.to("cpu"), "torch.Tensor.to"),
    "to cpu and a type": (lambda x: x.to("cpu", torch.float64), "torch.Tensor.to"),
    "str": (lambda x: str(x), "torch.Tensor.__repr__"),
    "format": (lambda x: f"{x[0, 0]:.2f}", "torch.Tensor.__format__"),
    "numpy": (lambda x: np.asarray(x), "torch.Tensor.__array__"),
    "tensor made on the device": (lambda x: torch.tensor([1.0], device=x.device), "torch.tensor"),
    "moved to the device": (lambda x: torch.ones(3).to(x.device), "torch.Tensor.to"),
    "copied to the host": (lambda x: torch.empty(4, 4).copy_(x), "aten.copy_"),
    "copied to the device": (lambda x: x.clone().copy_(torch.zeros(4, 4)), "aten.copy_"),
    "made on the device, then read": (lambda x: ones_like_on_device(x).sum().item(), "aten._local_scalar_dense"),
}
FREE: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: (x @ x + 1).softmax(-1),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "where with both": lambda x: torch.where(x > 0, x, 0.0),
    "mask set to a number": lambda x: x.clone().__setitem__(x > 0, 0.0),
    "topk and sort": lambda x: (x.topk(2), x.sort()),
    "index on the device": lambda x: x[x[0].abs().long().clamp(max=3)],
    "one_hot with classes": lambda x: F.one_hot(x[0].abs().long(), 16),
    "one_hot by its arguments' names": lambda x: F.one_hot(input=x[0].abs().long(), num_classes=16),
    "shape": lambda x: (x.shape[0], len(x), x.numel()),
    "host tensor": lambda x: torch.ones(3).sum().item(),
    "a host copy read again": lambda x: torch.ones(2).tolist(),
    "upload that does not block": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "download that does not block": lambda x: x.to("cpu", non_blocking=True),
    "same device": lambda x: x.to(x.device),
    "cast": lambda x: x.to(torch.bfloat16).float(),
    "repeat_interleave of known size": lambda x: x[0].repeat_interleave(torch.ones_like(x[0]).long(), output_size=4),
    "quantile": lambda x: x.quantile(torch.full_like(x[0, :1], 0.5)),
    "nothing to read": lambda x: x[:0].tolist(),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_found_with_its_line(name: str) -> None:
    call, operator = WAITS[name]
    x = torch.randn(4, 4)
    report = find_syncs(lambda: call(x), on_device=x)
    assert [(sync.operator, sync.count) for sync in report.syncs] == [(operator, 1)]
    assert report.syncs[0].file == __file__
    assert report.syncs[0].code


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_wait_is_not_claimed(name: str) -> None:
    x = torch.randn(4, 4)
    assert find_syncs(lambda: FREE[name](x), on_device=x).syncs == ()


def test_a_copy_on_the_host_is_read_for_free() -> None:
    x = torch.randn(4, 4)

    def call() -> float:
        here = x.cpu()
        return here.sum().item() + here[0, 0].item()

    (sync,) = find_syncs(call, on_device=x).syncs
    assert (sync.operator, sync.code) == ("torch.Tensor.cpu", "here = x.cpu()")


def test_a_training_step_names_the_lines_and_counts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.randn(8, 4), []

    def step() -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    report = find_syncs(step, on_device=[model, x], calls=3)
    assert [(sync.code, sync.count) for sync in report.syncs] == [("losses.append(loss.item())", 3)]
    assert report.calls == 3
    assert len(losses) == 3


def test_compiled_code_is_seen() -> None:
    x = torch.randn(4, 4)
    compiled = torch.compile(lambda t: t[t > 0].sum(), backend="eager")
    assert [sync.operator for sync in find_syncs(lambda: compiled(x), on_device=x).syncs] == ["aten.index"]


def test_gradients_flow_as_without() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with watch_syncs(x) as watch:
        x.cpu().square().sum().backward()
    assert torch.equal(x.grad, 2 * x)
    assert [sync.count for sync in watch.report().syncs] == [1]


def test_the_programs_exception_comes_through_and_the_modes_are_gone() -> None:
    x = torch.randn(2)
    with pytest.raises(ZeroDivisionError):
        find_syncs(lambda: 1 / 0, on_device=x)
    assert x.device == torch.device("cpu")


def test_old_storages_are_forgotten() -> None:
    x = torch.randn(2)
    with watch_syncs(x) as watch:
        for _ in range(12_000):
            watch.mark(torch.empty(1))
    assert len(watch._storages) < 11_000


class TestOnADevice:
    """Tensors of 64 bits play those on the GPU: there they say themselves where they are."""

    @pytest.fixture(autouse=True)
    def _wide_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sync_modes, "lies_on_gpu", lambda tensor: tensor.dtype == torch.float64)

    @pytest.mark.parametrize("name", ["item", "unique", "mask", "tolist", "cpu", "to cpu", "format"])
    def test_what_waits_is_found(self, name: str) -> None:
        call, operator = WAITS[name]
        x = torch.randn(4, 4, dtype=torch.float64)
        report = find_syncs(lambda: call(x), on_device=x, real=True)
        assert [sync.operator for sync in report.syncs] == [operator]
        assert find_syncs(lambda: call(x.float()), on_device=x, real=True).syncs == ()  # on the host it costs nothing

    def test_other_devices_than_a_gpu_of_nvidia_or_amd_say_themselves_where_they_are(self) -> None:
        x = torch.ones(3, device="meta")
        report = syncs.syncs_on("xpu", lambda: x + torch.ones(3, device=x.device), x)
        assert (report.syncs, report.source) == ((), "modes")

    def test_no_tensor_is_told_another_device_than_its_own(self) -> None:
        x = torch.randn(4, dtype=torch.float64)
        with watch_syncs(x, real=True):
            assert x.device == torch.device("cpu")
            assert x.to("cpu") is x

    def test_cuda_has_the_last_word(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.randn(4, dtype=torch.float64)
        seen = Sync("other.py", 7, "f", "", "cuda", "wait", "", 2)

        def on_gpu(call: Callable[[], Any]) -> SyncReport:
            (first, _) = find_syncs(call, on_device=x, real=True).syncs
            return SyncReport((first, seen), 1, 0.1, "cuda")

        monkeypatch.setattr(syncs, "find_cuda_syncs", on_gpu)

        def call() -> None:
            x.sum().item()
            x.tolist()

        report = syncs.syncs_on("cuda", call, x)
        assert [sync.operator for sync in report.syncs] == ["aten._local_scalar_dense", "cuda"]
        assert report.source == "cuda"
        assert syncs.syncs_on("cpu", call, x).source == "modes"


def test_without_a_gpu_the_cuda_check_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(RuntimeError, match="no CUDA device"):
        find_cuda_syncs(lambda: None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [name for name in (*WAITS, *FREE) if name != "numpy"])  # which CUDA refuses
def test_cuda_agrees(name: str) -> None:
    """Each line of the table, claimed on a CPU, against CUDA's own checks."""
    call = WAITS[name][0] if name in WAITS else FREE[name]
    host = torch.randn(4, 4)
    device = host.cuda()
    call(device)  # the first call may load a kernel, which waits too
    found, real = find_syncs(lambda: call(host), on_device=host), find_cuda_syncs(lambda: call(device))
    _, unseen, unclaimed = confirm(found, real)
    assert (unseen, unclaimed) == ((), ())
