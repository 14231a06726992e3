"""GPT-2 small (Radford et al. 2019), one forward pass: 124 million parameters, 4 sequences of 128 tokens.

The configuration is the default of transformers' GPT2Config, which is openai-community/gpt2, without its key-value
cache, which one pass does not need. Random weights; input and output embedding are one tensor.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def workload() -> dict:
    torch.manual_seed(0)
    return {
        "model": GPT2LMHeadModel(GPT2Config(use_cache=False)),
        "inputs": [torch.randint(50256, (4, 128)) for _ in range(4)],
        "check_inputs": [torch.randint(50256, (4, 128)) for _ in range(2)],
        "name": "gpt2",
    }
