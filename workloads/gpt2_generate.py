"""GPT-2 small (Radford et al. 2019), 32 tokens written greedily: 124 million parameters, 4 prompts of 16 tokens.

The configuration is the default of transformers' GPT2Config, which is openai-community/gpt2. Random weights. The
call is `generate`, not `forward`. Untrained, the model hesitates between tokens now and then, so that rounding shows:
bfloat16 changes tokens in two of the five batches.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

PROMPT, WRITTEN = 16, 32


def generate(model, prompts: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(prompts)
    return model.generate(
        prompts,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=WRITTEN,
        max_new_tokens=WRITTEN,
        pad_token_id=50256,
    )


def workload() -> dict:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config())
    prompts = [torch.randint(50256, (4, PROMPT)) for _ in range(5)]
    return {
        "model": model,
        "inputs": prompts[:3],
        "check_inputs": prompts[3:],
        "call": generate,
        "name": "gpt2-generate",
    }
