"""The facts that a technique may look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Padding:
    """How the rows of a batch are filled up to one length."""

    mask: str | int
    """The argument [rows, places] that is 1 where a row has something: its name, or its place."""
    axes: tuple[tuple[str | int, int], ...]
    """By name or place of each argument that has the places, their axis in it."""
    share: float
    """Of the places, those that are padding in the first batch."""
    longest: float
    """Its longest row, as a share of the places."""
    whole: tuple[str | int, ...] = ()
    """By name or place, arguments that are no rows: another batch may have as many rows as they have by chance."""
    of_all: bool = False
    """Among the answers is one number for all rows, such as a loss."""
    not_packed: str = ""
    """Why the model's blocks cannot compute rows one after the other without padding, as a phrase; empty where they
    can."""


@dataclass(frozen=True)
class TensorPlan:
    """Which matrices of a model tensor parallelism can split. In names, ``*`` stands for the number of a block."""

    columns: tuple[str, ...] = ()
    """Linear layers that are split by their outputs,"""
    rows: tuple[str, ...] = ()
    """and by their inputs."""
    per_head: tuple[str, ...] = ()
    """Modules between them that stay whole and see only the heads of a rank."""
    attentions: tuple[str, ...] = ()
    """Attention modules that keep their number of heads as an attribute."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What the number of ranks must divide, by what it is."""
    why_not: str = "the model was not looked at"
    """Why nothing can be split, as a phrase."""

    def why_not_over(self, ranks: int) -> str:
        """Why the model cannot be split over `ranks` ranks, as a phrase; empty where it can."""
        uneven = (f"{ranks} ranks do not divide {what}" for what, number in self.counts.items() if number % ranks)
        return self.why_not or next(uneven, "")


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
    is_scripted: bool = False
    """It is TorchScript: a module whose code torch.compile and torch.export cannot see."""
    forward_of_torch: bool = False
    """Its forward is that of one of torch's own classes, such as `Sequential`."""
    training: bool = False
    train_mode_differs: bool = False
    """In train mode the outputs differ from eval mode: then eval is a precondition, not a choice."""
    changes_buffers: bool = False
    """A forward pass in eval mode changes the module's buffers: running averages, counters, caches."""
    changes_inputs: bool = False
    """A forward pass leaves its batch another one: it writes into tensors, takes some out or puts some in."""
    adds_to_inputs: bool = False
    """All that it changes of its batch is that it puts tensors in which are in its answer, too, as a model does that
    answers in the dictionary which it was given."""
    not_exported: str = ""
    """What of its inputs or outputs an exported model cannot have, as a phrase; empty where it can have all."""
    output_types: tuple[str, ...] = ()
    """The floating dtypes among its outputs, without ``torch.``."""
    custom_call: bool = False
    """The workload is called through its own `call`, not ``model(...)``."""
    new_tokens: int = 0
    """Tokens that are written after each prompt; 0 where the workload is no `fettle.GenerationWorkload`."""
    prompt_tokens: int = 0
    """Tokens of the longest prompt that a decoder reads."""
    has_draft: bool = False
    """The workload has a smaller model that guesses what the model will write."""
    draft_fails: str = ""
    """What that says where it cannot forget a wrong guess; empty where it can."""
    row_counts: tuple[int, ...] = ()
    """Rows at which tokens a second are told."""
    keeps: str = ""
    """How its keys and values are kept: ``own`` where the workload's object does that itself, ``static`` where room for
    them can be set aside before, ``whole`` where a later transformers could do that, ``state`` where some layer has
    one in place of them, ``dynamic`` where only the model can make it."""
    forgets: bool = True
    """What writes text can forget the last tokens, those that were guessed wrong."""
    sees_part: bool = False
    """What writes text is an encoder with a decoder, or some of its layers see only the last so many tokens."""
    masks_alone: bool = False
    """What writes text takes no mask that says of each token what it sees, or no positions, as a model with ALiBi."""
    calibration_batches: int = 0
    uncalled: str = ""
    """Why a recipe has no batch on which to look at this part of a pipeline, as a phrase; empty where it has one."""
    dtype: str = "float32"
    """The commonest floating dtype among the parameters, without ``torch.``."""
    not_in_16_bits: str = ""
    """Why a weight that is computed from others cannot be in 16 bits, as a sentence; empty where all can."""
    num_parameters: int = 0
    parameter_bytes: int = 0
    num_linear: int = 0
    uneven_steps: bool = False
    """It has recurrent layers, and its inputs differ in more than their rows."""
    num_conv: int = 0
    num_wide_conv: int = 0
    """Those `Conv2d` that `convolution=products` computes."""
    num_other_conv: int = 0
    """Convolutions that are no `Conv2d`: of one or three dimensions, transposed ones."""
    num_4d_inputs: int = 0
    """Floating 4-D tensors in the first batch: what channels_last converts."""
    is_channels_last: bool = False
    """Whether those, or weights of convolutions, are in that layout already."""
    num_input_shapes: int = 1
    """Distinct shapes among the batches."""
    samples: int = 1
    """Rows in one call."""
    padding: Padding | None = None
    """How rows are padded; None where they are not, or no argument tells."""
    block_classes: tuple[str, ...] = ()
    """Qualified class names of `repeated_blocks`."""
    hf_attention: tuple[str, ...] = ()
    """Attention implementations that a transformers model can be switched to here; the first is the one in use."""
    has_window: bool = False
    """Some layers see only the tokens nearby, as transformers' configuration says, and an input is long enough."""
    manual_attention: int = 0
    """Modules whose attention is written out by hand and can be rewritten to SDPA."""
    fed_alike: tuple[tuple[str, ...], ...] = ()
    """Linear layers that were given the same tensor in each call: the name of their parent, in which ``*`` stands for
    the number of a block, and their own."""
    decomposed_bias: int = 0
    """Modules whose attention has a bias by row and by column, which can be added tile by tile."""
    is_unet: bool = False
    """It is a UNet of diffusers whose outermost blocks can be computed alone."""
    makes_pictures: bool = False
    """It is a VAE's decoder of diffusers."""
    denoiser: tuple[str, int] = ("", 0)
    """Of a denoiser of diffusers: the name of its first argument, and the place of the timestep."""
    cannot_run: Mapping[str, str] = field(default_factory=dict)
    """By kind of runtime, what it cannot compute of a forward pass, as a sentence."""
    adds_by_index: bool = False
    """A forward pass calls `index_add`."""
    uses_sdpa: bool = False
    """`scaled_dot_product_attention` was called in a forward pass."""
    uneven_sdpa: int = 0
    """How often it was, with at most an eighth as many tokens on one side as on the other."""
    physical_cores: int = 1
    threads: int = 0
    """What torch uses as it is given; 0 if not known."""
    cpu_flags: tuple[str, ...] = ()
    """Those of ``avx2, avx512f, avx512_bf16, avx512_vnni, avx512_fp16, amx_bf16, amx_int8, neon, sve`` present."""
    cuda_capability: tuple[int, int] = (0, 0)
    """Of NVIDIA's GPUs; 0, 0 on others."""
    amd: str = ""
    """The architecture of AMD's GPU, such as ``gfx942``; empty elsewhere."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Version by distribution name for those installed among the `Technique.packages` of all techniques."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Path by name for allocators found: jemalloc, tcmalloc; and glibc's version, where it is the C library."""
    allow_batch: bool = False
    """The user lets fettle change the batch size."""
    max_error: float = 0.02
    """The user's limit on the relative error: a level that chooses by the error stays a margin below it."""
    by_metric: bool = False
    """The user's metric alone judges answers, which may then be others than as given."""
    learned: Mapping[str, Any] = field(default_factory=dict)
    """What levels have found out already (`Technique.learns`), by key; what is not there is still to be found out."""
    optimizer: str = ""
    """Training: class of the optimizer."""
    optimizer_levels: tuple[str, ...] = ()
    """Training: those of ``foreach``, ``fused`` that the optimizer has."""
    loader_workers: int = -1
    """Training: worker processes of the DataLoader; -1 where the data is none."""
    iterable_data: bool = False
    """Training: the DataLoader's dataset gives its rows in its own order, to each worker all that it does not share
    out."""
    max_grad_norm: float | None = None
    """Training: what gradients are clipped to."""
    groups_masters: bool = True
    """Training: of other parameters that it is given, the optimizer factory makes the same groups,"""
    groups_shards: bool = True
    """and of those that take the place of the model's own."""
    moving: str = ""
    """Training: a floating buffer or weight that a step changes and does not train. Norms' running averages do not
    count."""
    normalises_rows: bool = False
    """Training: the rows of a batch are normalised together."""
    moving_in_block: str = ""
    """Training: a buffer of a repeated block that a step changes, likewise."""
    ranks: int = 1
    """How many processes a parallel strategy may use,"""
    nodes: int = 1
    """and on how many machines."""
    tensor: TensorPlan = TensorPlan()
    """What tensor parallelism can split of the model."""
    largest_batch: int = 0
    """Training: the batch fits this many times over; 0 where that was not looked for."""

    parts: Mapping[str, Facts] = field(default_factory=dict)
    """A pipeline: the facts of each part, the one that takes most of the time first."""
    part: str = ""
    """Of a part of a pipeline: its name,"""
    shapes_vary: bool = False
    """whether another input calls it in other shapes than the first,"""
    calls: int = 1
    """how often it is called in one call of the whole,"""
    seconds: float = 0.0
    """the time of those calls together,"""
    share: float = 1.0
    """and that as a share of the whole call's time."""

    def uneven(self, parts: int) -> str:
        """Why a batch cannot be cut into so many equal parts, as a phrase; empty where it can."""
        return f"a batch of {self.samples} rows cannot be cut into {parts} equal parts" if self.samples % parts else ""

    @property
    def convolves(self) -> bool:
        """Whether the model has convolutions, of whatever kind."""
        return self.num_conv + self.num_other_conv > 0

    @property
    def uncalibrated(self) -> str:
        """Why nothing can be calibrated here, as a phrase; empty where it can."""
        return self.uncalled or ("" if self.calibration_batches else "no batches to calibrate on: give at least two")

    @property
    def generates(self) -> bool:
        """Whether the workload writes text."""
        return self.new_tokens > 0

    @property
    def no_text(self) -> str:
        """Why what is for writing text cannot be used; empty where the workload writes some."""
        return "" if self.generates else "the workload is not a fettle.GenerationWorkload"

    @property
    def no_copies(self) -> str:
        """Why the model cannot be given copies of its inputs; empty where it can."""
        writes = self.changes_inputs and not self.adds_to_inputs
        return "the model writes into what it is given, and would be given a copy" if writes else ""

    @property
    def not_nvidia(self) -> str:
        """Why what only NVIDIA's GPUs have cannot be used; empty on those, and where there is no GPU."""
        return f"it is for NVIDIA's GPUs, and this one is AMD's {self.amd}" if self.amd else ""

    @property
    def has_bf16(self) -> bool:
        """Whether the CPU has bfloat16 instructions."""
        return bool({"amx_bf16", "avx512_bf16"} & set(self.cpu_flags))

    @property
    def has_block_products(self) -> bool:
        """Whether `fettle.kernels.block_products` has a kernel for this CPU."""
        return bool({"avx512_vnni", "avx2"} & set(self.cpu_flags))


def parts_lines(facts: Facts) -> list[tuple[str, int, float, float, int]]:
    """What each part of a pipeline costs in one call as given: name, calls, seconds, share of the time, bytes of its
    parameters. The last is what is done between the parts; empty where the workload names none."""
    rows = [(part, one.calls, one.seconds, one.share, one.parameter_bytes) for part, one in facts.parts.items()]
    if not rows:
        return []
    between = max(0.0, 1 - sum(one.share for one in facts.parts.values()))
    held = sum(one.parameter_bytes for one in facts.parts.values())
    return [*rows, ("between them", 1, between * facts.seconds, between, max(0, facts.parameter_bytes - held))]


def parts_sentence(facts: Facts) -> str:
    """The same in one line: ``as given: image_encoder 91.2%, mask_decoder 8.1% (16 calls), between them 0.6%``."""
    told = [f"{name} {share:.1%}" + (f" ({calls} calls)" if calls > 1 else "")
            for name, calls, _, share, _ in parts_lines(facts)]  # fmt: skip
    return f"time as given: {', '.join(told)}"
