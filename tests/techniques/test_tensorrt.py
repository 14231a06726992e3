"""TensorRT's engine as a file: how it is made, run and kept, with stand-ins for TensorRT's own parts on the CPU."""

import ctypes
import functools
import io
import sys
from types import SimpleNamespace

import pytest
import torch

from fettle.techniques import _kept, _tensorrt

TYPES = {torch.float32: "FLOAT", torch.int64: "INT64", torch.float64: "DOUBLE"}


class Engine:
    """An exported program that is run on the memory at given addresses, as TensorRT runs an engine."""

    def __init__(self, serialized):
        self.program = torch.export.load(io.BytesIO(serialized))
        graph = self.program.graph_module.graph
        given = [node.meta["val"] for node in graph.nodes if node.name in self.program.graph_signature.user_inputs]
        (output,) = [node for node in graph.nodes if node.op == "output"]
        self.tensors = {f"in{place}": tensor for place, tensor in enumerate(given)}
        self.tensors |= {f"out{place}": node.meta["val"] for place, node in enumerate(output.args[0])}
        self.num_io_tensors = len(self.tensors)
        self.addresses = {}

    def get_tensor_name(self, place):
        return list(self.tensors)[place]

    def get_tensor_shape(self, name):
        return self.tensors[name].shape

    def get_tensor_dtype(self, name):
        return SimpleNamespace(name=TYPES[self.tensors[name].dtype])

    def get_tensor_mode(self, name):
        return name.rstrip("0123456789")

    def create_execution_context(self):
        return self

    def set_tensor_address(self, name, address):
        self.addresses[name] = address

    def at(self, name):
        about = self.tensors[name]
        memory = (ctypes.c_char * (about.numel() * about.element_size())).from_address(self.addresses[name])
        return torch.frombuffer(memory, dtype=about.dtype).view(about.shape)

    def execute_async_v3(self, stream):
        results = self.program.module()(*[self.at(name) for name in self.tensors if name.startswith("in")])
        for place, result in enumerate(results):
            self.at(f"out{place}").copy_(result)
        return stream == "own"


@pytest.fixture
def made(monkeypatch, tmp_path):
    """What was made: whole engines, and models of which torch runs a part."""
    monkeypatch.setenv("FETTLE_CACHE", str(tmp_path))
    made, refused = [], []

    def convert(program, arg_inputs, use_explicit_typing):
        if refused:
            raise RuntimeError("Conversion of module is not currently fully supported")
        made.append("engine")
        file = io.BytesIO()
        torch.export.save(program, file)
        return file.getvalue()

    def compile_(model, ir, inputs, use_explicit_typing):
        made.append("mixed")
        return model

    class Logger:
        ERROR = 1

        def __init__(self, level):
            assert level == self.ERROR

    ours = SimpleNamespace(
        Logger=Logger, TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out"),
        Runtime=lambda logger: SimpleNamespace(deserialize_cuda_engine=Engine),
    )  # fmt: skip
    dynamo = SimpleNamespace(convert_exported_program_to_serialized_trt_engine=convert)
    monkeypatch.setitem(sys.modules, "tensorrt", ours)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", SimpleNamespace(dynamo=dynamo, compile=compile_))
    waits = {"wait_stream": lambda other: None}
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(cuda_stream="own", **waits))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: torch.cuda.default_stream())
    default = SimpleNamespace(cuda_stream="default", **waits)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: default)
    kept = functools.partial(_kept._files, _tensorrt.tensorrt_files, "r", None)
    monkeypatch.setattr(_tensorrt, "tensorrt_files", kept)
    return SimpleNamespace(made=made, refuse=lambda: refused.append(True))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x, places):
        scores = self.layer(x)
        return scores, scores[:, places]


def answers(tensors):
    model = Model().eval().to(tensors[0].dtype)
    with torch.no_grad():
        found = _tensorrt.tensorrt_engine(model, tensors, [])([tensor.clone() for tensor in tensors])
        torch.testing.assert_close(list(found), list(model(*tensors)))


def test_a_whole_engine_is_kept_and_read_at_the_next_start(made):
    tensors = [torch.randn(3, 8), torch.tensor([2, 0])]
    answers(tensors)
    assert made.made == ["engine"]
    answers(tensors)
    assert made.made == ["engine"]  # read
    answers([torch.randn(5, 8), torch.tensor([1, 3])])
    assert made.made == ["engine", "engine"]  # other shapes


def test_torch_runs_what_an_engine_cannot(made):
    answers([torch.randn(3, 8, dtype=torch.float64), torch.tensor([2, 0])])
    assert made.made == ["engine", "mixed"]  # TensorRT has no such numbers
    made.refuse()
    answers([torch.randn(2, 8), torch.tensor([2, 0])])
    assert made.made == ["engine", "mixed", "mixed"]
