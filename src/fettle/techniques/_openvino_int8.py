"""int8 in as many layers of an OpenVINO model as the error allows: the rounding in the graph, and what it costs."""

from typing import Any

import torch

from fettle.techniques._chosen_layers import chosen_layers, layer_groups
from fettle.techniques._exported import openvino_core


def openvino_layers(model: Any) -> list[Any]:
    """Convolutions and products with weights, in the order of the graph."""
    kinds = ("MatMul", "Convolution", "GroupConvolution", "ConvolutionBackpropData")
    nodes = [node for node in model.get_ordered_ops() if node.get_type_name() in kinds]
    weighted = [node for node in nodes if node.input_value(1).get_node().get_type_name() in ("Constant", "Convert")]
    return [node for node in weighted if len(node.input_value(1).get_shape()) > 1]


def openvino_answers(model: Any, samples: Any, hint: str) -> list[list[Any]]:
    """The outputs of a model for each sample, as NumPy arrays."""
    config = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    request = openvino_core().compile_model(model, "CPU", config).create_infer_request()
    answers = []
    for sample in samples:
        request.infer(dict(enumerate(sample)))
        answers.append([output.data.copy() for output in request.output_tensors])
    return answers


def openvino_error(answers: Any, wanted: Any) -> float:
    """Relative L2 error of the floating outputs, the worst; infinite where one is not finite."""
    import numpy

    worst = 0.0
    for mine, theirs in zip(answers, wanted, strict=True):
        for got, right in zip(mine, theirs, strict=True):
            if right.dtype.kind == "f":
                norm = float(numpy.linalg.norm(right))
                error = float(numpy.linalg.norm(got.astype(right.dtype) - right)) / (norm or 1.0)
                worst = max(worst, error) if numpy.isfinite(error) else float("inf")
    return worst


def openvino_products(layer: Any) -> float:
    """Multiply-adds of one layer; a size that is left open counts as 1."""
    import math

    sizes = [size.get_length() if size.is_static else 1 for size in layer.get_output_partial_shape(0)]
    channels = sizes[-1] if layer.get_type_name() == "MatMul" else sizes[1]
    return float(math.prod(sizes) / channels * math.prod(layer.input_value(1).get_shape()))


def openvino_ranges(model: Any, samples: Any) -> list[tuple[Any, Any]]:
    """The least and the largest value that each layer's input takes on `samples`, as arrays.

    Of a product with a matrix they are known for each column, of everything else for the input as a whole.
    """
    import numpy
    import openvino
    from openvino import opset13

    watched = model.clone()
    results = []
    for layer in openvino_layers(watched):
        value = layer.input_value(0)
        kept = openvino_columns(layer) is not None
        axes = opset13.constant(list(range(len(value.get_partial_shape()) - kept)), dtype="int64")
        results += [opset13.result(reduce(value, axes, False)) for reduce in (opset13.reduce_min, opset13.reduce_max)]
    watched = openvino.Model(results, watched.get_parameters(), "ranges")
    seen = list(zip(*openvino_answers(watched, samples, "f32"), strict=True))
    lows, highs = [numpy.min(column, 0) for column in seen[::2]], [numpy.max(column, 0) for column in seen[1::2]]
    return list(zip(lows, highs, strict=True))


def openvino_columns(layer: Any) -> int | None:
    """The axis of a layer's weights that meets the columns of its input, for products of rows with a matrix.

    None for others, and where the input has two axes: OpenVINO 2026.4 takes the second for a convolution's channels
    then, and applies what divides the columns to the wrong values (errors of 1.5 in 8 bits, 0.01 with three axes).
    """
    settings, rank = layer.get_attributes(), len(layer.get_input_partial_shape(0))
    if layer.get_type_name() != "MatMul" or rank < 3 or settings["transpose_a"]:
        return None
    if len(layer.input_value(1).get_shape()) != 2:
        return None
    return 1 if settings["transpose_b"] else 0


def openvino_scales(layers: Any, weights: Any, ranges: Any) -> dict[int, Any]:
    """What the columns of each input are divided by, and the weights multiplied with, before both are rounded.

    An input with a few columns far larger than the rest has no steps left for the rest; so a part of the difference is
    moved to the weights (SmoothQuant, Xiao et al. 2022, equation 4; its alpha is 0.65 here, which was the best of 0,
    0.35, 0.5, 0.65 and 0.8 on MiniLM). By the layers' numbers; all that read one value share its scale.
    """
    import numpy

    readers: dict[Any, list[int]] = {}
    for index, layer in layers.items():
        source = layer.input_value(0)
        readers.setdefault((source.get_node().get_name(), source.get_index()), []).append(index)
    scales: dict[int, Any] = {}
    for indexes in readers.values():
        columns = {index: openvino_columns(layers[index]) for index in indexes}
        peaks = [abs(weights[index]).max(1 - column) for index, column in columns.items() if column is not None]
        if len(peaks) == len(indexes):
            of_weights, of_input = numpy.max(peaks, 0), numpy.maximum(*map(numpy.abs, ranges[indexes[0]]))
            # A column that was silent on the samples may speak on other batches: it is not taken for nothing.
            of_input = numpy.maximum(of_input, max(1e-5, 0.05 * of_input.max()))
            scales |= dict.fromkeys(indexes, of_input**0.65 / numpy.maximum(of_weights, 1e-5) ** 0.35)
    return scales


def openvino_saturates() -> bool:
    """Whether this CPU cuts off the sums of two products in 8 bits at 16: those without VNNI do, at weights over 64."""
    import numpy
    import openvino
    from openvino import opset13

    def rounded(value: Any, low: int, high: int) -> Any:
        ends = [opset13.constant(numpy.float32(end)) for end in (low, high, low, high)]
        return opset13.fake_quantize(value, *ends, high - low + 1)

    given = opset13.parameter([1, 2, 64], numpy.float32)
    weights = opset13.constant(numpy.full((64, 64), 127, "float32"))
    product = opset13.matmul(rounded(given, 0, 255), rounded(weights, -127, 127), False, True)
    model = openvino.Model([opset13.result(product)], [given], "probe")
    [[answer]] = openvino_answers(model, [[numpy.full((1, 2, 64), 255, "float32")]], "f32")
    return bool(answer.min() < 0.9 * 255 * 127 * 64)


def openvino_int8_layers(model: Any, chosen: Any, ranges: Any, most: int) -> Any:
    """A copy with the layers `chosen` in int8: weights scaled by output channel to `most`, inputs by their range.

    The rounding is written into the graph; the CPU plugin then computes these products in 8 bits. Nothing else is
    rounded: not attention, not sums.
    """
    import numpy
    from openvino import opset13

    copied, shared, weights = model.clone(), {}, {}
    every = openvino_layers(copied)
    layers = {index: every[index] for index in chosen}
    for index, layer in layers.items():
        node = layer.input_value(1).get_node()
        constant = node if node.get_type_name() == "Constant" else node.input_value(0).get_node()
        weights[index] = constant.data.astype("float32")
    scales = openvino_scales(layers, weights, ranges)
    for index, layer in layers.items():
        source, (low, high) = layer.input_value(0), ranges[index]
        place = source.get_node().get_name(), source.get_index()
        values, scale, column = weights[index], scales.get(index), openvino_columns(layer)
        if scale is not None and column is not None:
            values, low, high = values * numpy.expand_dims(scale, 1 - column), low / scale, high / scale
        kind, axes = layer.get_type_name(), values.ndim
        if kind == "MatMul":
            kept = {axes - 2 if layer.get_attributes()["transpose_b"] else axes - 1}
        else:
            kept = {"Convolution": {0}, "GroupConvolution": {0, 1}, "ConvolutionBackpropData": {1}}[kind]
        others = tuple(axis for axis in range(axes) if axis not in kept)
        ends = numpy.maximum(numpy.abs(values).max(axis=others, keepdims=True), 1e-20) * (127 / most)
        ends = [opset13.constant(value) for value in (-ends, ends, -ends, ends)]
        layer.input(1).replace_source_output(opset13.fake_quantize(opset13.constant(values), *ends, 255).output(0))
        if place not in shared:  # several layers may read one value
            least, largest = min(float(low.min()), 0.0), max(float(high.max()), 0.0)
            step = max(largest - least, 1e-6) / 255
            least = round(least / step) * step  # so that zero, which convolutions pad with, is one of the 256 values
            largest = least + 255 * step
            ends = [opset13.constant(numpy.float32(value)) for value in (least, largest, least, largest)]
            scaled = source if scale is None else opset13.multiply(source, opset13.constant(1 / scale)).output(0)
            shared[place] = opset13.fake_quantize(scaled, *ends, 256).output(0)
        layer.input(0).replace_source_output(shared[place])
    copied.validate_nodes_and_infer_types()
    return copied


def openvino_int8_part(model: Any, samples: Any, part: Any) -> Any:
    """int8 in as many layers as the error on `samples` allows; the others are computed as the hint says.

    `part` has ``layers`` in int8 by their place among those of the graph, ``limit`` of the relative error, the
    precision ``hint``, and the ``key`` under which the layers are handed on. Where it has no layers they are chosen,
    and kept in it: the graph is cut into runs of layers, each is put in int8 alone to see what the outputs make of it,
    and those that gain most for their square of error are taken, as many as stay inside the limit together.
    """
    import logging

    if not samples:
        raise RuntimeError("int8: no calibration batch has the shape of this input")
    layers, logger = openvino_layers(model), logging.getLogger("optimized")
    if not layers:
        raise RuntimeError("int8: 0 of 0 layers: the model has no convolution or product with weights")
    ranges, most = openvino_ranges(model, samples), 64 if openvino_saturates() else 127
    if part["layers"]:
        if max(part["layers"]) >= len(layers):
            raise RuntimeError(f"int8: layer {max(part['layers'])} was chosen, and there are only {len(layers)}")
        logger.info("int8: %d of %d layers, as chosen before", len(part["layers"]), len(layers))
        return openvino_int8_layers(model, part["layers"], ranges, most)
    judged, hint, limit = samples[:4], part["hint"], part["limit"] ** 2
    wanted = openvino_answers(model, judged, "f32")
    products = [openvino_products(layer) for layer in layers]
    groups = layer_groups(products, 12)
    gains = [sum(products[index] for index in group) for group in groups]
    squares = []
    for group in groups:
        alone = openvino_answers(openvino_int8_layers(model, group, ranges, most), judged[:2], "f32")
        squares.append(openvino_error(alone, wanted[:2]) ** 2)
    made: dict[Any, Any] = {}

    def together(chosen: list[int]) -> float:
        made[tuple(chosen)] = quantised = openvino_int8_layers(model, chosen, ranges, most)
        return openvino_error(openvino_answers(quantised, judged, hint), wanted) ** 2

    part["layers"], said = chosen_layers("int8", "an error", 0.5, groups, gains, squares, limit, together)
    logger.info("%s", said, extra={"learned": {part["key"]: part["layers"]}})
    return made[tuple(part["layers"])]


CALIBRATED = (openvino_answers, openvino_saturates)
"""What both ways to 8 bits need in a file of their own."""
CHOOSING = (
    layer_groups, chosen_layers, openvino_error, openvino_layers, openvino_products, openvino_columns, openvino_ranges,
    openvino_scales, openvino_int8_layers, openvino_int8_part,
)  # fmt: skip
"""What `openvino_int8_part` needs beside them."""
