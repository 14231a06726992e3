"""Segment Anything 2 (Ravi et al. 2024) on photographs: a Hiera encoder, whose finer maps the mask decoder is given as
well, and the automatic generation of masks over a grid of points.

The configuration is the default of transformers' Sam2Config, which is facebook/sam2.1-hiera-tiny. Weights are random,
but for a checkpoint of yours: FETTLE_SAM2_CHECKPOINT names its folder. Photographs and metric are those of
`segment_anything`.
"""

import os

import torch
from _masks import behave, masks_at, pipeline
from transformers import Sam2Config, Sam2Model


@torch.no_grad()
def generate(model: torch.nn.Module, pixels: torch.Tensor, points: torch.Tensor) -> dict:
    """Everything in an image, as `masks_at` says it."""
    *fine, image = model.vision_encoder(pixels).fpn_hidden_states
    image = image + model.no_memory_embedding.view(1, -1, 1, 1)
    finer = [layer(some) for layer, some in zip((model.conv_s0, model.conv_s1), fine, strict=True)]
    return masks_at(model, image, points, high_resolution_features=finer)


def build(config: Sam2Config) -> Sam2Model:
    """The model with random weights, or the user's checkpoint. What the finer maps go through once an image belongs to
    the model here: to the decoder it would be a part of a part, called from outside."""
    torch.manual_seed(0)
    checkpoint = os.environ.get("FETTLE_SAM2_CHECKPOINT")
    model = Sam2Model.from_pretrained(checkpoint, local_files_only=True) if checkpoint else behave(Sam2Model(config))
    for name in ("conv_s0", "conv_s1"):
        setattr(model, name, getattr(model.mask_decoder, name))
        delattr(model.mask_decoder, name)
    return model


def workload(device: str = "cpu") -> dict:
    """Hiera tiny at 1024 x 1024, a grid of 16 x 16 points."""
    return pipeline(build(Sam2Config()), generate, 16, "segment-anything-2-tiny", device)


def small(device: str = "cpu") -> dict:
    """The same at a fraction of its size: 256 x 256 pixels, five layers, a grid of 4 x 4 points."""
    stages = [16, 32, 64, 128]
    config = Sam2Config(
        vision_config={
            "backbone_config": {
                "model_type": "sam2_hiera_det_model", "hidden_size": 16, "image_size": [256, 256],
                "blocks_per_stage": [1, 1, 2, 1], "embed_dim_per_stage": stages,
                "num_attention_heads_per_stage": [1, 2, 4, 8], "global_attention_blocks": [3],
            },
            "backbone_channel_list": stages[::-1], "backbone_feature_sizes": [[64, 64], [32, 32], [16, 16]],
            "fpn_hidden_size": 64,
        },
        prompt_encoder_config={"hidden_size": 64, "image_size": 256},
        mask_decoder_config={"hidden_size": 64, "mlp_dim": 256, "num_attention_heads": 4, "iou_head_hidden_dim": 64},
    )  # fmt: skip
    return pipeline(build(config), generate, 4, "segment-anything-2-small", device)
