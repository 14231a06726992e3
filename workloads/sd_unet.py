"""The UNet of Stable Diffusion 1.5 (Rombach et al. 2022): 860 million parameters, 2 latents of 4 x 32 x 32.

The configuration is unet/config.json of stable-diffusion-v1-5, written out where it differs from the default of
diffusers' UNet2DConditionModel. Random weights. One call is one step of denoising at 256x256 with guidance: latents,
timestep and text embedding are three positional arguments.
"""

import torch
from diffusers import UNet2DConditionModel


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    latent = torch.randn(1, 4, 32, 32).repeat(2, 1, 1, 1)  # without and with the prompt
    return latent, torch.randint(1000, ()), torch.randn(2, 77, 768)


def workload() -> dict:
    torch.manual_seed(0)
    return {
        "model": UNet2DConditionModel(sample_size=64, cross_attention_dim=768),
        "inputs": [batch() for _ in range(3)],
        "check_inputs": [batch()],
        "name": "sd-unet",
    }
