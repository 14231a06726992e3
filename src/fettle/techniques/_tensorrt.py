"""TensorRT: the whole model as one engine, which is a file, or what of it TensorRT can run and torch the rest."""

from typing import Any

import torch

from fettle.techniques._exported import exported_program


def tensorrt_files(flat: torch.nn.Module, tensors: Any, free: Any, options: Any, folder: str) -> None:
    """Compile the whole model to ``model.engine`` in a folder. RuntimeError where an operator has no converter."""
    import torch_tensorrt

    program = exported_program(flat.eval(), tensors, free)
    convert = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
    with open(f"{folder}/model.engine", "wb") as file:
        file.write(convert(program, arg_inputs=list(tensors), **options))


def tensorrt_runner(serialized: bytes, tensors: Any) -> Any:
    """A function that runs an engine on tensors like these. Raises RuntimeError where it takes others."""
    from threading import Lock

    import tensorrt

    engine = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR)).deserialize_cuda_engine(serialized)
    if engine is None:
        raise RuntimeError("TensorRT cannot read this engine")
    types = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT64": torch.int64,
             "INT32": torch.int32, "INT8": torch.int8, "UINT8": torch.uint8, "BOOL": torch.bool}  # fmt: skip
    inputs: list[Any] = []
    outputs: list[Any] = []
    for place in range(engine.num_io_tensors):
        name = engine.get_tensor_name(place)
        about = (name, tuple(engine.get_tensor_shape(name)), types.get(engine.get_tensor_dtype(name).name))
        (inputs if engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT else outputs).append(about)
    wanted = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    if [about[1:] for about in inputs] != wanted or any(None in about or -1 in about[1] for about in outputs):
        raise RuntimeError(f"the engine takes {inputs} and returns {outputs}")
    own: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    context, lock = engine.create_execution_context(), Lock()

    def run(values: Any) -> Any:
        caller = torch.cuda.current_stream()
        # On the default stream TensorRT would wait for the device after each call.
        stream = own if caller == torch.cuda.default_stream() else caller
        kept = [value.detach().contiguous() for value in values]  # alive until the caller's stream has waited
        results = [torch.empty(shape, dtype=dtype, device=kept[0].device) for _, shape, dtype in outputs]
        with lock:
            for (name, _, _), tensor in zip([*inputs, *outputs], [*kept, *results], strict=True):
                context.set_tensor_address(name, tensor.data_ptr())
            stream.wait_stream(caller)
            if not context.execute_async_v3(stream.cuda_stream):
                raise RuntimeError("TensorRT could not start the engine")
        caller.wait_stream(stream)
        return results

    return run


def tensorrt_engine(flat: torch.nn.Module, tensors: Any, free: Any) -> Any:
    """The model compiled by TensorRT, in the precision of its weights."""
    import tempfile

    import torch_tensorrt

    if any(free):
        raise RuntimeError("an engine of TensorRT is built for one shape here")
    options = {"use_explicit_typing": True}  # newer versions know nothing else
    try:
        with tempfile.TemporaryDirectory() as folder:
            tensorrt_files(flat, tensors, free, options, folder)
            with open(f"{folder}/model.engine", "rb") as file:
                return tensorrt_runner(file.read(), tensors)
    except RuntimeError:  # torch runs what has no converter
        engine = torch_tensorrt.compile(flat.eval(), ir="dynamo", inputs=list(tensors), **options)
        return lambda values: engine(*values)
