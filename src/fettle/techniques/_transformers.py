"""What transformers' models say of their attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def hf_attention(module: torch.nn.Module, device: str) -> tuple[str, ...]:
    """Attention implementations of the outermost transformers models, the one in use first."""
    models: list[Any] = [child for child in module.modules() if is_transformers(child)]
    if not models:
        return ()
    model = models[0]
    in_use = getattr(model.config, "_attn_implementation", None) or "eager"
    if not any(_looks_up_attention(type(child)) for child in module.modules()):
        return (in_use,)  # chosen when it was built: switching would only change the configuration
    if not quietly(lambda: bool(model._can_set_attn_implementation()), False):
        return (in_use,)
    others = ("sdpa", "eager", *(["flash_attention_2"] if device == "cuda" else []))
    works = (name for name in others if quietly(partial(model.get_correct_attn_implementation, name), ""))
    return (in_use, *(name for name in works if name != in_use))


def has_window(module: torch.nn.Module) -> bool:
    """Whether some layer of a transformers model sees only the tokens nearby, as its configuration says."""
    return any(_window(child.config) for child in module.modules() if is_transformers(child))


def _window(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None


def _looks_up_attention(kind: type) -> bool:
    """Whether a class of layers asks for transformers' table of attention functions each time that it is called."""
    bases = [base for base in kind.__mro__ if base.__module__ != "transformers.modeling_utils"]  # that has the table
    methods = (inspect.unwrap(value) for base in bases for value in vars(base).values() if callable(value))
    codes = (getattr(method, "__code__", None) for method in methods)
    return any("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes if code is not None)


def is_transformers(module: torch.nn.Module) -> bool:
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )


def quietly(ask: Callable[[], T], default: T) -> T:
    try:
        return ask()
    except Exception:
        return default
