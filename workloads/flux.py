"""FLUX.1 schnell (Black Forest Labs 2024) from prompt to picture: CLIP and T5 read the prompt, a diffusion transformer
(DiT) is called at every step of a flow, and the VAE's decoder makes the picture: a pipeline of four parts.

Configurations are those that black-forest-labs/FLUX.1-schnell publishes. Weights, prompts and metric are made as in
`stable_diffusion`.
"""

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from stable_diffusion import BEGIN, END, WORDS, autoencoder, judged, prompts, spread_as
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

T5_WORDS = 32128


class Flux(torch.nn.Module):
    def __init__(self, text: dict, text_2: dict, transformer: dict, vae: dict, steps: int) -> None:
        super().__init__()
        self.text_encoder = CLIPTextModel(
            CLIPTextConfig(vocab_size=WORDS, bos_token_id=BEGIN, eos_token_id=END, hidden_act="quick_gelu", **text)
        )
        self.text_encoder_2 = T5EncoderModel(T5Config(vocab_size=T5_WORDS, feed_forward_proj="gated-gelu", **text_2))
        self.transformer = FluxTransformer2DModel(**transformer)
        self.vae = AutoencoderKL(
            **vae, latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False,
            use_post_quant_conv=False,
        )  # fmt: skip
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.steps = steps


def packed(latent: torch.Tensor) -> torch.Tensor:
    """Latents, n x 16 x height x width, as tokens of 2 x 2 places: n x tokens x 64."""
    parts = latent.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # n, channels, rows, 2, columns, 2
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpacked(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The latents of `packed` tokens."""
    parts = tokens.unflatten(2, (-1, 2, 2)).unflatten(1, (height // 2, width // 2))
    return parts.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


@torch.no_grad()
def decoded(pipe: Flux, latent: torch.Tensor) -> torch.Tensor:
    return pipe.vae.decode(latent / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor).sample


@torch.no_grad()
def velocity(
    pipe: Flux, image: torch.Tensor, time: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor, width: int
) -> torch.Tensor:
    """What the transformer says of image tokens, in rows of `width`, at a time from 1 to 0."""
    place = torch.arange(image.shape[1], device=image.device)
    places = torch.stack([torch.zeros_like(place), place // width, place % width], 1)
    return pipe.transformer(
        hidden_states=image, timestep=time.expand(len(image)), pooled_projections=pooled, encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3, device=image.device), img_ids=places.float(),
    ).sample  # fmt: skip


@torch.no_grad()
def sample(pipe: Flux, tokens: torch.Tensor, tokens_2: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """n pictures, n x 3 x height x width from 0 to 1, of n x 77 tokens for CLIP, those for T5, and of noise."""
    pooled, text = pipe.text_encoder(tokens).pooler_output, pipe.text_encoder_2(tokens_2).last_hidden_state
    height, width = latent.shape[-2:]
    image, steps = packed(latent), pipe.steps
    pipe.scheduler.set_timesteps(sigmas=[1 - step / steps for step in range(steps)], device=latent.device)
    for step in pipe.scheduler.timesteps:
        found = velocity(pipe, image, step / 1000, text, pooled, width // 2)
        image = pipe.scheduler.step(found, step, image).prev_sample
    return (decoded(pipe, unpacked(image, height, width)) / 2 + 0.5).clamp(0, 1)


def pipeline(
    name: str, text: dict, text_2: dict, transformer: dict, vae: dict, words: int, latents: int, steps: int,
    measure: str, device: str, pictures: int,
) -> dict:  # fmt: skip
    torch.manual_seed(0)
    pipe = Flux(text, text_2, transformer, vae, steps).eval().to(device)
    torch.manual_seed(1)
    latent, some = torch.randn(1, 16, latents, latents).to(device), torch.randn(1, words, text_2["d_model"]).to(device)
    pooled, time = torch.randn(1, text["hidden_size"]).to(device), torch.tensor(0.5, device=device)
    found = velocity(pipe, packed(latent), time, some, pooled, latents // 2)
    spread_as(pipe.transformer.proj_out, found, 1.0)
    spread_as(pipe.vae.decoder.conv_out, decoded(pipe, latent), 0.5)
    torch.manual_seed(2)
    batches = []
    for _ in range(4):
        batch = (
            prompts(pictures)[pictures:], torch.randint(2, T5_WORDS, (pictures, words)),
            torch.randn(pictures, 16, latents, latents),
        )  # fmt: skip
        batches.append(tuple(one.to(device) for one in batch))
    parts = ["transformer", "vae.decoder", "text_encoder_2", "text_encoder"]
    return judged(name, pipe, sample, batches, parts, measure, f"flux {steps}")


def workload(steps: int = 4, measure: str = "ssim", device: str = "cpu", pictures: int = 1) -> dict:
    """As published, 12 billion parameters in the transformer, 1024 x 1024 pixels: for a GPU of 80 GB and more."""
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    text_2 = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    transformer: dict = {}  # diffusers' defaults are FLUX.1's
    configs = (text, text_2, transformer, autoencoder((128, 256, 512, 512), 1024))
    return pipeline("flux", *configs, 256, 128, steps, measure, device, pictures)


def middle(steps: int = 4, measure: str = "ssim", device: str = "cpu", pictures: int = 1) -> dict:
    """A sixth as wide and a fifth as deep, 256 x 256 pixels."""
    text = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
    text_2 = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 6, "num_heads": 8}
    transformer = {
        "num_layers": 4, "num_single_layers": 8, "attention_head_dim": 64, "num_attention_heads": 8,
        "joint_attention_dim": 512, "pooled_projection_dim": 256, "axes_dims_rope": (8, 28, 28),
    }  # fmt: skip
    configs = (text, text_2, transformer, autoencoder((64, 128, 256, 256), 256))
    return pipeline("flux-middle", *configs, 64, 32, steps, measure, device, pictures)


def small(steps: int = 4, measure: str = "ssim", device: str = "cpu", pictures: int = 1) -> dict:
    """Three blocks of 32 channels, 16 x 16 pixels, for tests."""
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text_2 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    transformer = {
        "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6),
    }  # fmt: skip
    configs = (text, text_2, transformer, autoencoder((32, 64), 16))
    return pipeline("flux-small", *configs, 8, 8, steps, measure, device, pictures)
