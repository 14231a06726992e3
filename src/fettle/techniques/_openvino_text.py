"""OpenVINO as what writes text: a model with its keys and values inside, which the runtime calls stateful."""

from typing import Any

import torch

from fettle.techniques._exported import openvino_core


class Step(torch.nn.Module):
    """One call of a model of transformers as tensors only: the scores of some of the new tokens, and all keys and
    values, those of the new tokens behind the `past` ones. `seen` [rows, tokens] is 0 where nothing may be looked at,
    `kept` are the new tokens whose scores are wanted."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Any, seen: Any, places: Any, kept: Any, past: Any) -> Any:
        class Cache:
            def __init__(self) -> None:
                self.layers = list(past)

            def update(self, keys: Any, values: Any, layer: int, *given: Any, **named: Any) -> Any:
                before = self.layers[layer]
                self.layers[layer] = (torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2))
                return self.layers[layer]

            def get_seq_length(self, layer: int = 0) -> Any:
                return past[layer][0].shape[2]

        count, whole = tokens.shape[1], seen.shape[1]
        earlier = torch.arange(whole)[None] <= (torch.arange(count) + (whole - count))[:, None]
        mask = torch.where(earlier & (seen[:, None, None] > 0), 0.0, torch.finfo(torch.float32).min)
        cache: Any = Cache()
        output = self.model(
            input_ids=tokens, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True,
            logits_to_keep=kept,
        )  # fmt: skip
        return (output.logits, *(tensor for layer in cache.layers for tensor in layer))


def openvino_stateful(model: Any) -> Any:
    """The model converted, with keys and values that stay inside from one call to the next. Its inputs: tokens, seen,
    places and kept as for `Step`, and the row whose past each row goes on from."""
    import warnings

    import numpy
    import openvino
    from openvino import opset13
    from openvino._offline_transformations import apply_make_stateful_transformation
    from transformers import DynamicCache

    first = torch.ones(2, 3, dtype=torch.long)
    with torch.no_grad():
        layers = model(first, past_key_values=DynamicCache(config=model.config), use_cache=True).past_key_values.layers
        past = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
        free = torch.export.Dim.AUTO
        sizes: Any = ({0: free, 1: free},) * 3 + ({0: free}, [({0: free, 2: free},) * 2 for _ in past])
        # One tensor given twice would become one input.
        inputs = (first, torch.ones(2, 6, dtype=torch.long), first.clone(), torch.tensor([1, 2]), past)
        program = torch.export.export(Step(model), inputs, dynamic_shapes=sizes)
    with warnings.catch_warnings():  # from inside the converter, about torch's trees
        warnings.filterwarnings("ignore", ".*(LeafSpec|TreeSpec).*", FutureWarning)
        graph = openvino.convert_model(program)
    shapes = [[tensor.shape[1], tensor.shape[3]] for layer in past for tensor in layer]
    own = graph.get_parameters()
    if len(own) != 4 + len(shapes) or len(graph.outputs) != 1 + len(shapes):
        raise RuntimeError(f"OpenVINO kept {len(own)} of {4 + len(shapes)} inputs")
    # Rows are picked before each use of the past: by that the CPU plugin knows a cache, and keeps it in its attention.
    from_row = opset13.parameter([-1], numpy.int32, name="from_row")
    for parameter, name in zip([*own[:4], from_row], ("tokens", "seen", "places", "kept", "from_row"), strict=False):
        parameter.output(0).get_tensor().set_names({name})
    graph.add_parameters([from_row])
    axis, pairs = opset13.constant(0, dtype=numpy.int64), {}
    for number, ((heads, size), parameter) in enumerate(zip(shapes, own[4:], strict=True)):
        parameter.set_partial_shape(openvino.PartialShape([-1, heads, -1, size]))
        users = parameter.output(0).get_target_inputs()
        picked = opset13.gather(parameter, from_row, axis)
        for user in users:
            user.replace_source_output(picked.output(0))
        parameter.output(0).get_tensor().set_names({f"past.{number}"})
        graph.outputs[1 + number].get_tensor().set_names({f"present.{number}"})
        pairs[f"past.{number}"] = f"present.{number}"
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, pairs)
    rows = opset13.gather(opset13.shape_of(own[0], output_type="i64"), opset13.constant([0], dtype=numpy.int64), axis)
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":  # what it is before a text: as many rows as are given, no tokens
            shape = node.get_output_partial_shape(0)
            rest = numpy.array([shape[1].get_length(), 0, shape[3].get_length()])
            empty = opset13.broadcast(opset13.constant(numpy.float32(0)), opset13.concat([rows, rest], 0))
            node.set_arguments([empty])
    graph.validate_nodes_and_infer_types()
    return graph


def openvino_joined(graph: Any) -> Any:
    """The graph with products of the same values, as those of queries, keys and values, as one product that is cut up.

    A token's products are so small that each costs as much to begin as to compute. The sums of each row are the same,
    and so are its scales where the weights are rounded.
    """
    import numpy
    from openvino import opset13

    alike: dict[tuple[str, int], list[Any]] = {}
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "MatMul" or node.input_value(1).get_node().get_type_name() != "Constant":
            continue
        given, how = node.input_value(0), node.get_attributes()
        if how["transpose_b"] and not how["transpose_a"] and len(node.input_value(1).get_shape()) == 2:
            alike.setdefault((given.get_node().get_friendly_name(), given.get_index()), []).append(node)
    for nodes in alike.values():
        if len(nodes) > 1:
            weights = [node.input_value(1).get_node().data for node in nodes]
            product = opset13.matmul(nodes[0].input_value(0), opset13.constant(numpy.concatenate(weights)), False, True)
            lengths = opset13.constant(numpy.array([len(rows) for rows in weights]))
            parts = opset13.variadic_split(product, opset13.constant(numpy.int64(-1)), lengths)
            for node, part in zip(nodes, parts.outputs(), strict=True):
                for user in node.output(0).get_target_inputs():
                    user.replace_source_output(part)
    graph.validate_nodes_and_infer_types()
    return graph


def openvino_four_bits(graph: Any) -> list[str]:
    """Put the weights of products into 4 bits, with a scale and a zero for each 32 of a row; the products' names.

    The zero is no whole number, so that the least and the greatest of the 32 stay what they are: what was rounded to 4
    bits by blocks before, as in a file of llama.cpp's type Q4_1, comes out as it was. A head keeps its weights.
    """
    import numpy
    import openvino
    from openvino import opset13

    found = []
    outputs = {result.input_value(0).get_node().get_friendly_name() for result in graph.get_results()}
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "MatMul" or node.input_value(1).get_node().get_type_name() != "Constant":
            continue
        weights = node.input_value(1).get_node().data
        of_rows = node.get_attributes()["transpose_b"] and weights.ndim == 2 and weights.shape[1] % 32 == 0
        if not of_rows or node.get_friendly_name() in outputs:
            continue
        blocks = weights.reshape(len(weights), -1, 32)
        least = blocks.min(2, keepdims=True)
        scale = ((blocks.max(2, keepdims=True) - least) / 15).astype(numpy.float16)
        scale[scale == 0] = 1
        steps = numpy.rint((blocks - least) / scale).clip(0, 15).astype(numpy.uint8).ravel()
        packed = openvino.Tensor(openvino.Type.u4, openvino.Shape(list(blocks.shape)))
        packed.data.ravel()[:] = steps[0::2] | steps[1::2] << 4
        value = opset13.convert(opset13.constant(packed), "f16")
        value = opset13.subtract(value, opset13.constant((-least / scale).astype(numpy.float16)))
        value = opset13.multiply(value, opset13.constant(scale))
        value = opset13.reshape(value, opset13.constant(numpy.array(weights.shape)), False)
        node.input(1).replace_source_output(opset13.convert(value, "f32").output(0))
        found.append(node.get_friendly_name())
    graph.validate_nodes_and_infer_types()
    return found


def openvino_text_model(model: Any, bits: int) -> Any:
    """The model as OpenVINO's stateful one. The weights of its products are in 8 bits, a scale for each row, or in 4
    (`openvino_four_bits`), where what has no such blocks, tables and the head are in 8; with 0 `bits` as they are.
    Without data: nothing is calibrated."""
    graph = openvino_joined(openvino_stateful(model))
    if not bits:
        return graph
    import logging

    import nncf

    logging.getLogger("nncf").setLevel(logging.WARNING)
    done = nncf.IgnoredScope(names=openvino_four_bits(graph) if bits == 4 else [])
    return nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=done)


class OpenvinoText:
    """Reads prompts and goes on with a stateful model of OpenVINO on the CPU.

    `bits` are those of the weights, 0: as `precision` (``bf16`` or ``f32``) has them. What comes into a product is
    rounded to 8 bits by a scale for each `group` of its numbers; 0: it is not. Keys and values are in 8 bits with
    `few_bits_kept`. What a model forgets stays where it is and is not looked at any more.
    """

    def __init__(self, model: Any, precision: str, bits: int = 0, group: int = 0, few_bits_kept: bool = False) -> None:
        graph = openvino_text_model(model.float().eval(), bits)
        config = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
            "KV_CACHE_PRECISION": "u8" if few_bits_kept else precision,
        }
        half = 2 if precision == "bf16" else 1
        self.weight_bytes = self.bytes_read(graph) if bits else self.bytes_read(graph) // half
        kept = [node.get_output_partial_shape(0) for node in graph.get_ops() if node.get_type_name() == "ReadValue"]
        token_bytes = sum(int(shape[1].get_length() * shape[3].get_length()) for shape in kept)
        self.token_bytes = token_bytes if few_bits_kept else token_bytes * 4 // half
        self.request = openvino_core().compile_model(graph, "CPU", config).create_infer_request()
        self.seen = self.places = torch.zeros(0, 0, dtype=torch.long)

    @staticmethod
    def bytes_read(graph: Any) -> int:
        """Bytes of the weights of all products."""
        waiting = [node.input_value(1).get_node() for node in graph.get_ops() if node.get_type_name() == "MatMul"]
        found = {}
        while waiting:
            node = waiting.pop()
            if node.get_type_name() == "Constant":
                found[node.get_friendly_name()] = node.get_byte_size()
            elif node.get_type_name() in ("Convert", "Multiply", "Subtract", "Reshape", "Transpose"):
                waiting += [value.get_node() for value in node.input_values()]
        return sum(found.values())

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self.seen.numel() * self.token_bytes

    def prefill(self, room: int = 0, *, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        """Read a prompt: scores [rows, vocabulary] of the first new token."""
        self.request.reset_state()
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        self.seen, self.places = seen[:, :0], seen.cumsum(1).sub(1).clamp(min=0)
        return self.ahead(input_ids, seen, self.places, 1)[:, -1]

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Go on with `tokens` [rows, k]: scores [rows, k, vocabulary] of the token after each."""
        count = tokens.shape[1]
        self.places = self.places[:, -1:] + torch.arange(1, count + 1)
        return self.ahead(tokens, torch.ones_like(tokens), self.places, count)

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens."""
        self.places = self.places - count
        at = self.seen.shape[1]
        left = count
        while left:  # of those that are not forgotten already; all rows forget alike
            at -= 1
            left -= int(self.seen[0, at])
            self.seen[:, at] = 0

    def ahead(self, tokens: torch.Tensor, seen: torch.Tensor, places: torch.Tensor, last: int) -> torch.Tensor:
        """One call of the model: the scores of the `last` tokens."""
        self.seen = torch.cat([self.seen, seen], 1)
        given = {
            "tokens": tokens, "seen": self.seen, "places": places,
            "kept": torch.arange(tokens.shape[1] - last, tokens.shape[1]),
            "from_row": torch.arange(len(tokens), dtype=torch.int32),
        }  # fmt: skip
        self.request.infer({name: value.contiguous().numpy() for name, value in given.items()}, share_inputs=True)
        return torch.from_numpy(self.request.get_output_tensor(0).data.copy())


TEXT = (
    openvino_core, Step, openvino_stateful, openvino_joined, openvino_four_bits, openvino_text_model, OpenvinoText,
)  # fmt: skip
