"""The encoder of Whisper-tiny (Radford et al. 2022): 8.2 million parameters, 2 clips of 30 s as log-mel 80 x 3000.

The configuration is the default of transformers' WhisperConfig, which has the sizes of openai/whisper-tiny: width 384,
4 layers, 6 heads. Random weights.
"""

import torch
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder


def log_mel(batch: int) -> torch.Tensor:
    """Noise that is coarse in time and pitch, in the range that Whisper's feature extractor gives (-1 to 1.5)."""
    coarse = torch.randn(batch, 1, 10, 300) + torch.randn(batch, 1, 1, 1)
    blocks = torch.nn.functional.interpolate(coarse, size=(80, 3000)).squeeze(1)
    return (0.3 * blocks + 0.05 * torch.randn_like(blocks)).clamp(-1, 1.5)


def workload() -> dict:
    torch.manual_seed(0)
    model = WhisperEncoder(WhisperConfig())
    for conv in (model.conv1, model.conv2):  # at the configured spread of 0.02 the positions would drown the sound
        torch.nn.init.kaiming_normal_(conv.weight)
    return {
        "model": model,
        "inputs": [log_mel(2) for _ in range(4)],
        "check_inputs": [log_mel(2) for _ in range(2)],
        "name": "whisper-tiny-encoder",
    }
