"""GPT-2 small (Radford et al. 2019) writing text: 124 million parameters, 32 tokens after prompts of three lengths.

The configuration is the default of transformers' GPT2Config, which is openai-community/gpt2. Random weights.
`new_tokens` makes it a `fettle.GenerationWorkload`: prefill and decode are measured apart, and recipes judged by how
far the distribution of each next token is from float32's.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def workload() -> dict:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    prompts = [torch.randint(50256, (1, tokens)) for tokens in (16, 64, 128, 16, 64)]
    return {
        "model": model,
        "inputs": prompts[:3],
        "check_inputs": prompts[3:],
        "new_tokens": 32,
        "name": "gpt2-text",
    }
