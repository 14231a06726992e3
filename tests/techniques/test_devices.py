"""A recipe works on the device that the inputs lie on, whichever is the current one: shown without any such device."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fettle.kernels.decomposed_attention import launch_decomposed_attention
from fettle.techniques import runtime
from fettle.techniques._exported import Exported
from fettle.techniques._pipeline import timed_parts
from fettle.techniques.cuda_graphs import Graphed


class OnGpu(torch.Tensor):
    """A tensor that says that it lies on the second GPU."""

    device, is_cuda = torch.device("cuda:1"), True


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(shape).as_subclass(OnGpu)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that were made the current one, the one that is so now last; -1 while none was chosen."""
    devices = [-1]

    @contextmanager
    def on(device: Any) -> Iterator[None]:
        devices.append(device if isinstance(device, int) else device.index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: on(tensor.device))
    return devices


def test_an_engine_is_built_and_run_there(current: list[int]) -> None:
    seen = []

    def build(flat: Any, tensors: Any, samples: Any, free: Any) -> Any:
        def run(values: Any) -> Any:
            seen.append(current[-1])
            return values

        flat(*tensors)
        return run(tensors) and run

    Exported(torch.nn.Identity(), build)(on_gpu(2, 3))
    assert seen == [1, 1]
    assert current == [-1]


def test_a_graph_is_recorded_there(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    still, seen = SimpleNamespace(wait_stream=lambda other: None), []
    graph = SimpleNamespace(replay=lambda: seen.append(current[-1]))
    for name, fake in {
        "Stream": lambda: still, "current_stream": lambda: still, "stream": lambda one: nullcontext(),
        "CUDAGraph": lambda: graph, "graph": lambda one: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)

    def model(x: torch.Tensor) -> torch.Tensor:
        seen.append(current[-1])
        return x + 1

    graphed = Graphed(model)
    graphed(on_gpu(2, 3))
    assert seen == [1] * 5  # three to settle, one recorded, one replayed
    for rows in range(3, 19):
        graphed(on_gpu(rows, 3))
    assert len(graphed.graphs) == 16
    assert seen == [1] * (16 * 5 + 1)  # the seventeenth kind of input is run as it is


def test_a_graph_without_memory_for_it_is_not_recorded(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def record(self: Graphed, leaves: Any, spec: Any) -> Any:
        asked.append(len(leaves[0]))
        if len(leaves[0]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(replay=lambda: None), leaves, [leaves[0]], pytree.tree_structure(leaves[0])

    monkeypatch.setattr(Graphed, "record", record)
    graphed = Graphed(lambda x: x + 1)
    with pytest.raises(torch.OutOfMemoryError):  # without any graph nothing is gained
        graphed(on_gpu(2, 3))
    graphed(on_gpu(1, 3))
    for rows in (2, 2, 3):
        assert graphed(on_gpu(rows, 3)).sum() == 6 * rows
    assert asked == [2, 1, 2]  # nor is another tried


def test_a_kernel_is_launched_there(current: list[int]) -> None:
    seen = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **settings: seen.append(current[-1])

    query, bias = on_gpu(1, 2, 4, 16), on_gpu(1, 2, 4, 2)
    launch_decomposed_attention(Kernel(), query, query, query, bias, bias, 1.0)
    assert seen == [1]


def test_onnx_runtime_leaves_its_answers_there(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    kinds = onnx.TensorProto
    given, doubled, is_more = (
        onnx.helper.make_tensor_value_info(name, kind, [2, 3])
        for name, kind in (("x", kinds.FLOAT), ("y", kinds.FLOAT), ("z", kinds.BOOL))
    )
    nodes = [onnx.helper.make_node("Add", ["x", "x"], ["y"]), onnx.helper.make_node("Greater", ["y", "x"], ["z"])]
    graph = onnx.helper.make_graph(nodes, "doubled", [given], [doubled, is_more])
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 20)])
    monkeypatch.setattr(runtime, "onnx_files", lambda *given: onnx.save(model, f"{given[-1]}/model.onnx"))
    bound: list[tuple[str, int]] = []
    bind = onnxruntime.IOBinding.bind_output
    session = onnxruntime.InferenceSession

    def bind_here(self: Any, name: str, device: str, number: int) -> None:
        bound.append((device, number))
        bind(self, name)

    monkeypatch.setattr(onnxruntime.IOBinding, "bind_output", bind_here)
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda path, options, providers: session(path, options))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    run = runtime.onnxruntime_engine(torch.nn.Identity(), [on_gpu(2, 3)], ())
    twice, more = run([on_gpu(2, 3)])
    assert bound == [("cuda", 1)] * 2
    assert torch.equal(twice, torch.full((2, 3), 2.0))
    assert torch.equal(more, torch.ones(2, 3, dtype=torch.bool))


def test_the_clock_of_parts_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    model = torch.nn.ModuleDict({"part": torch.nn.Linear(2, 2)})
    model["part"].weight = torch.nn.Parameter(on_gpu(2, 2))
    costs, _ = timed_parts(model, ["part"], lambda: model["part"](torch.ones(3, 2)))
    assert costs["part"].calls == 1
    assert waited == [torch.device("cuda:1")] * 4  # before and after the part, and the whole


def test_the_clock_of_parts_waits_for_all_gpus_that_they_lie_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnFirst(torch.Tensor):
        device = torch.device("cuda:0")

    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2), "two": torch.nn.Linear(2, 2)})
    model["one"].weight = torch.nn.Parameter(torch.ones(2, 2).as_subclass(OnFirst))
    model["two"].weight = torch.nn.Parameter(on_gpu(2, 2))
    timed_parts(model, ["one"], lambda: None)
    assert sorted(map(str, waited)) == ["cuda:0"] * 2 + ["cuda:1"] * 2
