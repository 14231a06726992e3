"""Fewer CPU threads for the tokens that are written than for the prompt.

A prompt is products, which every core speeds up. A new token waits for memory, which a part of the cores can keep busy:
the others only have to be waited for.
"""

from typing import Any

import torch

from fettle.techniques._base import Code, Facts, Level, Recipe, Technique, register

PARTS = {"half": 2, "quarter": 4}


def threads_apart(kind: Any, first: int, later: int) -> None:
    """Let decoders of this class read prompts with `first` threads, and go on with `later`."""
    prefill = kind.prefill

    def prefill_apart(self: Any, room: int = 0, **prompt: Any) -> torch.Tensor:
        torch.set_num_threads(first)
        scores: torch.Tensor = prefill(self, room, **prompt)
        torch.set_num_threads(later)
        return scores

    kind.prefill = prefill_apart


@register
class DecodeThreads(Technique):
    name = "decode_threads"
    order = 658
    rung = 9
    title = "CPU threads after the prompt"
    default = "same"
    served = False

    def levels(self, facts: Facts) -> list[Level]:
        why_not = facts.no_text
        if facts.device != "cpu":
            why_not = "the work is on a GPU"
        elif facts.keeps == "own":
            why_not = "the workload's object reads and writes by itself"
        elif facts.physical_cores <= 4:
            why_not = f"there are {facts.physical_cores} cores: too few to leave some out"
        return [Level("same", "as many"), *(Level(part, f"a {part} of them", why_not) for part in PARTS)]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        runtime, threads = recipe.levels.get("runtime", "torch"), _threads(recipe, facts)
        if runtime != "torch":
            return f"runtime={runtime} has a thread pool of its own"
        return "" if threads >= PARTS[level] else f"of {threads} threads there is no {level}"

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        threads = _threads(recipe, facts)
        return Code(helpers=(threads_apart,), setup=(f"threads_apart(Kept, {threads}, {threads // PARTS[level]})",))


def _threads(recipe: Recipe, facts: Facts) -> int:
    """Those that prompts are read with."""
    level = recipe.levels.get("threads", "")
    return int(level) if level.isdigit() else facts.threads or facts.physical_cores
