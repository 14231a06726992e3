"""OpenVINO as an engine: tensors in, tensors out, for the whole batch at once or for parts of it side by side."""

from typing import Any

import torch

from fettle.techniques._exported import exported_program, openvino_core
from fettle.techniques._openvino_int8 import openvino_int8_part, openvino_saturates


def openvino_operators(program: Any) -> Any:
    """The program in operators that OpenVINO 2026.4 converts: `index_add`, of which it has none, as `scatter_add`, and
    `unfold` along an axis that is counted from the first."""
    aten = torch.ops.aten

    def index_add(tensor: Any, dim: int, index: Any, source: Any, alpha: float = 1) -> Any:
        across = index.reshape([-1 if axis == dim % tensor.dim() else 1 for axis in range(tensor.dim())])
        return aten.scatter_add(tensor, dim, across.expand_as(source), source * alpha)

    for node in program.graph.nodes:
        if node.target is aten.unfold.default:
            node.update_arg(1, node.args[1] % node.args[0].meta["val"].dim())
    met = any(node.target in (aten.index_add.default, aten.index_add_.default) for node in program.graph.nodes)
    return program.run_decompositions({aten.index_add.default: index_add}) if met else program


def openvino_model(program: Any, samples: Any, level: str, part: Any = None) -> Any:
    """An exported program as OpenVINO's model, made for `level`; those with ``int8`` are calibrated on `samples`.

    ``openvino-int8-part`` goes by `part`, see `openvino_int8_part`.
    """
    import warnings

    import openvino

    with warnings.catch_warnings():  # from inside the converter, about torch's trees
        warnings.filterwarnings("ignore", ".*(LeafSpec|TreeSpec).*", FutureWarning)
        model = openvino.convert_model(openvino_operators(program))
    # The converter leaves every size open: those that the program fixes are fixed again.
    given = {node.name: node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder"}
    shapes = [given[name] for name in program.graph_signature.user_inputs]
    sizes = [[size if isinstance(size, int) else -1 for size in shape] for shape in shapes]
    model.reshape(dict(enumerate(sizes)))
    if level == "openvino-bf16-sums":
        openvino_bf16_sums(model)
    if level != "openvino":
        openvino_angles(model)
    if level == "openvino-int8":
        import nncf

        if not samples:
            raise RuntimeError("int8: no calibration batch has the shape of this input")
        rows = nncf.Dataset([[tensor.numpy() for tensor in sample] for sample in samples])
        attention = any(node.get_type_name() in ("Softmax", "ScaledDotProductAttention") for node in model.get_ops())
        kind = nncf.ModelType.TRANSFORMER if attention else None
        fix = nncf.OverflowFix.ENABLE if openvino_saturates() else None
        more = nncf.AdvancedQuantizationParameters(overflow_fix=fix)
        model = nncf.quantize(model, rows, model_type=kind, subset_size=len(samples), advanced_parameters=more)
    if level == "openvino-int8-part":
        model = openvino_int8_part(model, [[tensor.numpy() for tensor in sample] for sample in samples], part)
    return model


def openvino_tail(output: Any) -> dict[str, Any]:
    """What the CPU plugin computes in float32 under the bf16 hint, were `output` one of the model's; nodes by name.

    It is all that lies between the output and the first products (matrix products, convolutions) on the way back.
    """
    products = (
        "MatMul", "Convolution", "GroupConvolution", "ConvolutionBackpropData", "GroupConvolutionBackpropData",
        "LSTMCell", "LSTMSequence", "GRUCell", "GRUSequence", "RNNCell", "RNNSequence", "Interpolate", "ROIPooling",
    )  # fmt: skip
    waiting, met = [output.get_node()], {}
    while waiting:
        node = waiting.pop()
        if node.get_name() not in met and node.get_type_name() not in products:
            met[node.get_name()] = node
            waiting += [value.get_node() for value in node.input_values()]
    return met


def openvino_angles(model: Any) -> None:
    """Keep the sines and cosines of what a model is given, timesteps or positions, in float32 under the bf16 hint.

    bfloat16 has eight bits: it holds an angle of 762 to within 2, and its sine is then any number. The plugin leaves
    in float32 what leads to an output, so each of them becomes an output; `OpenvinoRequest` knows them by their name.
    """
    import logging

    there = {name for result in model.get_results() for name in openvino_tail(result.input_value(0))}
    angles = [
        node for node in model.get_ordered_ops()
        if node.get_type_name() in ("Sin", "Cos") and node.get_name() not in there
        and any(parent.get_type_name() == "Parameter" for parent in openvino_tail(node.output(0)).values())
    ]  # fmt: skip
    if angles:
        for index, output in enumerate(model.add_outputs([node.output(0) for node in angles])):
            output.get_tensor().add_names({f"angle in float32: {index}"})
        logging.getLogger("optimized").info("sines and cosines kept in float32: %d", len(angles))


def openvino_bf16_sums(model: Any) -> None:
    """Let OpenVINO's CPU plugin keep the sums between layers in bfloat16 too; an error where they are in it already.

    Where a transformer ends in a normalisation, the way back from its output (`openvino_tail`) leads along its residual
    sums through the whole model, and each layer converts twice. A product with the identity at the output ends it
    there; the product itself changes nothing that bfloat16 can hold.
    """
    import logging

    import numpy
    from openvino import opset13

    done = 0
    for result in model.get_results():
        output = result.input_value(0)
        adds = [node for node in openvino_tail(output).values() if node.get_type_name() == "Add"]
        parents = [[value.get_node().get_type_name() for value in node.input_values()] for node in adds]
        sums = sum("Constant" not in kinds for kinds in parents)
        shape = output.get_partial_shape()
        last = list(shape)[-1] if shape.rank.is_static and len(shape) > 1 else None
        width = last.get_length() if last is not None and last.is_static else 0
        # One or two sums are a model's end; a product with an identity of more than 8192 columns costs too much.
        if sums > 2 and 0 < width <= 8192 and output.get_element_type().to_dtype() == numpy.float32:
            identity = opset13.constant(numpy.eye(width, dtype=numpy.float32))
            result.input(0).replace_source_output(opset13.matmul(output, identity, False, True).output(0))
            done += 1
    outputs = len(model.get_results())
    if done == 0:
        raise RuntimeError(f"openvino-bf16-sums: 0 of {outputs} outputs lie behind sums that are left in float32")
    logging.getLogger("optimized").info("sums between layers in bfloat16: %d of %d outputs", done, outputs)
    model.validate_nodes_and_infer_types()


def openvino_converted(flat: torch.nn.Module, tensors: Any, samples: Any, level: str, free: Any, part: Any) -> Any:
    """The model as OpenVINO's, made for `level` of the technique runtime."""
    return openvino_model(exported_program(flat, tensors, free), samples, level, part)


class OpenvinoRequest:
    """One request of a compiled model. The runtime reads and writes torch's own memory, so nothing is copied."""

    def __init__(self, compiled: Any) -> None:
        self.request = compiled.create_infer_request()
        # Outputs that `openvino_angles` has added are not part of the answer.
        outputs = [
            output for output in self.request.model_outputs
            if not any(name.startswith("angle in float32") for name in output.get_names())
        ]  # fmt: skip
        self.kinds = [output.element_type.to_dtype() for output in outputs]
        # NumPy has no bfloat16: its bits come as float16.
        self.bits = [torch.bfloat16 if output.element_type.get_type_name() == "bf16" else None for output in outputs]
        self.shapes = [output.get_partial_shape() for output in outputs]
        self.static = all(shape.is_static for shape in self.shapes) and not any(self.bits)
        # What is handed on as it came has one name and one memory: an array for the output would become the input.
        given = {name for one in self.request.model_inputs for name in one.get_names()}
        self.static = self.static and not any(given & one.get_names() for one in outputs)
        self.inputs: list[Any] = []
        self.results: list[Any] = []

    def answer(self, values: Any) -> list[torch.Tensor]:
        """The outputs, computed from this thread: no other one has to be woken up."""
        self.give(values)
        self.request.infer(share_outputs=True)
        return self.outputs()

    def start(self, values: Any) -> None:
        """Begin to compute."""
        self.give(values)
        self.request.start_async()

    def finish(self) -> list[torch.Tensor]:
        """Wait, and give the outputs."""
        self.request.wait()
        return self.outputs()

    def give(self, values: Any) -> None:
        """Have it read these inputs, which are kept alive until the next ones."""
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

    def outputs(self) -> list[torch.Tensor]:
        """What was computed."""
        if not self.static:
            self.results = [self.request.get_output_tensor(index).data.copy() for index in range(len(self.kinds))]
        found = [torch.from_numpy(array) for array in self.results]
        return [one if bits is None else one.view(bits) for one, bits in zip(found, self.bits, strict=True)]


def openvino_engine(
    flat: torch.nn.Module, tensors: Any, precision: str, samples: Any, level: str, free: Any, part: Any = None
) -> Any:
    """The whole batch in one request, all threads on each operator."""
    from threading import Lock

    config = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = openvino_converted(flat, tensors, samples, level, free, part)
    request, lock = OpenvinoRequest(openvino_core().compile_model(model, "CPU", config)), Lock()

    def run(values: Any) -> Any:
        with lock:
            return request.answer(values)

    return run


def openvino_streams_engine(
    flat: torch.nn.Module, tensors: Any, precision: str, samples: Any, level: str, free: Any, part: Any = None
) -> Any:
    """The batch cut into as many parts as there are threads, each part computed on a core of its own.

    No operator waits for another core then. Right only for models whose rows do not depend on each other, which is
    looked at: what has as many of something else as the batch has rows would be cut as well.
    """
    from threading import Lock

    if any(free):
        raise RuntimeError("a batch is cut into parts of sizes that are known")
    rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)
    parts = min(torch.get_num_threads(), rows)
    sizes = [len(piece) for piece in torch.arange(rows).tensor_split(parts)]

    def cut(values: Any) -> list[tuple[Any, ...]]:
        pieces = [
            torch.tensor_split(value, parts) if value.dim() and value.shape[0] == rows else (value,) * parts
            for value in values
        ]
        return list(zip(*pieces, strict=True))

    with torch.no_grad():
        whole, parted = flat(*tensors), zip(*(flat(*piece) for piece in cut(tensors)), strict=True)
    for one, pieces in zip(whole, parted, strict=True):
        joined = torch.cat(pieces) if one.dim() else torch.stack(pieces)
        off, right = torch.inf, one.double().nan_to_num(0, 0, 0)
        if joined.shape == one.shape:
            off = (joined.double().nan_to_num(0, 0, 0) - right).norm()
        if not off <= 0.01 * right.norm() + 1e-6:
            raise RuntimeError(f"cut into {parts} parts the batch has another answer of shape {list(one.shape)}")
    requests: list[Any] = []
    compiled: dict[Any, Any] = {}
    samples = [(size, piece) for sample in samples for size, piece in zip(sizes, cut(sample), strict=True)]
    for size, piece in zip(sizes, cut(tensors), strict=True):
        if size not in compiled:  # parts differ by one row where the batch cannot be cut evenly
            streams = sizes.count(size)
            config = {
                "INFERENCE_PRECISION_HINT": precision,
                "INFERENCE_NUM_THREADS": streams,
                "NUM_STREAMS": streams,
                "PERFORMANCE_HINT": "THROUGHPUT",
            }
            alike = [sample for rows_of, sample in samples if rows_of == size]
            given = [tensor.clone() for tensor in piece]
            model = openvino_converted(flat, given, alike, level, free, part)
            compiled[size] = openvino_core().compile_model(model, "CPU", config)
        requests.append(OpenvinoRequest(compiled[size]))

    lock = Lock()

    def run(values: Any) -> Any:
        with lock:
            for request, piece in zip(requests, cut(values), strict=True):
                request.start(piece)
            results = [request.finish() for request in requests]
        return [torch.cat(pieces) for pieces in zip(*results, strict=True)]

    return run


MODEL = (
    openvino_core, openvino_tail, openvino_bf16_sums, openvino_angles, openvino_operators, openvino_model,
    openvino_converted, OpenvinoRequest,
)  # fmt: skip
"""All that both engines need in a file of their own."""
