"""Stable Diffusion 2.1 (Rombach et al. 2022) from prompt to picture: text encoder, a UNet called at every step of a
scheduler, and the VAE's decoder, as a pipeline of three parts.

Configurations are those that stabilityai/stable-diffusion-2-1 publishes, written out where they differ from the
defaults of diffusers and transformers. Weights are random by seed, with outputs scaled to what trained ones have:
velocities of unit variance, pictures that fill the range from black to white. There is no tokenizer without a
download, so prompts are random words of the vocabulary. The metric compares the final picture with that of the model
in float32, which is computed once and kept in the cache folder: structural similarity (Wang et al. 2004), or with
``measure="psnr"`` the peak signal-to-noise ratio in dB, 100 at most.
"""

import torch
from _shared import kept_answer
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from transformers import CLIPTextConfig, CLIPTextModel

GUIDANCE = 7.5
WORDS, BEGIN, END = 49408, 49406, 49407


class StableDiffusion(torch.nn.Module):
    """What a pipeline holds: modules, scheduler, steps, and whether both halves go through the UNet at once."""

    def __init__(self, text: dict, unet: dict, vae: dict, steps: int, halves: str) -> None:
        super().__init__()
        self.text_encoder = CLIPTextModel(
            CLIPTextConfig(vocab_size=WORDS, bos_token_id=BEGIN, eos_token_id=END, **text)
        )
        self.unet = UNet2DConditionModel(use_linear_projection=True, **unet)
        self.vae = AutoencoderKL(**vae)
        self.scheduler = DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
            set_alpha_to_one=False, steps_offset=1, prediction_type="v_prediction",
        )  # fmt: skip
        self.steps, self.halves = steps, halves


@torch.no_grad()
def sample(pipe: StableDiffusion, tokens: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """The picture, 1 x 3 x height x width from 0 to 1, of 2 x 77 tokens (without prompt, with it) and of noise."""
    text = pipe.text_encoder(tokens).last_hidden_state
    pipe.scheduler.set_timesteps(pipe.steps, device=latent.device)
    for step in pipe.scheduler.timesteps:
        if pipe.halves == "together":
            found = pipe.unet(torch.cat([latent, latent]), step, text).sample
        else:
            found = torch.cat([pipe.unet(latent, step, half).sample for half in text.split(1)])
        plain, prompted = found.chunk(2)
        latent = pipe.scheduler.step(plain + GUIDANCE * (prompted - plain), step, latent).prev_sample
    return (pipe.vae.decode(latent / pipe.vae.config.scaling_factor).sample / 2 + 0.5).clamp(0, 1)


def ssim(one: torch.Tensor, other: torch.Tensor) -> float:
    """Structural similarity of pictures from 0 to 1, in windows of 7 x 7 pixels, every channel by itself; the mean."""

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(values, 7, 1)

    x, y = one.double(), other.double()
    mean_x, mean_y = mean(x), mean(y)
    share = 49 / 48  # of a sample
    of_x, of_y = share * (mean(x * x) - mean_x**2), share * (mean(y * y) - mean_y**2)
    both = share * (mean(x * y) - mean_x * mean_y)
    like = (2 * mean_x * mean_y + 0.01**2) * (2 * both + 0.03**2)
    return float((like / ((mean_x**2 + mean_y**2 + 0.01**2) * (of_x + of_y + 0.03**2))).mean())


def psnr(one: torch.Tensor, other: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB of pictures from 0 to 1; 100 at most, for equal ones."""
    return min(100.0, -10 * float((one.double() - other.double()).square().mean().clamp(min=1e-10).log10()))


@torch.no_grad()
def scaled(pipe: StableDiffusion, size: int) -> None:
    """Give the last layers of random weights the spread of trained outputs. Powers of two: they are exact, and the same
    whatever the number of threads."""
    torch.manual_seed(1)
    device = pipe.unet.device
    latent = torch.randn(1, 4, size, size).to(device)
    text = torch.randn(1, 77, pipe.unet.config.cross_attention_dim).to(device)
    spreads = (
        (pipe.unet.conv_out, pipe.unet(latent, torch.tensor(500, device=device), text).sample.std(), 1.0),
        (pipe.vae.decoder.conv_out, pipe.vae.decode(latent / pipe.vae.config.scaling_factor).sample.std(), 0.5),
    )
    for layer, found, wanted in spreads:
        gain = 2.0 ** round(float((wanted / found).log2()))
        layer.weight.mul_(gain)
        layer.bias.mul_(gain)


def pipeline(
    name: str, text: dict, unet: dict, vae: dict, steps: int, halves: str, measure: str, device: str, attention: str
) -> dict:
    torch.manual_seed(0)
    pipe = StableDiffusion(text, unet, vae, steps, halves).eval().to(device)  # eval: as `from_pretrained` leaves it
    if attention == "products":
        pipe.unet.set_attn_processor(AttnProcessor())
        pipe.vae.set_attn_processor(AttnProcessor())
    size = unet["sample_size"]
    scaled(pipe, size)
    torch.manual_seed(2)
    batches = []
    for _ in range(4):
        tokens = torch.full((2, 77), END)
        tokens[:, 0] = BEGIN
        tokens[1, 1:17] = torch.randint(BEGIN, (16,))
        batches.append((tokens.to(device), torch.randn(1, 4, size, size).to(device)))
    wanted = kept_answer(lambda: sample(pipe, *batches[3]), pipe, batches[3], "sd", f"{pipe.steps}")
    likeness = {"ssim": ssim, "psnr": psnr}[measure]
    return {
        "model": pipe,
        "inputs": batches[:3],
        "check_inputs": batches[3:],
        "call": sample,
        "parts": ["unet", "vae.decoder", "text_encoder"],
        "metric": lambda run: likeness(run(*batches[3]), wanted),
        "name": name,
        "samples": 1,
    }


def of_width(width: int, latents: int, layers: int) -> tuple[dict, dict, dict]:
    """Configurations of text encoder, UNet and VAE, those of 2.1 where `width` is 1."""
    text = {
        "hidden_size": 1024 // width, "intermediate_size": 4096 // width, "num_hidden_layers": layers,
        "num_attention_heads": 16 // width, "hidden_act": "gelu",
    }  # fmt: skip
    unet = {
        "sample_size": latents, "cross_attention_dim": 1024 // width,
        "block_out_channels": tuple(wide // width for wide in (320, 640, 1280, 1280)),
        "attention_head_dim": tuple(max(1, heads // width) for heads in (5, 10, 20, 20)),
    }  # fmt: skip
    vae = {
        "block_out_channels": tuple(wide // width for wide in (128, 256, 512, 512)), "layers_per_block": 2,
        "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
        "sample_size": 8 * latents,
    }  # fmt: skip
    return text, unet, vae


def workload(
    steps: int = 50, halves: str = "together", measure: str = "ssim", device: str = "cpu", attention: str = "sdpa"
) -> dict:
    """2.1 as published, 768 x 768 pixels: for a GPU. Attention is diffusers' own choice, or ``products``: matrix
    products and a softmax, as it was before there was `scaled_dot_product_attention`."""
    return pipeline("stable-diffusion-2.1", *of_width(1, 96, 23), steps, halves, measure, device, attention)


def middle(
    steps: int = 10, halves: str = "together", measure: str = "ssim", device: str = "cpu", attention: str = "sdpa"
) -> dict:
    """Half as wide, 256 x 256 pixels: a minute of a CPU shows a few of its calls."""
    return pipeline("stable-diffusion-middle", *of_width(2, 32, 12), steps, halves, measure, device, attention)


def small(
    steps: int = 3, halves: str = "together", measure: str = "ssim", device: str = "cpu", attention: str = "sdpa"
) -> dict:
    """Two blocks of 32 and 64 channels, 16 x 16 pixels, for tests."""
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    unet = {
        "sample_size": 8, "cross_attention_dim": 32, "block_out_channels": (32, 64), "attention_head_dim": (2, 4),
        "layers_per_block": 1, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }  # fmt: skip
    vae = {
        "block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }  # fmt: skip
    return pipeline("stable-diffusion-small", text, unet, vae, steps, halves, measure, device, attention)
