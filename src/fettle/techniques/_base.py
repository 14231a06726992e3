"""What a technique is, and the catalogue that all of them are in.

A technique *is* the plain PyTorch lines it stands for: applying a recipe runs the very source that the user is
handed as ``optimized.py`` (see `fettle.techniques._source`), so the two cannot differ.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from fettle.recipe import Recipe
from fettle.techniques._facts import Facts

__all__ = [
    "BOTH", "CATALOGUE", "INFERENCE", "TRAINING", "Bundle", "Code", "Facts", "Learned", "Level", "Recipe", "Technique",
    "register",
]  # fmt: skip

INFERENCE, TRAINING = frozenset({"inference"}), frozenset({"training"})
BOTH = INFERENCE | TRAINING


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
    whole: Code | None = None
    """Of a part of a pipeline: lines of the whole call."""

    decoder: str = ""
    """Where text is written: an expression of `model` that reads prompts and goes on (`fettle.generate.decoding`);
    the last technique that has one decides, as for `writer`."""
    writer: str = ""
    """The function that writes with the `decoder`."""

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


@dataclass(frozen=True)
class Learned:
    """What some levels find out when they are first applied: kept with the trial, the recipe and the package, and
    handed to the level as `Facts.learned` when it is applied again.

    The lines of the level log it: ``logging.getLogger("optimized").info(..., extra={"learned": {key: value}})``, in a
    part of a pipeline under the key that `factor_name` makes of both.
    """

    key: str
    levels: frozenset[str]
    type: Any
    """What msgspec must find it to be in a recipe file, which comes from outside."""


@dataclass(frozen=True)
class Bundle:
    """A combination that is known to work well, so that a search need not find it one step at a time."""

    place: int
    """Among the bundles of all techniques, 10 to 120: what promises most for its cost first, but one of each kind
    before a second, so that where time is short what is left out is like something that was tried."""
    levels: Mapping[str, str]
    """Its levels beside the `usual` ones; the default level of a technique keeps the usual one out."""


class Technique:
    """One thing that can be changed. A subclass is one file in this folder; see CONTRIBUTING for the contract."""

    name: ClassVar[str]
    title: ClassVar[str]
    """For people: what the report calls it."""
    default: ClassVar[str]
    """The level that stands for the workload as it was given; a recipe that holds it is the same without it."""
    order: ClassVar[int]
    """Where its lines stand among those of other techniques, smaller first. 100: the process; 200: the data; 300: the
    libraries and how the model is called; 400: its attention, traced in the type and layout that the sample batches
    have; 500: its weights, type before layout and both before 8 bits; 600: what replaces the forward pass, last of all
    what records it; 700: the optimizer; 800: ranks, around whatever the model has become; 900: the step."""
    modes: ClassVar[frozenset[str]] = INFERENCE
    """Where it applies: ``inference``, ``training``."""
    needs: ClassVar[Mapping[str, str]] = {}
    """Levels of other techniques that this one cannot do without: the search adds them to a move."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Distributions that its levels look for in `Facts.packages`."""
    cost: ClassVar[int] = 1
    """What a trial costs to start: 1 seconds, 2 tens of seconds (a compile or export), 3 minutes (autotuning)."""
    rung: ClassVar[int] = 5
    """Where a ladder of techniques has it: the field's usual order, smaller first, catalogue order among equals."""
    of_module: ClassVar[bool] = False
    """Whether it is set for each part of a pipeline, and not for the whole call or the process."""
    calibrated: ClassVar[frozenset[str]] = frozenset()
    """Levels that look at the values of `batches`: such batches must not judge them."""
    compiles: ClassVar[frozenset[str]] = frozenset()
    """Levels that need a C++ compiler where they run; Triton's kernels do, too."""
    exports: ClassVar[frozenset[str]] = frozenset()
    """Levels that have torch export the model."""
    records: ClassVar[frozenset[str]] = frozenset()
    """Levels whose calls on a GPU are CUDA graphs: such a call can be part of no other."""
    learns: ClassVar[Learned | None] = None
    remarks: ClassVar[Mapping[str, str]] = {}
    """By level, a sentence for whoever is going to use it."""
    shared_failures: ClassVar[Mapping[str, frozenset[str]]] = {}
    """By a text in the reason of a failure, the levels that it lets fail one like another: after two, none is tried."""
    changes_memory: ClassVar[bool] = True
    """Whether it changes the device memory that a training step takes by something worth counting."""
    shrinks_states: ClassVar[frozenset[str]] = frozenset()
    """Levels under which parameters, gradients and optimizer state may take less memory than as given: no memory plan
    rules them out."""
    helps_when_shared: ClassVar[bool] = False
    """Its levels may be faster beside a busy neighbour and slower without one: the report says so where they were."""
    served: ClassVar[bool] = True
    """Whether a package holds it. A setting of the process or of the call has its own place in a server."""
    before_export: ClassVar[bool] = False
    """Its lines change the model's own modules, so a package holds what they made: an exported model has none."""
    old_name: ClassVar[str] = ""
    """How earlier versions spelled it: still read."""
    old_levels: ClassVar[Mapping[str, str]] = {}
    """Today's level by the one that earlier versions had under `old_name`, where they differ."""

    # -- what it offers ----------------------------------------------------------------------------------------------

    def levels(self, facts: Facts) -> list[Level]:
        """All levels, in the order to try them, the default among them; each says why it cannot be used here."""
        raise NotImplementedError

    def every_level(self) -> Sequence[str]:
        """The levels that it has on any machine: what a recipe may name."""
        return [level.name for level in self.levels(Facts())]

    def why_not(self, level: str, facts: Facts) -> str:
        """Why `level` cannot be used here whatever stands beside it, as a phrase; empty when it can."""
        known = {item.name: item.why_not for item in self.levels(facts)}
        return known.get(level, f"there is no such level: {', '.join(known)}")

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        """Why `level` cannot work beside the rest of `recipe`, as a phrase; empty when it can. The default is asked
        about only where `precondition` names another level."""
        return ""

    def is_idle(self, recipe: Recipe) -> bool:
        """Whether its level works and changes nothing beside the rest of `recipe`: a search need not try it there."""
        return False

    def only_saves_memory(self, level: str, recipe: Recipe) -> bool:
        """Whether `level` beside the rest of `recipe` is not faster: a search tries it where memory is the goal or
        limited, or where it was named."""
        return False

    def is_met(self, level: str, facts: Facts) -> bool:
        """Whether the workload has `level` already as it was given, so that nothing is left to do."""
        return False

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        """The lines of `level`, which is not the default. May depend on the other levels of `recipe`. None where they
        are part of another technique's lines, which look for `level`."""
        return Code()

    def packages_of(self, level: str) -> Sequence[str]:
        """Those of its `packages` that `level` runs by: other versions of these are other times."""
        return self.packages

    def unpackaged(self, level: str, recipe: Recipe, facts: Facts) -> str:
        """Why a package cannot hold `level` beside the rest of `recipe`, and what to tune instead, as a phrase; empty
        where it can. Of the facts it knows the model's device and type only."""
        return ""

    def tune_without(self, levels: str = "") -> str:
        """The advice that such a phrase ends with: its default, or these levels."""
        return f"Tune without it: fettle tune TARGET --technique {self.name}={levels or self.default}"

    # -- what a search tries -----------------------------------------------------------------------------------------

    def level_cost(self, level: str) -> int:
        """Like `cost`, for one level."""
        return self.cost

    def precondition(self, facts: Facts) -> str:
        """The level without which no recipe gives right answers here; the default where there is none."""
        return self.default

    def usual(self, facts: Facts) -> str:
        """The level that belongs to every bundle here; the default where there is none."""
        return self.default

    def keeps_memory(self, facts: Facts) -> str:
        """The level under which what one call frees is kept for the next; the default where there is none."""
        return self.default

    def bundles(self, facts: Facts) -> Sequence[Bundle]:
        """The combinations that this technique is at the heart of. Those that cannot work here are left out later."""
        return ()

    def kind(self, level: str) -> str:
        """What kind of execution `level` is, where the best of a study should meet one of another kind in the last
        race; empty where that makes no difference."""
        return ""

    # -- what a trial of it takes ------------------------------------------------------------------------------------

    def batch_factor(self, level: str) -> int:
        """How many batches as given are one batch under `level`."""
        return 1

    def uses_ranks(self, level: str) -> bool:
        """Whether `level` runs on all ranks that a study may use, and not on one."""
        return False

    def strategy(self, level: str) -> Mapping[str, str] | None:
        """How a memory plan knows `level`: settings of a parallel strategy, none where it changes no memory; None where
        the plan cannot tell what it takes."""
        return None if self.changes_memory else {}


CATALOGUE: list[Technique] = []
"""All techniques in the order in which they are applied."""

T = TypeVar("T", bound=Technique)


def register(kind: type[T]) -> type[T]:
    """Put a technique into the catalogue: a decorator of its class. Raises ValueError where name or order is taken."""
    technique: Technique = kind()
    for other in CATALOGUE:
        if technique.name == other.name or technique.order == other.order:
            raise ValueError(f"{kind.__name__} has the name or the order of {type(other).__name__}: {other.name}")
    insort(CATALOGUE, technique, key=lambda item: item.order)
    return kind
