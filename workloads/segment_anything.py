"""Segment Anything (Kirillov et al. 2023) from photograph to masks: image encoder, prompt encoder, mask decoder and the
automatic generation of masks over a grid of points, as a pipeline of three parts.

The configuration is the default of transformers' SamConfig, which is facebook/sam-vit-base. Weights are random, but for
a checkpoint of yours: FETTLE_SAM_CHECKPOINT names its folder (as `save_pretrained` writes one). The photographs are the
two that ship with scikit-learn; the metric is the mean IoU with the masks of the model in float32, grid point by grid
point, which are computed once and kept in the cache folder.
"""

import os

import torch
from _masks import AT_ONCE, behave, decoded, masks_at, pipeline
from transformers import SamConfig, SamModel


@torch.no_grad()  # as the published generator: a graph through 256 points does not fit into 24 GB
def generate(model: torch.nn.Module, pixels: torch.Tensor, points: torch.Tensor) -> dict:
    """Everything in an image, as `masks_at` says it."""
    return masks_at(model, model.vision_encoder(pixels).last_hidden_state, points)


@torch.no_grad()
def generate_each(model: torch.nn.Module, pixels: torch.Tensor, points: torch.Tensor) -> list:
    """Everything in each of several images, which are encoded at once: what is filled at every point instead of its
    logits, so that the masks of an image take an eighth of their memory, and the rest as `masks_at` says it."""
    found = []
    for image in model.vision_encoder(pixels).last_hidden_state.split(1):
        one = masks_at(model, image, points)
        found.append({"filled": one.pop("logits") > 0, **one})
    return found


@torch.no_grad()
def prompted(model: torch.nn.Module, pixels: torch.Tensor, points: torch.Tensor, owners: torch.Tensor) -> dict:
    """The masks at points of several images, any number of each: all in one list, decoded together."""
    images, position = model.vision_encoder(pixels).last_hidden_state, model.get_image_wide_positional_embeddings()
    lists = zip(points.split(AT_ONCE), owners.split(AT_ONCE), strict=True)
    found = [decoded(model, images[own], position.expand(len(own), -1, -1, -1), some[:, None]) for some, own in lists]
    return dict(zip(("logits", "scores"), map(torch.cat, zip(*found, strict=True)), strict=True))


@torch.no_grad()
def prompted_apart(model: torch.nn.Module, pixels: torch.Tensor, points: torch.Tensor, owners: torch.Tensor) -> dict:
    """The same image by image."""
    images, position = model.vision_encoder(pixels).last_hidden_state, model.get_image_wide_positional_embeddings()
    found = []
    for number, image in enumerate(images.split(1)):
        found += [decoded(model, image, position, some[None]) for some in points[owners == number].split(AT_ONCE)]
    return dict(zip(("logits", "scores"), map(torch.cat, zip(*found, strict=True)), strict=True))


PROMPTED = {"together": prompted, "apart": prompted_apart}


def build(config: SamConfig, attention: str) -> SamModel:
    """The model with random weights, or the user's checkpoint. Attention is transformers' own choice (``sdpa``), or
    ``products``: matrix products and a softmax, as the model was published and the published ladder begins."""
    torch.manual_seed(0)
    implementation = {"attn_implementation": {"products": "eager", "sdpa": "sdpa"}[attention]}
    if checkpoint := os.environ.get("FETTLE_SAM_CHECKPOINT"):
        return SamModel.from_pretrained(checkpoint, local_files_only=True, **implementation)
    return behave(SamModel._from_config(config, **implementation))


def workload(device: str = "cpu", attention: str = "sdpa") -> dict:
    """ViT-B at 1024 x 1024, a grid of 16 x 16 points."""
    return pipeline(build(SamConfig(), attention), generate, 16, "segment-anything-vit-b", device)


def eight(device: str = "cpu", attention: str = "sdpa") -> dict:
    """ViT-B with eight photographs at once, as in the published ladder (pytorch-labs, batch 8): for a GPU."""
    return pipeline(build(SamConfig(), attention), generate_each, 16, "segment-anything-vit-b-8", device, 8)


def with_prompts(device: str = "cpu", attention: str = "sdpa", prompts: str = "together") -> dict:
    """ViT-B with eight photographs at once, which have 1 to 100 prompts each, decoded together or image by image."""
    counts, name = (1, 100, 7, 30, 3, 60, 15, 40), "segment-anything-vit-b-prompts"
    return pipeline(build(SamConfig(), attention), PROMPTED[prompts], 16, name, device, 8, counts)


def small_config() -> SamConfig:
    return SamConfig(
        vision_config={
            "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 256, "mlp_dim": 384,
            "global_attn_indexes": [1, 3], "output_channels": 64, "num_pos_feats": 32,
        },
        prompt_encoder_config={"hidden_size": 64, "image_size": 256},
        mask_decoder_config={"hidden_size": 64, "mlp_dim": 256, "num_attention_heads": 4, "iou_head_hidden_dim": 64},
    )  # fmt: skip


def small(device: str = "cpu", attention: str = "sdpa") -> dict:
    """The same at an eighth of its size: 256 x 256 pixels, four layers, a grid of 4 x 4 points."""
    return pipeline(build(small_config(), attention), generate, 4, "segment-anything-small", device)


def small_eight(device: str = "cpu", attention: str = "sdpa") -> dict:
    """`eight` at that size."""
    return pipeline(build(small_config(), attention), generate_each, 4, "segment-anything-small-8", device, 8)


def small_with_prompts(device: str = "cpu", attention: str = "sdpa", prompts: str = "together") -> dict:
    """`with_prompts` at that size."""
    counts, name = (1, 6, 2, 3, 1, 4, 2, 5), "segment-anything-small-prompts"
    return pipeline(build(small_config(), attention), PROMPTED[prompts], 4, name, device, 8, counts)


def vit_h(device: str = "cpu", attention: str = "sdpa") -> dict:
    """ViT-H at 1024 x 1024, a grid of 32 x 32 points: for a GPU."""
    config = SamConfig(
        vision_config={
            "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "mlp_dim": 5120,
            "global_attn_indexes": [7, 15, 23, 31],
        },
    )  # fmt: skip
    return pipeline(build(config, attention), generate, 32, "segment-anything-vit-h", device)
