"""How a prompt is read: in one call, or in pieces one after the other (chunked prefill).

What a layer makes of all tokens of a long prompt takes memory for all of them at a time, in pieces for one piece; its
keys and values are kept either way.
"""

from fettle.techniques._base import Code, Facts, Level, Recipe, Technique, register

PIECES = (256, 1024)


@register
class Prefill(Technique):
    name = "prefill"
    order = 657
    title = "prompts"
    default = "whole"
    served = False

    def levels(self, facts: Facts) -> list[Level]:
        why_not = facts.no_text
        if facts.keeps == "own":
            why_not = "the workload's object reads them itself"
        elif facts.keeps == "state":
            why_not = "a state takes a prompt in one call, and then one token at a time"

        def too_short(size: int) -> str:
            return f"the longest prompt has {facts.prompt_tokens} tokens" if facts.prompt_tokens < 2 * size else ""

        return [
            Level("whole", "each in one call"),
            *(Level(str(size), f"{size} tokens at a time", why_not or too_short(size)) for size in PIECES),
        ]

    def only_saves_memory(self, level: str, recipe: Recipe) -> bool:
        return True

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        runtime = recipe.levels.get("runtime", "torch")
        return "" if runtime == "torch" else f"runtime={runtime} reads them itself"

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(setup=(f"Kept.piece = {level}",))
