"""Pictures decoded in tiles."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fettle
from fettle.recipe import Recipe
from fettle.techniques import conflict, load, probe_facts, source
from fettle.techniques.tiles import InTiles, is_decoder
from fettle.tuning.space import space_for


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("size", [(16, 16), (9, 31), (2, 5)])
def test_a_decoder_that_looks_at_single_places_makes_the_same_picture(count: int, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    decoder, tiles = nn.Sequential(nn.Conv2d(4, 3, 1), nn.Upsample(scale_factor=2)), []
    latents = torch.randn(2, 4, *size)
    decoder.register_forward_pre_hook(lambda _, args: tiles.append(args[0].shape[-2:]))
    wanted, found = decoder(latents), InTiles(decoder, count)(latents)
    torch.testing.assert_close(found, wanted)
    assert len(tiles) == 1 + count**2
    assert len(set(tiles[1:])) == 1  # a compiler makes one program
    if min(size) > 8:
        assert tiles[1].numel() < 0.45 * tiles[0].numel()


def test_it_is_tried_where_memory_counts_and_applied_where_it_is_named() -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()  # fmt: skip
    latents = torch.randn(1, 4, 32, 32)
    workload = fettle.Workload(
        vae, [latents], call=lambda vae, some: vae.decode(some).sample, parts=["decoder"], metric=lambda run: 1.0
    )
    facts = probe_facts(workload)
    assert is_decoder(vae.decoder)
    assert not is_decoder(vae.encoder)
    space, left_out = space_for(facts, {})
    assert space.choices["tiles[decoder]"] == ("off",)
    assert "it only saves memory, which is neither the goal nor limited" in [one.why for one in left_out]
    for asked in ({"memory_counts": True}, {"allowed": {"tiles": ["2x2"]}}):
        found, _ = space_for(facts, **{"allowed": {}, **asked})
        assert "2x2" in found.choices["tiles[decoder]"]
    quick = replace(facts, parts={"decoder": replace(facts.parts["decoder"], share=0.001)})
    assert "2x2" in space_for(quick, {}, memory_counts=True)[0].choices["tiles[decoder]"]
    recipe = Recipe({"tiles[decoder]": "2x2"})
    on_gpu = replace(facts, parts={"decoder": replace(facts.parts["decoder"], device="cuda")})
    graph = {"cuda_graphs[decoder]": "on", "grad": "inference_mode"}
    assert "whole picture" in conflict(Recipe({**recipe.levels, **graph}), on_gpu)
    assert "whole picture" in conflict(Recipe({**recipe.levels, "runtime[decoder]": "openvino"}), facts)
    with torch.no_grad():
        wanted = vae.decode(latents).sample
        found = load(source(recipe, facts), "tiles")(vae, [latents], workload.call)(latents)
    assert found.shape == wanted.shape
    assert 0 < (found - wanted).norm() < 0.3 * wanted.norm()
