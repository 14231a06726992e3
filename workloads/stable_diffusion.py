"""Stable Diffusion 2.1 (Rombach et al. 2022) from prompt to picture: text encoder, a UNet called at every step of a
scheduler, and the VAE's decoder, as a pipeline of three parts. ``start="picture"`` begins at a picture with noise on it
(img2img), ``start="hole"`` fills a hole in one (inpainting); the VAE's encoder is a part then, too.

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
from diffusers.models.attention_processor import AttnProcessor, XFormersAttnProcessor
from transformers import CLIPTextConfig, CLIPTextModel

GUIDANCE = 7.5
STRENGTH = 0.6
"""Share of the steps that are made where a picture is begun with."""
WORDS, BEGIN, END = 49408, 49406, 49407
PROCESSORS = {"sdpa": None, "products": AttnProcessor, "xformers": XFormersAttnProcessor}


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
        self.steps, self.together = steps, {"together": True, "apart": False}[halves]


@torch.no_grad()
def encoded(pipe: torch.nn.Module, picture: torch.Tensor) -> torch.Tensor:
    """The latent of a picture from -1 to 1."""
    return pipe.vae.encode(picture).latent_dist.mode() * pipe.vae.config.scaling_factor


@torch.no_grad()
def sample(
    pipe: StableDiffusion, tokens: torch.Tensor, latent: torch.Tensor, picture: torch.Tensor | None = None,
    hole: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """n pictures, n x 3 x height x width from 0 to 1, of 2n x 77 tokens (first those without prompts) and of noise;
    begun at a picture, or what is kept of one around a hole, which is 1 there."""
    text, noise, scheduler = pipe.text_encoder(tokens).last_hidden_state, latent, pipe.scheduler
    scheduler.set_timesteps(pipe.steps, device=latent.device)
    times = scheduler.timesteps
    clean = None if picture is None else encoded(pipe, picture)
    if clean is not None and hole is None:
        times = times[-round(STRENGTH * len(times)) :]
        latent = scheduler.add_noise(clean, noise, times[:1])
    for place, step in enumerate(times, 1):
        if pipe.together:
            found = pipe.unet(torch.cat([latent, latent]), step, text).sample
        else:
            found = torch.cat([pipe.unet(latent, step, half).sample for half in text.chunk(2)])
        plain, prompted = found.chunk(2)
        latent = scheduler.step(plain + GUIDANCE * (prompted - plain), step, latent).prev_sample
        if hole is not None:
            kept = scheduler.add_noise(clean, noise, times[place : place + 1]) if place < len(times) else clean
            latent = kept + hole * (latent - kept)
    return (decoded(pipe, latent) / 2 + 0.5).clamp(0, 1)


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
def spread_as(layer: torch.nn.Module, found: torch.Tensor, wanted: float) -> None:
    """Give the last layer of random weights the spread of trained outputs. A power of two: it is exact, and the same
    whatever the number of threads."""
    gain = 2.0 ** round(float((wanted / found.std()).log2()))
    layer.weight.mul_(gain)
    layer.bias.mul_(gain)


@torch.no_grad()
def decoded(pipe: torch.nn.Module, latent: torch.Tensor) -> torch.Tensor:
    return pipe.vae.decode(latent / pipe.vae.config.scaling_factor).sample


def scaled(pipe: StableDiffusion, size: int) -> None:
    torch.manual_seed(1)
    device = pipe.unet.device
    latent = torch.randn(1, 4, size, size).to(device)
    text = torch.randn(1, 77, pipe.unet.config.cross_attention_dim).to(device)
    with torch.no_grad():
        spread_as(pipe.unet.conv_out, pipe.unet(latent, torch.tensor(500, device=device), text).sample, 1.0)
    spread_as(pipe.vae.decoder.conv_out, decoded(pipe, latent), 0.5)


def prompts(count: int) -> torch.Tensor:
    """Tokens of as many empty prompts and of prompts of 16 random words."""
    tokens = torch.full((2 * count, 77), END)
    tokens[:, 0] = BEGIN
    tokens[count:, 1:17] = torch.randint(BEGIN, (count, 16))
    return tokens


def begun(start: str, count: int, latents: int, pixels: int) -> tuple[torch.Tensor, ...]:
    """Pictures without sharp edges, and a hole in the middle of each, in the size of latents."""
    if start == "noise":
        return ()
    coarse = torch.randn(count, 3, max(2, pixels // 16), max(2, pixels // 16))
    picture = torch.nn.functional.interpolate(coarse, (pixels, pixels), mode="bicubic").tanh()
    hole = torch.zeros(count, 1, latents, latents)
    hole[..., latents // 4 : -(latents // 4), latents // 4 : -(latents // 4)] = 1
    return {"picture": (picture,), "hole": (picture, hole)}[start]


def judged(
    name: str, pipe: torch.nn.Module, call, batches: list[tuple], parts: list[str], measure: str, about: str
) -> dict:
    """The workload of a sampling, whose metric compares the last batch's pictures with those of float32."""
    wanted = kept_answer(lambda: call(pipe, *batches[-1]), pipe, batches[-1], "sd", about)
    likeness = {"ssim": ssim, "psnr": psnr}[measure]
    return {
        "model": pipe,
        "inputs": batches[:-1],
        "check_inputs": batches[-1:],
        "call": call,
        "parts": parts,
        "metric": lambda run: likeness(run(*batches[-1]), wanted),
        "name": name,
        "samples": len(wanted),
    }


def pipeline(
    name: str, text: dict, unet: dict, vae: dict, steps: int, halves: str, measure: str, device: str, attention: str,
    start: str, pictures: int,
) -> dict:  # fmt: skip
    torch.manual_seed(0)
    pipe = StableDiffusion(text, unet, vae, steps, halves).eval().to(device)  # eval: as `from_pretrained` leaves it
    if attention == "xformers":
        import xformers.ops  # noqa: F401 - without it diffusers says only that None has no ops
    if processor := PROCESSORS[attention]:
        pipe.unet.set_attn_processor(processor())
        pipe.vae.set_attn_processor(processor())
    size = unet["sample_size"]
    scaled(pipe, size)
    parts, pixels = ["unet", "vae.decoder", "text_encoder"], size * 2 ** (len(vae["block_out_channels"]) - 1)
    if start != "noise":
        name, parts = f"{name}-{start}", [*parts, "vae.encoder"]
        (picture,) = begun("picture", 1, size, pixels)
        spread_as(pipe.vae.encoder.conv_out, encoded(pipe, picture.to(device)), 1.0)
    torch.manual_seed(2)
    batches = []
    for _ in range(4):
        batch = (prompts(pictures), torch.randn(pictures, 4, size, size), *begun(start, pictures, size, pixels))
        batches.append(tuple(one.to(device) for one in batch))
    return judged(name, pipe, sample, batches, parts, measure, f"{pipe.steps}")


def autoencoder(channels: tuple[int, ...], pixels: int, layers: int = 2) -> dict:
    """Configuration of a VAE with as many blocks as there are `channels`."""
    return {
        "block_out_channels": channels, "layers_per_block": layers, "sample_size": pixels,
        "down_block_types": ("DownEncoderBlock2D",) * len(channels),
        "up_block_types": ("UpDecoderBlock2D",) * len(channels),
    }  # fmt: skip


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
    vae = autoencoder(tuple(wide // width for wide in (128, 256, 512, 512)), 8 * latents)
    return text, unet, vae


def workload(
    steps: int = 50, halves: str = "together", measure: str = "ssim", device: str = "cpu", attention: str = "sdpa",
    start: str = "noise", pictures: int = 1,
) -> dict:  # fmt: skip
    """2.1 as published, 768 x 768 pixels: for a GPU. Attention is diffusers' own choice, ``xformers``, or ``products``:
    matrix products and a softmax, as it was before there was `scaled_dot_product_attention`."""
    given = (steps, halves, measure, device, attention, start, pictures)
    return pipeline("stable-diffusion-2.1", *of_width(1, 96, 23), *given)


def middle(
    steps: int = 10, halves: str = "together", measure: str = "ssim", device: str = "cpu", attention: str = "sdpa",
    start: str = "noise", pictures: int = 1,
) -> dict:  # fmt: skip
    """Half as wide, 256 x 256 pixels: a minute of a CPU shows a few of its calls."""
    given = (steps, halves, measure, device, attention, start, pictures)
    return pipeline("stable-diffusion-middle", *of_width(2, 32, 12), *given)


def small(
    steps: int = 3, halves: str = "together", measure: str = "ssim", device: str = "cpu", attention: str = "sdpa",
    start: str = "noise", pictures: int = 1,
) -> dict:  # fmt: skip
    """Two blocks of 32 and 64 channels, 16 x 16 pixels, for tests."""
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    unet = {
        "sample_size": 8, "cross_attention_dim": 32, "block_out_channels": (32, 64), "attention_head_dim": (2, 4),
        "layers_per_block": 1, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }  # fmt: skip
    vae = autoencoder((32, 64), 16, layers=1)
    given = (steps, halves, measure, device, attention, start, pictures)
    return pipeline("stable-diffusion-small", text, unet, vae, *given)


def from_picture(steps: int = 10, measure: str = "ssim", device: str = "cpu") -> dict:
    """`middle`, begun at a picture (img2img)."""
    return middle(steps, measure=measure, device=device, start="picture")


def inpainting(steps: int = 10, measure: str = "ssim", device: str = "cpu") -> dict:
    """`middle`, which fills a hole in a picture."""
    return middle(steps, measure=measure, device=device, start="hole")
