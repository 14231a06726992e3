"""Activation checkpointing: forget activations in the forward pass and compute them again in the backward pass.

Sources: `torch.utils.checkpoint` (non-reentrant), its selective policies, and Inductor's activation memory budget.
"""

from typing import Any

import torch

from fettle.techniques._base import TRAINING, Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._ranks import repeated_blocks
from fettle.techniques.compile import During
from fettle.techniques.precision import autocast


def keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The selective policy: keep expensive results (products, convolutions, attention), recompute the rest."""
    from torch.utils.checkpoint import CheckpointPolicy

    expensive = ("mm", "addmm", "bmm", "baddbmm", "convolution", "attention")
    name = str(operator).removeprefix("aten.").partition(".")[0]
    kept = name in expensive or "attention" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_blocks(model: torch.nn.Module, policy: Any = None, compiled: bool = False) -> None:
    """Checkpoint the repeated blocks of a model. Norms change their running averages in the forward pass, and not
    again where it is recomputed; a compiler sees to that by itself."""
    import contextlib
    import functools

    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    contexts: Any = functools.partial(create_selective_checkpoint_contexts, policy) if policy is not None else None

    @contextlib.contextmanager
    def recomputed(norms: list[Any], context: Any) -> Any:
        with contextlib.ExitStack() as after:
            for norm in norms:
                counted = norm.num_batches_tracked
                after.callback(setattr, norm, "num_batches_tracked", counted)
                after.callback(setattr, norm, "momentum", norm.momentum)
                norm.momentum, norm.num_batches_tracked = 0.0, counted if counted is None else counted.clone()
            after.enter_context(context)
            yield

    def of_norms(norms: list[Any]) -> Any:
        first, second = contexts() if contexts else (contextlib.nullcontext(), contextlib.nullcontext())
        return first, recomputed(norms, second)

    blocks = repeated_blocks(model)
    for block in blocks:
        norms = [m for m in block.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase)]
        norms = [norm for norm in norms if norm.track_running_stats and not compiled]
        context_fn = functools.partial(of_norms, norms) if norms else contexts
        options: dict[str, Any] = {"context_fn": context_fn} if context_fn else {}
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    if not blocks:
        raise RuntimeError("checkpointing found no repeated blocks")


@register
class Checkpointing(Technique):
    name = "checkpoint"
    order = 600
    modes = TRAINING
    rung = 8
    title = "activation checkpointing"
    default = "none"

    def levels(self, facts: Facts) -> list[Level]:
        blocks = "" if facts.block_classes else "the model has no repeated block"
        if facts.moving_in_block:
            blocks = f"a block changes {facts.moving_in_block}, and would again where it is recomputed"
        return [
            Level("none", "every activation is kept, as given"),
            Level("blocks", "each repeated block keeps its input only", blocks),
            Level("selective", "each repeated block keeps products, and recomputes what is cheap", blocks),
            Level("budget-0.5", "the compiler keeps half of the activations' bytes, the most expensive to recompute"),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if level.startswith("budget") and recipe.levels.get("compile", "off") == "off":
            return "the compiler decides what is kept: needs compile"
        return ""

    def strategy(self, level: str) -> dict[str, str] | None:
        return {"checkpoint": "block"} if level == "blocks" else None

    def bundles(self, facts: Facts) -> list[Bundle]:
        return [Bundle(120, {**autocast(facts), "compile": "default", "checkpoint": "budget-0.5"})]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        if level.startswith("budget"):
            # Around the call, in which the loss is compiled: other models of the process keep what they had.
            budget = f'budget = During(functorch, "activation_memory_budget", {level.removeprefix("budget-")})'
            lines = ("from torch._functorch import config as functorch", budget)
            return Code(helpers=(During,), setup=lines, contexts=("budget",))
        compiled = "" if recipe.levels.get("compile", "off") == "off" else ", compiled=True"
        policy, helpers = (", keep_products", (keep_products,)) if level == "selective" else ("", ())
        line = f"checkpoint_blocks(model{policy}{compiled})"
        return Code(helpers=(repeated_blocks, *helpers, checkpoint_blocks), prepare=(line,))
