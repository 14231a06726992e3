"""What executes the model: torch, torch's ahead-of-time compiler, or another runtime that the model is exported to."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
import torch

from fettle.recipe import factor_name
from fettle.techniques._algebra import ALGEBRA
from fettle.techniques._base import Bundle, Code, Facts, Learned, Level, Recipe, Technique, register
from fettle.techniques._exported import Exported, exported_program, flatten, loads_cuda_libraries
from fettle.techniques._openvino import MODEL, openvino_engine, openvino_streams_engine
from fettle.techniques._openvino_int8 import CALIBRATED, CHOOSING
from fettle.techniques._openvino_text import TEXT
from fettle.techniques._tensorrt import tensorrt_engine, tensorrt_files, tensorrt_runner
from fettle.techniques.compile import mode_options
from fettle.workload import spread


def aoti_files(flat: torch.nn.Module, tensors: Any, free: Any, options: Any, folder: str) -> None:
    """Compile the model ahead of time by AOTInductor, to ``model.pt2`` in a folder."""
    program = exported_program(flat, tensors, free)
    if any(tensor.is_cuda for tensor in tensors):
        options = {**options, "aot_inductor.weight_use_caching_allocator": True}  # else torch does not count it
    torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2", inductor_configs=options)


def aoti_engine(flat: torch.nn.Module, tensors: Any, free: Any, options: Any) -> Any:
    """The model compiled ahead of time to a shared library."""
    import tempfile

    # The library assumes without a check that inputs lie in memory as the examples did.
    last, plain = torch.channels_last, torch.contiguous_format
    layouts = [last if not t.is_contiguous() and t.is_contiguous(memory_format=last) else plain for t in tensors]

    def laid_out(values: Any) -> Any:
        return [value.contiguous(memory_format=layout) for value, layout in zip(values, layouts, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        aoti_files(flat, laid_out(tensors), free, options, folder)
        runner = torch._inductor.aoti_load_package(f"{folder}/model.pt2")
    return lambda values: runner(*laid_out(values))


def exported_engine(flat: torch.nn.Module, tensors: Any, free: Any, options: Any) -> Any:
    """The model exported to one graph, without guards and breaks, which torch.compile compiles."""
    if any(free):
        raise RuntimeError("a CUDA graph has one size")
    graph: Any = flat
    if not isinstance(flat, torch.fx.GraphModule):
        graph = exported_program(flat, tensors).module(check_guards=False)
    compiled: Any = torch.compile(graph, options=options)
    if not options.get("triton.cudagraphs"):
        return lambda values: compiled(*values)
    return lambda values: [result.clone() for result in compiled(*values)]  # the next call writes into the same memory


def onnx_files(flat: torch.nn.Module, tensors: Any, free: Any, options: Any, folder: str) -> None:
    """Export the model to ``model.onnx`` in a folder, the weights beside it: one file may not exceed 2 GB."""
    program: Any = torch.onnx.export(exported_program(flat, tensors, free), dynamo=True, verbose=False, **options)
    program.save(f"{folder}/model.onnx", external_data=True)


def onnxruntime_engine(flat: torch.nn.Module, tensors: Any, free: Any) -> Any:
    """The model exported to ONNX and run by ONNX Runtime."""
    import tempfile

    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    cuda = next((tensor.device.index for tensor in tensors if tensor.is_cuda), None)
    gpu: Any = ("CUDAExecutionProvider", {"device_id": cuda})
    providers = ["CPUExecutionProvider"] if cuda is None else [gpu]
    with tempfile.TemporaryDirectory() as folder:
        onnx_files(flat, tensors, free, {"optimize": True}, folder)
        session = onnxruntime.InferenceSession(f"{folder}/model.onnx", options, providers=providers)
    names = [item.name for item in session.get_inputs()]
    if len(names) != len(tensors):
        raise RuntimeError(f"ONNX export kept {len(names)} of {len(tensors)} inputs")

    def run(values: Any) -> Any:
        feed = {name: value.detach().contiguous().numpy() for name, value in zip(names, values, strict=True)}
        return [torch.from_numpy(result) for result in session.run(None, feed)]

    def run_cuda(values: Any) -> Any:
        binding = session.io_binding()
        kept = [value.detach().contiguous() for value in values]  # alive until the run is over
        for name, value in zip(names, kept, strict=True):
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.from_dlpack(value))
        for item in session.get_outputs():
            binding.bind_output(item.name, "cuda", cuda)
        torch.cuda.current_stream().synchronize()  # the session has a stream of its own
        session.run_with_iobinding(binding)
        return [torch.utils.dlpack.from_dlpack(value) for value in binding.get_outputs()]

    return run if cuda is None else run_cuda


def computes_in_torch(recipe: Recipe) -> bool:
    """Whether the kernels are torch's own, which go by its settings, or another runtime's."""
    return recipe.levels.get("runtime", "torch") in ("torch", "aoti", "exported")


def openvino_precision(level: str, cpu_flags: Collection[str]) -> str:
    """OpenVINO's precision hint: what int8 leaves in floating point is bfloat16 where the CPU has it."""
    return "bf16" if {"amx_bf16", "avx512_bf16"} & set(cpu_flags) and level != "openvino" else "f32"


def int8_part(facts: Facts) -> dict[str, Any]:
    """What ``openvino-int8-part`` goes by: the layers chosen earlier, or below which error they are to be chosen."""
    key = factor_name("int8_layers", facts.part)
    return {
        "key": key,
        "layers": list(facts.learned.get(key, ())),
        "limit": round(_SHARE * facts.max_error, 6),
        "hint": openvino_precision("openvino-int8-part", facts.cpu_flags),
    }


AS_GIVEN = {"attention": "as-is", "channels_last": "off", "cudnn_benchmark": "off"}
"""Another runtime has its own attention, layout and choice of kernels: the usual levels are kept out of its bundles."""
NOT_WHOLE = "it is for a causal model of transformers in which every layer keeps every token"
STATEFUL = "openvino-stateful"
STATEFUL_WEIGHTS = {"as-given": (0, 0), "int8": (8, 0), "int8-dynamic": (8, 32), "int4": (4, 32)}
"""The levels of the technique weights that it has: bits, and how many numbers of a token are rounded by one scale."""
_LAYERS = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]], msgspec.Meta(max_length=1 << 16)]
"""Layers by their place in the graph."""
_OPENVINO = frozenset({"openvino", "openvino-bf16", "openvino-bf16-sums", "openvino-int8", "openvino-int8-part"})
_RUN_BY = {
    "openvino": ("openvino", "nncf"), "onnxruntime": ("onnxruntime", "onnxruntime-gpu", "onnx", "onnxscript"),
    "tensorrt": ("torch_tensorrt",),
}  # fmt: skip
"""Packages by the kind of runtime."""
_OWN_SHAPES = 4
"""From more shapes on that are known beforehand one engine is built for any size, and none for each shape."""
_SHARE = 0.9
"""Of the limit on the error: batches that layers were chosen on flatter the choice, and others judge it."""


@register
class Runtime(Technique):
    name = "runtime"
    order = 650
    title = "runtime"
    default = "torch"
    of_module = True
    cost = 2
    calibrated = frozenset({"openvino-int8", "openvino-int8-part"})
    compiles = frozenset({"aoti", "exported"})
    exports = frozenset({*_OPENVINO, "aoti", "exported", "onnxruntime", "tensorrt"})
    records = frozenset({"exported"})
    learns = Learned("int8_layers", frozenset({"openvino-int8-part"}), _LAYERS)
    shared_failures: ClassVar[Mapping[str, frozenset[str]]] = {
        "torch.export cannot take this model": exports,
        "No conversion rule": _OPENVINO | {STATEFUL},
    }
    remarks: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (*_OPENVINO, "aoti", "onnxruntime"),
        "Inputs of another shape are converted when they first come, which takes about as long as the first start; "
        "after four shapes one program answers all others.",
    )
    packages = (*(name for names in _RUN_BY.values() for name in names), "transformers")

    def levels(self, facts: Facts) -> list[Level]:
        cannot, text = why_not_exported(facts), facts.no_text
        if facts.generates and (facts.sees_part or facts.keeps not in ("static", "whole")):
            text = NOT_WHOLE
        elif facts.masks_alone:
            text = "the model makes its own mask or knows no positions, as with ALiBi, and the runtime gives it both"
        cpu = "" if facts.device == "cpu" else f"the work is on {facts.device}, and this level runs on the CPU"
        cuda = facts.not_nvidia if facts.device == "cuda" else "TensorRT needs a CUDA device"
        gpu = "" if facts.device == "cuda" else "it is for GPUs: on a CPU runtime=aoti compiles an exported model"
        kernels = cpu or _missing(facts, "openvino") or facts.cannot_run.get("openvino", "")
        openvino, stateful = cannot or kernels or _not_float32("openvino", facts), text or kernels
        bf16 = "" if facts.has_bf16 else "this CPU has no bfloat16 instructions"
        data = facts.uncalibrated
        onnx = facts.not_nvidia or (_missing(facts, "onnxruntime-gpu") if facts.device == "cuda" else cpu)
        onnx = onnx or ("" if "onnxruntime-gpu" in facts.packages else _missing(facts, "onnxruntime"))
        onnx = onnx or _missing(facts, "onnx") or _missing(facts, "onnxscript")
        onnx = onnx or ("" if facts.device == "cuda" else facts.cannot_run.get("onnxruntime", ""))
        onnx = onnx or _not_float32("onnxruntime", facts)
        crashes = (
            "" if facts.device != "cuda" or loads_cuda_libraries() else "torch 2.11 crashes when it loads one for CUDA"
        )
        return [
            Level("torch", "as given"),
            Level("openvino-bf16", "OpenVINO, computing in bfloat16", openvino or bf16),
            Level("openvino-bf16-sums", "OpenVINO, bfloat16 in the sums between layers too", openvino or bf16),
            Level("openvino-int8", "OpenVINO, int8 calibrated by NNCF", openvino or _missing(facts, "nncf") or data),
            Level("openvino-int8-part", "OpenVINO, int8 in as many layers as the error allows", openvino or data),
            Level("openvino", "OpenVINO, computing in float32", openvino),
            Level(STATEFUL, "OpenVINO, which keeps keys and values from token to token", stateful),
            Level("aoti", "AOTInductor: compiled ahead of time to a shared library", cannot or crashes),
            Level("exported", "exported to one graph, compiled, launched as a CUDA graph", cannot or gpu),
            Level("onnxruntime", "ONNX Runtime", cannot or onnx),
            Level("tensorrt", "TensorRT", cannot or cuda or _missing(facts, "torch_tensorrt")),
        ]

    def level_cost(self, level: str) -> int:
        # Converting it takes as long as the model as given writes a few texts, and it is judged on texts.
        return 1 if level == STATEFUL else self.cost

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        levels = recipe.levels
        precision, quantize = levels.get("precision", "fp32"), levels.get("quantize", "none")
        if level.startswith("openvino") or level == "onnxruntime":
            if precision != "fp32":
                return f"precision={precision} is torch's; this runtime takes a float32 model"
            if quantize != "none":
                return f"quantize={quantize} uses operators that only torch has"
        if level == STATEFUL and levels.get("kv_cache", "as-given") not in ("as-given", "int8"):
            return "the runtime keeps keys and values itself: needs kv_cache=as-given or int8"
        if level in ("tensorrt", "aoti", "exported") and quantize not in ("none", "int8-static"):
            return f"a model with quantize={quantize} cannot be exported to it"
        if level == "tensorrt" and precision.startswith("autocast"):
            return "TensorRT does not see autocast"
        if levels.get("sparsity", "none") != "none":
            return "sparse weights cannot be exported"
        return ""

    def unpackaged(self, level: str, recipe: Recipe, facts: Facts) -> str:
        why = f"its model keeps keys and values between calls, which a stored one may not. {self.tune_without()}"
        return why if level == STATEFUL else _not_float32(level, facts) or self.conflict(level, recipe, facts)

    def kind(self, level: str) -> str:
        return level.partition("-")[0]

    def packages_of(self, level: str) -> tuple[str, ...]:
        return (*_RUN_BY.get(self.kind(level), ()), "transformers")

    def bundles(self, facts: Facts) -> list[Bundle]:
        if facts.generates:
            places = {"int8-dynamic": 10}
            if not facts.has_block_products:  # those products are faster and more exact
                places |= {"int8": 12, "int4": 45, "as-given": 55}
            return [
                Bundle(place, {"runtime": STATEFUL, "weights": level, **AS_GIVEN}) for level, place in places.items()
            ]
        if facts.device == "cuda":
            return [Bundle(70, {"runtime": "tensorrt", **AS_GIVEN})]
        places = {"openvino": 10, "openvino-int8": 40, "openvino-int8-part": 50, "onnxruntime": 70}
        if facts.has_bf16:
            places = {"openvino-bf16": 10, "openvino-int8-part": 20, "openvino-bf16-sums": 40, "openvino-int8": 50}
        # Only transformers have many residual sums. Where a model's are in bfloat16 already, the level itself refuses.
        if not (facts.uses_sdpa or facts.manual_attention):
            places.pop("openvino-bf16-sums", None)
        if facts.num_linear + facts.num_conv <= 8:  # choosing layers takes a minute: not for few products
            places.pop("openvino-int8-part")
        found = [Bundle(place, {"runtime": level, **AS_GIVEN}) for level, place in places.items()]
        frozen = Bundle(120, {"precision": "bf16", "runtime": "aoti", "freeze": "on"})
        return [*found, frozen] if facts.has_bf16 else found

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        hint = openvino_precision(level, facts.cpu_flags)
        if level == STATEFUL:
            bits, group = STATEFUL_WEIGHTS[recipe.levels.get("weights", "as-given")]
            kept = ", few_bits_kept=True" if recipe.levels.get("kv_cache") == "int8" else ""
            return Code(helpers=TEXT, decoder=f'OpenvinoText(model, "{hint}", bits={bits}, group={group}{kept})')
        fewer = recipe.levels.get("algebra", "as-given") != "as-given"
        shared: tuple[Any, ...] = (spread, flatten, exported_program, Exported, *(ALGEBRA if fewer else ()))
        flat, part = "fewer_products(flat, tensors)" if fewer else "flat", ""
        own = ", batches, own=1" if facts.num_input_shapes > _OWN_SHAPES else ""
        engines: tuple[Any, ...]  # the last of them builds the engine, and is given `more`
        if level == "aoti":
            options = {"freezing": True} if recipe.levels.get("freeze") == "on" else {}
            engines, more = (aoti_files, aoti_engine), f"free, {options}"
        elif level == "exported":
            graphs = "reduce-overhead" if recipe.levels.get("cuda_graphs", "off") == "off" else "default"
            engines, more, own = (exported_engine,), f"free, {mode_options(graphs)}", ""
        elif level == "tensorrt":
            engines, more = (tensorrt_files, tensorrt_runner, tensorrt_engine), "free"
        elif level == "onnxruntime":
            engines, more = (onnx_files, onnxruntime_engine), "free"
        else:
            engine: Any = openvino_streams_engine if recipe.levels.get("streams") == "per-core" else openvino_engine
            engines = (*(CALIBRATED if level in self.calibrated else ()), *MODEL, engine)
            more = f'"{hint}", samples, "{level}", free'
            own = own or (", batches" if level in self.calibrated else "")
            if level == "openvino-int8-part":
                engines, more, part = (*CHOOSING, *engines), f"{more}, part", f"part = {int8_part(facts)}"
        build = f"lambda flat, tensors, samples, free: {engines[-1].__name__}({flat}, tensors, {more})"
        made = f"model = Exported(model, {build}{own})"
        return Code(helpers=(*shared, *engines), prepare=(part, made) if part else (made,))


@register
class Streams(Technique):
    """Which engine the runtime is: its lines are `Runtime.code`'s."""

    name = "streams"
    order = 660
    title = "streams"
    default = "one"
    served = False
    of_module = True
    needs: ClassVar[Mapping[str, str]] = {"runtime": "openvino"}  # which every CPU can, with bfloat16 or without
    cost = 2
    helps_when_shared = True

    def levels(self, facts: Facts) -> list[Level]:
        why_not = Runtime().why_not("openvino", facts)
        if facts.samples < 2:
            why_not = "a batch of one row cannot be cut"
        elif facts.physical_cores < 2:
            why_not = "there is one core"
        return [
            Level("one", "all cores work on each operator of the whole batch"),
            Level("per-core", "the batch is cut into a part for each thread, computed on its own core", why_not),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        runtime = recipe.levels.get("runtime", "torch")
        if not runtime.startswith("openvino"):
            return "only OpenVINO runs several parts of a batch at once here: needs runtime=openvino..."
        return "a text is written by one request" if runtime == STATEFUL else ""

    def bundles(self, facts: Facts) -> list[Bundle]:
        return [Bundle(60, {"runtime": "openvino-bf16", "streams": "per-core", **AS_GIVEN})] if facts.has_bf16 else []


_EXTRAS = {"openvino": "openvino", "nncf": "openvino", "onnxruntime": "onnx", "onnx": "onnx", "onnxscript": "onnx"}


def _not_float32(level: str, facts: Facts) -> str:
    """Why a runtime cannot take weights in the type that they have, as a phrase; empty where it can."""
    no_bf16 = level == "onnxruntime" and facts.device == "cpu" and facts.dtype == "bfloat16"
    others = level.startswith("openvino") and facts.dtype != "float32"
    return f"the weights are {facts.dtype}; this runtime takes a float32 model" if no_bf16 or others else ""


def why_not_exported(facts: Facts) -> str:
    """Why a model cannot be exported, as a phrase; empty where it may."""
    if not facts.is_module:
        return "the model is a plain callable"
    if facts.is_scripted:
        return "the model is TorchScript, which torch.export does not take"
    if facts.custom_call:
        return "the workload has a call of its own, and an exported model has only its forward"
    if facts.changes_buffers:
        return "the model changes its own buffers when it is called, and in an exported model they stay the same"
    if facts.changes_inputs:
        return facts.no_copies
    if facts.shapes_vary:
        return "each input calls it in other shapes, and an exported model has one"
    return facts.not_exported


def _missing(facts: Facts, package: str) -> str:
    where = f": it is in the extra {_EXTRAS[package]}" if package in _EXTRAS else ""
    return "" if package in facts.packages else f"{package} is not installed{where}"
