"""The environment that a recipe runs in: a factor of a study, and nothing that could be applied to a model.

It is not in the catalogue, which is what a recipe may name on any machine; its levels are those that a study is given.
"""

from fettle.procs.interpreter import OURS
from fettle.techniques._base import BOTH, Facts, Level, Technique


class _Python(Technique):
    name = "python"
    order = 0
    modes = BOTH
    rung = 0
    title = "Environment"
    default = OURS

    def levels(self, facts: Facts) -> list[Level]:
        return [Level(self.default, "the interpreter that fettle runs by")]


PYTHON = _Python()
"""Its levels other than the default are names of `fettle.procs.interpreter.Interpreter`."""
