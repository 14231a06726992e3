"""What a technique is, and the facts it may look at.

A technique *is* the plain PyTorch lines it stands for: applying a recipe runs the very source that the user is
handed as ``optimized.py`` (see `fettle.techniques._source`), so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fettle.recipe import Recipe


@dataclass(frozen=True)
class Facts:
    """What a probe saw of the workload and the machine: all that decides which levels can be used here.

    Plain data, so that it travels between processes and into reports.
    """

    mode: str = "inference"
    """``inference`` or ``training``: which techniques apply, and what ``optimized.py`` is."""
    device: str = "cpu"
    """Device type of the model's parameters: ``cpu``, ``cuda``, ..."""
    is_module: bool = True
    training: bool = False
    train_mode_differs: bool = False
    """In train mode the outputs differ from eval mode: then eval is a precondition, not a choice."""
    changes_buffers: bool = False
    """A forward pass in eval mode changes the module's buffers: running averages, counters, caches."""
    custom_call: bool = False
    """The workload is called through its own `call`, not ``model(...)``."""
    calibration_batches: int = 0
    dtype: str = "float32"
    """The commonest floating dtype among the parameters, without ``torch.``."""
    num_parameters: int = 0
    parameter_bytes: int = 0
    num_linear: int = 0
    num_conv: int = 0
    num_conv_transpose: int = 0
    num_4d_inputs: int = 0
    """Floating 4-D tensors in the first batch: what channels_last converts."""
    num_input_shapes: int = 1
    """Distinct shapes among the batches."""
    samples: int = 1
    """Rows in one call."""
    block_classes: tuple[str, ...] = ()
    """Qualified class names of submodules repeated at least three times in one ModuleList or Sequential."""
    hf_attention: tuple[str, ...] = ()
    """Attention implementations that a transformers model can be switched to here; the first is the one in use."""
    manual_attention: int = 0
    """Modules whose attention is written out by hand and can be rewritten to SDPA."""
    uses_sdpa: bool = False
    """`scaled_dot_product_attention` was called in a forward pass."""
    physical_cores: int = 1
    threads: int = 0
    """What torch uses as it is given; 0 if not known."""
    cpu_flags: tuple[str, ...] = ()
    """Those of ``avx2, avx512f, avx512_bf16, avx512_vnni, avx512_fp16, amx_bf16, amx_int8, neon, sve`` present."""
    cuda_capability: tuple[int, int] = (0, 0)
    packages: Mapping[str, str] = field(default_factory=dict)
    """Version by distribution name for those installed among torchao, onnxruntime, onnx, onnxscript, openvino,
    tensorrt, torch_tensorrt, triton, diffusers, transformers, nncf."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Path by name for allocators found: jemalloc, tcmalloc; and glibc's version, where it is the C library."""
    allow_batch: bool = False
    """The user lets fettle change the batch size."""
    max_error: float = 0.02
    """The user's limit on the relative error: a level that chooses by the error stays a margin below it."""
    int8_layers: tuple[int, ...] = ()
    """Layers that runtime=openvino-int8-part has chosen already, by their place in the graph; empty: to be chosen."""
    optimizer: str = ""
    """Training: class of the optimizer."""
    optimizer_levels: tuple[str, ...] = ()
    """Training: those of ``foreach``, ``fused`` that the optimizer has."""
    loader_workers: int = -1
    """Training: worker processes of the DataLoader; -1 where the data is none."""
    max_grad_norm: float | None = None
    """Training: what gradients are clipped to."""
    ranks: int = 1
    """Training: how many processes a parallel strategy may use,"""
    nodes: int = 1
    """and on how many machines."""
    largest_batch: int = 0
    """Training: the batch fits this many times over; 0 where that was not looked for."""


@dataclass(frozen=True)
class Level:
    """One level of a technique."""

    name: str
    summary: str
    why_not: str = ""
    """Why this level cannot be used here, as a phrase for the report; empty when it can."""


@dataclass(frozen=True)
class Code:
    """The plain PyTorch lines of one level, by where they stand in ``optimized.py``.

    Statements may use the names `model`, `batches` (sample batches), and in `inputs`/`outputs` `args`, `kwargs` and
    `output`. A helper is a function (or class) whose source is copied into the file: it may use only builtins,
    `torch`, its own imports inside the body, and other helpers listed with it.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that must be set before the process starts or torch is imported."""
    helpers: tuple[Callable[..., Any], ...] = ()
    setup: tuple[str, ...] = ()
    """Process-wide settings, before the model is touched."""
    prepare: tuple[str, ...] = ()
    """Statements that change `model`, in catalogue order."""
    contexts: tuple[str, ...] = ()
    """Expressions of context managers around every call."""
    inputs: tuple[str, ...] = ()
    """Statements that change `args` and `kwargs` before every call."""
    outputs: tuple[str, ...] = ()
    """Statements that change `output` after every call, last technique first."""

    # In a training loop `contexts` are around ``loss(model, batch)``, `prepare` may also change `parameters` and
    # `data`, and these have a place of their own. Of the last five the last technique that has one
    # decides.
    optimizer: tuple[str, ...] = ()
    """Statements after `optimizer` was made."""
    batch: tuple[str, ...] = ()
    """Statements that change `batch`."""
    before_step: tuple[str, ...] = ()
    after_step: tuple[str, ...] = ()
    parts: str = ""
    """An expression of `batch`: the equal parts that are run one after the other in one step."""
    backward: str = ""
    step: tuple[str, ...] = ()
    zero_grad: str = ""
    clipped: str = ""
    """A name in place of `parameters`: those whose gradients are clipped."""


class Technique:
    """One thing that can be changed. A subclass is one file in this folder; see CONTRIBUTING for the contract."""

    name: ClassVar[str]
    title: ClassVar[str]
    """For people: what the report calls it."""
    given: ClassVar[str]
    """The level that stands for the workload as it was given; a recipe that holds it is the same without it."""
    needs: ClassVar[Mapping[str, str]] = {}
    """Levels of other techniques that this one cannot do without: the search adds them to a move."""
    cost: ClassVar[int] = 1
    """What a trial costs to start: 1 seconds, 2 tens of seconds (a compile or export), 3 minutes (autotuning)."""

    calibrated: ClassVar[frozenset[str]] = frozenset()
    """Levels that look at the values of `batches`: such batches must not judge them."""
    modes: ClassVar[frozenset[str]] = frozenset({"inference"})
    """Where it applies: ``inference``, ``training``."""
    rung: ClassVar[int] = 5
    """Where a ladder of techniques has it: the field's usual order, smaller first, catalogue order among equals."""

    def levels(self, facts: Facts) -> list[Level]:
        """All levels, in the order to try them, the `given` one among them; each says why it cannot be used here."""
        raise NotImplementedError

    def level_cost(self, level: str) -> int:
        """Like `cost`, for one level."""
        return self.cost

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        """Why `level` cannot work beside the rest of `recipe`, as a phrase; empty when it can."""
        return ""

    def is_idle(self, recipe: Recipe) -> bool:
        """Whether its level works and changes nothing beside the rest of `recipe`: a search need not try it there."""
        return False

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        """The lines of `level`, which is not the `given` one. May depend on the other levels of `recipe`."""
        raise NotImplementedError
