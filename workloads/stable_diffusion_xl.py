"""Stable Diffusion XL (Podell et al. 2023) from prompt to picture: two text encoders, whose last layers but one stand
side by side, a UNet that is told the picture's size as well, Euler's scheduler and the VAE's decoder, as a pipeline of
four parts.

Configurations are those that stabilityai/stable-diffusion-xl-base-1.0 publishes. Weights, prompts and metric are made
as in `stable_diffusion`.
"""

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel
from stable_diffusion import BEGIN, END, WORDS, autoencoder, decoded, judged, prompts, spread_as
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

GUIDANCE = 5.0


class StableDiffusionXL(torch.nn.Module):
    def __init__(self, text: dict, text_2: dict, unet: dict, vae: dict, steps: int) -> None:
        super().__init__()
        words = {"vocab_size": WORDS, "bos_token_id": BEGIN, "eos_token_id": END}
        self.text_encoder = CLIPTextModel(CLIPTextConfig(**words, **text, hidden_act="quick_gelu"))
        self.text_encoder_2 = CLIPTextModelWithProjection(CLIPTextConfig(**words, **text_2, hidden_act="gelu"))
        self.unet = UNet2DConditionModel(use_linear_projection=True, addition_embed_type="text_time", **unet)
        self.vae = AutoencoderKL(**vae, scaling_factor=0.13025)
        self.scheduler = EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
            timestep_spacing="leading",
        )  # fmt: skip
        self.steps = steps


@torch.no_grad()
def sample(pipe: StableDiffusionXL, tokens: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """n pictures, n x 3 x height x width from 0 to 1, of 2n x 77 tokens (first those without prompts) and of noise."""
    first = pipe.text_encoder(tokens, output_hidden_states=True)
    second = pipe.text_encoder_2(tokens, output_hidden_states=True)
    text = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
    size = 8 * latent.shape[-1]
    sizes = torch.tensor([[size, size, 0, 0, size, size]], device=latent.device).float()  # original, corner, wanted
    about = {"text_embeds": second.text_embeds, "time_ids": sizes.repeat(len(tokens), 1)}
    pipe.scheduler.set_timesteps(pipe.steps, device=latent.device)
    latent = latent * pipe.scheduler.init_noise_sigma
    for step in pipe.scheduler.timesteps:
        given = pipe.scheduler.scale_model_input(torch.cat([latent, latent]), step)
        plain, prompted = pipe.unet(given, step, text, added_cond_kwargs=about).sample.chunk(2)
        latent = pipe.scheduler.step(plain + GUIDANCE * (prompted - plain), step, latent).prev_sample
    return (decoded(pipe, latent) / 2 + 0.5).clamp(0, 1)


def pipeline(
    name: str, text: dict, text_2: dict, unet: dict, vae: dict, steps: int, measure: str, device: str, pictures: int
) -> dict:
    torch.manual_seed(0)
    pipe = StableDiffusionXL(text, text_2, unet, vae, steps).eval().to(device)
    torch.manual_seed(1)
    size = unet["sample_size"]
    latent, words = torch.randn(1, 4, size, size).to(device), torch.randn(1, 77, unet["cross_attention_dim"]).to(device)
    about = {"text_embeds": torch.randn(1, text_2["projection_dim"]), "time_ids": torch.full((1, 6), 8.0 * size)}
    about = {name: value.to(device) for name, value in about.items()}
    with torch.no_grad():
        found = pipe.unet(latent, torch.tensor(500.0, device=device), words, added_cond_kwargs=about).sample
    spread_as(pipe.unet.conv_out, found, 1.0)
    spread_as(pipe.vae.decoder.conv_out, decoded(pipe, latent), 0.5)
    torch.manual_seed(2)
    batches = [(prompts(pictures), torch.randn(pictures, 4, size, size)) for _ in range(4)]
    batches = [tuple(one.to(device) for one in batch) for batch in batches]
    parts = ["unet", "vae.decoder", "text_encoder_2", "text_encoder"]
    return judged(name, pipe, sample, batches, parts, measure, f"xl {steps}")


def of_width(width: int, latents: int, layers: tuple[int, int], deep: int) -> tuple[dict, dict, dict, dict]:
    """Configurations of both text encoders, UNet and VAE, those published where `width` is 1."""
    text = {
        "hidden_size": 768 // width, "intermediate_size": 3072 // width, "num_hidden_layers": layers[0],
        "num_attention_heads": 12 // width,
    }  # fmt: skip
    text_2 = {
        "hidden_size": 1280 // width, "intermediate_size": 5120 // width, "num_hidden_layers": layers[1],
        "num_attention_heads": 20 // width, "projection_dim": 1280 // width,
    }  # fmt: skip
    unet = {
        "sample_size": latents, "cross_attention_dim": 2048 // width,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": tuple(wide // width for wide in (320, 640, 1280)),
        "attention_head_dim": tuple(heads // width for heads in (5, 10, 20)),
        "transformer_layers_per_block": (1, 2, deep),
        "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 6 * 256 + 1280 // width,
    }  # fmt: skip
    vae = autoencoder(tuple(wide // width for wide in (128, 256, 512, 512)), 8 * latents)
    return text, text_2, unet, vae


def workload(steps: int = 30, measure: str = "ssim", device: str = "cpu", pictures: int = 1) -> dict:
    """As published, 1024 x 1024 pixels: for a GPU."""
    configs = of_width(1, 128, (12, 32), 10)
    return pipeline("stable-diffusion-xl", *configs, steps, measure, device, pictures)


def middle(steps: int = 10, measure: str = "ssim", device: str = "cpu", pictures: int = 1) -> dict:
    """Half as wide and half as deep, 256 x 256 pixels."""
    configs = of_width(2, 32, (6, 16), 5)
    return pipeline("stable-diffusion-xl-middle", *configs, steps, measure, device, pictures)


def small(steps: int = 3, measure: str = "ssim", device: str = "cpu", pictures: int = 1) -> dict:
    """Two blocks of 32 and 64 channels, 16 x 16 pixels, for tests."""
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    unet = {
        "sample_size": 8, "cross_attention_dim": 64, "block_out_channels": (32, 64), "attention_head_dim": (2, 4),
        "layers_per_block": 1, "transformer_layers_per_block": (1, 2), "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }  # fmt: skip
    vae = autoencoder((32, 64), 16, layers=1)
    configs = (text, {**text, "projection_dim": 32}, unet, vae)
    return pipeline("stable-diffusion-xl-small", *configs, steps, measure, device, pictures)
