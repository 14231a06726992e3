"""OpenVINO as an engine: tensors in, tensors out, for the whole batch at once or for parts of it side by side."""

from typing import Any

import torch


def openvino_core() -> Any:
    """The runtime: one for the process, never let go.

    On a CPU with AMX its plugin gives the thread a signal stack, and unmaps that stack when the last runtime goes, also
    where that happens in another thread. The next signal with a handler (a DataLoader's worker ends) then kills.
    """
    import openvino

    if not hasattr(openvino, "process_core"):
        openvino.process_core = openvino.Core()
    return openvino.process_core


def openvino_model(program: Any, samples: Any, int8: bool) -> Any:
    """An exported program as OpenVINO's model; on request quantised to int8, calibrated on `samples`."""
    import warnings

    import openvino

    with warnings.catch_warnings():  # of what the converter does with torch's trees, which nobody here can change
        warnings.filterwarnings("ignore", ".*(LeafSpec|TreeSpec).*", FutureWarning)
        model = openvino.convert_model(program)
    if int8:
        import nncf

        if not samples:
            raise RuntimeError("int8: no calibration batch has the shape of this input")
        rows = nncf.Dataset([[tensor.numpy() for tensor in sample] for sample in samples])
        attention = any(node.get_type_name() in ("Softmax", "ScaledDotProductAttention") for node in model.get_ops())
        kind = nncf.ModelType.TRANSFORMER if attention else None
        model = nncf.quantize(model, rows, model_type=kind, subset_size=len(samples))
    return model


def openvino_compiled(flat: torch.nn.Module, tensors: Any, samples: Any, int8: bool, config: Any) -> Any:
    """The model compiled by OpenVINO for the CPU; on request quantised to int8, calibrated on `samples`."""
    model = openvino_model(torch.export.export(flat, tuple(tensors)), samples, int8)
    return openvino_core().compile_model(model, "CPU", config)


class OpenvinoRequest:
    """One request of a compiled model. The runtime reads and writes torch's own memory, so nothing is copied."""

    def __init__(self, compiled: Any) -> None:
        self.request = compiled.create_infer_request()
        self.kinds = [output.element_type.to_dtype() for output in self.request.model_outputs]
        self.shapes = [output.get_partial_shape() for output in self.request.model_outputs]
        self.static = all(shape.is_static for shape in self.shapes)
        self.inputs: list[Any] = []
        self.results: list[Any] = []

    def start(self, values: Any) -> None:
        """Begin to compute; the inputs are kept alive until the end."""
        import numpy
        import openvino

        self.inputs = [value.detach().contiguous().numpy() for value in values]
        for index, array in enumerate(self.inputs):
            self.request.set_input_tensor(index, openvino.Tensor(array, shared_memory=True))
        if self.static:  # new arrays for every call, so that the caller may keep the last ones
            places = zip(self.shapes, self.kinds, strict=True)
            self.results = [numpy.empty(shape.to_shape(), kind) for shape, kind in places]
            for index, array in enumerate(self.results):
                self.request.set_output_tensor(index, openvino.Tensor(array, shared_memory=True))
        self.request.start_async()

    def finish(self) -> list[torch.Tensor]:
        """Wait, and give the outputs."""
        self.request.wait()
        if not self.static:
            self.results = [tensor.data.copy() for tensor in self.request.output_tensors]
        return [torch.from_numpy(array) for array in self.results]


def openvino_engine(flat: torch.nn.Module, tensors: Any, precision: str, samples: Any, int8: bool) -> Any:
    """The whole batch in one request, all threads on each operator."""
    config = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = OpenvinoRequest(openvino_compiled(flat, tensors, samples, int8, config))

    def run(values: Any) -> Any:
        request.start(values)
        return request.finish()

    return run


def openvino_streams_engine(flat: torch.nn.Module, tensors: Any, precision: str, samples: Any, int8: bool) -> Any:
    """The batch cut into as many parts as there are threads, each part computed on a core of its own.

    No operator waits for another core then. Right only for models whose rows do not depend on each other.
    """
    rows = tensors[0].shape[0]
    parts = min(torch.get_num_threads(), rows)

    def cut(values: Any) -> list[tuple[Any, ...]]:
        pieces = [
            torch.tensor_split(value, parts) if value.dim() and value.shape[0] == rows else (value,) * parts
            for value in values
        ]
        return list(zip(*pieces, strict=True))

    requests: list[Any] = []
    compiled: dict[Any, Any] = {}
    samples = [part for sample in samples for part in cut(sample)]
    for part in cut(tensors):
        size = len(part[0])
        if size not in compiled:  # parts differ by one row where the batch cannot be cut evenly
            streams = sum(len(other[0]) == size for other in cut(tensors))
            config = {
                "INFERENCE_PRECISION_HINT": precision,
                "INFERENCE_NUM_THREADS": streams,
                "NUM_STREAMS": streams,
                "PERFORMANCE_HINT": "THROUGHPUT",
            }
            alike = [sample for sample in samples if len(sample[0]) == size]
            compiled[size] = openvino_compiled(flat, [tensor.clone() for tensor in part], alike, int8, config)
        requests.append(OpenvinoRequest(compiled[size]))

    def run(values: Any) -> Any:
        for request, part in zip(requests, cut(values), strict=True):
            request.start(part)
        results = [request.finish() for request in requests]
        return [torch.cat(pieces) for pieces in zip(*results, strict=True)]

    return run
