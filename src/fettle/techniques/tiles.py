"""Pictures are decoded in overlapping tiles, one after the other, so that the memory of one tile does for all.

Norms see only their tile, so it is another picture, by little; the workload's metric judges it. diffusers' own
`enable_tiling` does the same with tiles of one size, whatever that of the picture.
"""

from typing import Any

import torch

from fettle.techniques._base import Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._pipeline import Part


def is_decoder(module: Any) -> bool:
    """Whether a module is a VAE's decoder of diffusers, which makes pictures of latents."""
    return type(module).__name__ == "Decoder" and type(module).__module__ == "diffusers.models.autoencoders.vae"


class InTiles(Part):
    """A decoder that is run on `count` x `count` tiles of its latents. Neighbours share a quarter of a tile, where each
    counts the more, the further the place is from its edge."""

    def __init__(self, model: Any, count: int) -> None:
        super().__init__(model, model)
        vars(self).update(_count=count)

    def forward(self, sample: Any, *args: Any, **kwargs: Any) -> Any:
        (height, tops), (width, lefts) = map(self._places, sample.shape[-2:])
        whole: Any = None
        total: Any = None
        for top in tops:
            for left in lefts:
                tile = sample[..., top : top + height, left : left + width]
                part = self._part_run(tile, *args, **kwargs)
                rise = part.shape[-1] // width
                weight = self._slope(part, -2)[:, None] * self._slope(part, -1)
                if whole is None:
                    whole = part.new_zeros(*part.shape[:-2], *(rise * size for size in sample.shape[-2:]))
                    total = whole.new_zeros(whole.shape[-2:])
                at = [slice(rise * first, rise * (first + size)) for first, size in ((top, height), (left, width))]
                whole[(..., *at)] += weight * part
                total[tuple(at)] += weight
        return whole / total

    def _places(self, length: int) -> tuple[int, list[int]]:
        """How long a tile is, and where each begins."""
        size = -(-4 * length // (3 * self._count + 1))
        return size, [(length - size) * number // (self._count - 1) for number in range(self._count)]

    def _slope(self, part: Any, axis: int) -> Any:
        """How much each place along an axis counts: less towards both edges."""
        length = part.shape[axis]
        place = torch.arange(length, device=part.device)
        edge = max(1, length // 4)
        return (torch.minimum(place + 1, length - place).clamp(max=edge) / edge).to(part.dtype)


@register
class Tiles(Technique):
    name = "tiles"
    order = 680
    rung = 9
    title = "pictures in tiles"
    default = "off"
    before_export = True
    of_module = True
    packages = ("diffusers",)

    def levels(self, facts: Facts) -> list[Level]:
        why_not = "" if facts.makes_pictures else "it is no VAE's decoder of diffusers"
        return [
            Level("off", "as given"),
            Level("2x2", "four tiles that overlap, one after the other", why_not),
            Level("4x4", "sixteen tiles that overlap, one after the other", why_not),
        ]

    def only_saves_memory(self, level: str, recipe: Recipe) -> bool:
        return True

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if recipe.levels.get("cuda_graphs") == "on":
            return "a graph is of the whole picture"
        runtime = recipe.levels.get("runtime", "torch")
        return "" if runtime == "torch" else f"runtime={runtime} makes its program for the whole picture"

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(helpers=(Part, InTiles), prepare=(f"model = InTiles(model, {level[0]})",))
