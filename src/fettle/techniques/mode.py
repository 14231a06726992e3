"""Train or eval mode. Where train mode gives other answers, eval is a precondition of every recipe but the baseline."""

from fettle.techniques._base import Code, Facts, Level, Recipe, Technique, register


@register
class Mode(Technique):
    name = "mode"
    order = 320
    rung = 0
    title = "eval mode"
    default = "as-given"
    served = False

    def levels(self, facts: Facts) -> list[Level]:
        why_not = ""
        if not facts.is_module:
            why_not = "the model is a plain callable"
        elif not facts.training:
            why_not = "the model is in eval mode already"
        return [Level("as-given", "the mode the model came in"), Level("eval", "model.eval()", why_not)]

    def precondition(self, facts: Facts) -> str:
        return "eval" if facts.train_mode_differs else self.default

    def usual(self, facts: Facts) -> str:
        return "eval" if facts.training else self.default

    def is_met(self, level: str, facts: Facts) -> bool:
        return facts.mode == "inference" and not facts.training

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if level == self.default and recipe.levels:
            return "train mode changes the outputs (dropout, batch norm): eval is a precondition, add mode=eval"
        return ""

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(prepare=("model.eval()",))
