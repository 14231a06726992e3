"""What workloads share: weights and answers are kept that take long to make, and texts compared by letters."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

Model = TypeVar("Model", bound=torch.nn.Module)


def kept(make: Callable[[], Any], name: str) -> Any:
    """Tensors and plain values of that name from the cache folder, made where they are not there yet."""
    path = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fettle-workloads" / f"{name}.pt"
    if not path.exists():
        made = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(made, path.with_suffix(f".{os.getpid()}"))
        os.replace(path.with_suffix(f".{os.getpid()}"), path)
    return torch.load(path, weights_only=True)


def kept_answer(make: Callable[[], Any], model: torch.nn.Module, batch: tuple, name: str, about: str = "") -> Any:
    """A tensor that is computed once for a model's weights, the inputs and what else it is `about`."""
    digest = hashlib.sha256(about.encode())
    for value in (*model.state_dict().values(), *batch):
        some = value.reshape(-1)[:: max(1, value.numel() // 997)].cpu().contiguous()
        digest.update(some.view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
    device = batch[0].device
    return kept(make, f"{name}-{digest.hexdigest()[:16]}-{device.type}").to(device)


def with_weights(model: Model, train: Callable[[Model], object], name: str) -> Model:
    """The model with the weights of that name from the cache folder, trained where they are not there yet."""

    def trained() -> Any:
        train(model)
        return model.state_dict()

    model.load_state_dict(kept(trained, name))
    return model.eval()


def training_precision() -> torch.autocast:
    """bfloat16 where the CPU multiplies in it; elsewhere that is many times as slow, and no LSTM trains so."""
    return torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported())


def errors(read: str, wanted: str) -> int:
    """Letters to be put in, left out or replaced (Levenshtein's distance)."""
    last = list(range(len(wanted) + 1))
    for row, letter in enumerate(read, 1):
        now = [row]
        for column, other in enumerate(wanted, 1):
            now.append(min(last[column] + 1, now[-1] + 1, last[column - 1] + (letter != other)))
        last = now
    return last[-1]
