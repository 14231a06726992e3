"""What torch's threads do when they have nothing to do.

Between parallel loops they look for the next one without pause for some milliseconds, which is the fastest way on where
all loops are torch's own. Where another runtime with threads of its own computes next, they take its cores meanwhile.
"""

from fettle.recipe import factor_name
from fettle.techniques._base import Code, Facts, Level, Recipe, Technique, register

_OWN_THREADS = ("openvino", "onnxruntime")


@register
class WaitPolicy(Technique):
    name = "wait_policy"
    order = 105
    rung = 9
    title = "waiting threads"
    default = "default"
    changes_memory = False

    def levels(self, facts: Facts) -> list[Level]:
        why_not = ""
        if facts.device != "cpu":
            why_not = "the work is on a GPU"
        elif not facts.parts:
            why_not = "torch does nothing beside a runtime that has the whole model"
        elif facts.threads == 1:
            why_not = "torch has one thread"
        return [
            Level("default", "they look for more to do for a while"),
            Level("passive", "they sleep at once, so that another runtime's have the cores", why_not),
        ]

    def is_idle(self, recipe: Recipe) -> bool:
        # A part that torch computes has many loops, and threads that sleep are woken for each.
        runtimes = [recipe.levels.get(factor_name("runtime", part), "torch") for part in recipe.parts]
        return not runtimes or not all(level.startswith(_OWN_THREADS) for level in runtimes)

    def usual(self, facts: Facts) -> str:
        return "passive" if facts.device == "cpu" and facts.parts and facts.threads != 1 else self.default

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(environment={"OMP_WAIT_POLICY": "passive"})
