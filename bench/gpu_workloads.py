"""The inference workloads of ``workloads/`` on the device that FETTLE_BENCH_DEVICE names.

Their own metrics are left out, since those hand their model data that lies in the memory of the CPU."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

NAMES = (
    "digits", "resnet50", "convnext_tiny", "vit_b16", "bert_base", "minilm", "gpt2", "lstm", "whisper_tiny_encoder",
    "sam_vit_b", "sd_unet",
)  # fmt: skip


def moved(name: str) -> Callable[[], dict[str, Any]]:
    def factory() -> dict[str, Any]:
        path = Path(__file__).parents[1] / "workloads" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"workload_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        device = os.environ.get("FETTLE_BENCH_DEVICE", "cuda")
        made = module.workload()
        made = made if isinstance(made, dict) else {"model": made[0], "inputs": made[1]}
        made.pop("metric", None)
        made["model"] = made["model"].to(device)
        for key in ("inputs", "check_inputs"):
            if key in made:
                batches = made[key] if isinstance(made[key], list) else [made[key]]
                batches = [dict(batch) if hasattr(batch, "input_ids") else batch for batch in batches]
                made[key] = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batches)
        return made

    return factory


globals().update({name: moved(name) for name in NAMES})
