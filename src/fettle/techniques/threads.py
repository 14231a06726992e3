"""How many CPU threads one operator uses."""

from fettle.techniques._base import BOTH, Bundle, Code, Facts, Level, Recipe, Technique, register


@register
class Threads(Technique):
    name = "threads"
    order = 100
    modes = BOTH
    rung = 9
    title = "CPU threads"
    default = "as-given"
    served = False
    changes_memory = False
    helps_when_shared = True

    def every_level(self) -> list[str]:
        return [self.default, *(str(count) for count in range(1, 257))]

    def levels(self, facts: Facts) -> list[Level]:
        counts = sorted({1, facts.physical_cores // 2, facts.physical_cores} - {0})
        gpu = "the work is on a GPU" if facts.device != "cpu" else ""
        same = {facts.threads: "it is what torch chooses here"}
        return [Level("as-given", "torch's own choice")] + [
            Level(str(count), f"torch.set_num_threads({count})", gpu or same.get(count, "")) for count in counts
        ]

    def why_not(self, level: str, facts: Facts) -> str:
        return "" if level.isdigit() else super().why_not(level, facts)  # any number, where it is asked for

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        runtime = recipe.levels.get("runtime", "torch")
        is_torchs = runtime in ("torch", "aoti")
        return "" if is_torchs else f"runtime={runtime} has as many threads as torch begins with: set OMP_NUM_THREADS"

    def bundles(self, facts: Facts) -> list[Bundle]:
        # Several threads of a compiled `index_add` add atomically, number by number.
        atomic = facts.mode == "inference" and facts.adds_by_index and facts.threads > 1
        return [Bundle(40, {"compile": "default", "threads": "1"})] if atomic else []

    def kind(self, level: str) -> str:
        return f"{level} threads"

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        # OMP_NUM_THREADS too: Inductor and MKL size their pools by it when the process starts.
        return Code(environment={"OMP_NUM_THREADS": level}, setup=(f"torch.set_num_threads({level})",))
