"""Linear layers whose weights are held in few bits: all that can be, or as many as a limit on the divergence allows."""

from typing import Any

import torch

from fettle.generate.decoding import decoder_of, score, write
from fettle.techniques._chosen_layers import chosen_layers, layer_groups
from fettle.techniques._linear import linear_of_conv1d
from fettle.workload import spread


def packable(model: torch.nn.Module, bits: int) -> tuple[dict[str, Any], int]:
    """Linear layers whose weights can be held in few bits, by name: parent, name in it, layer, bits, which are 8 of the
    head, as that decides; and the number of all linear layers."""
    ask: Any = getattr(model, "get_output_embeddings", None)
    head = ask() if ask is not None else None
    linear_of_conv1d(model)
    found: dict[str, Any] = {}
    total = 0
    for above, parent in list(model.named_modules()):
        for name, layer in list(parent.named_children()):
            if getattr(type(layer), "forward", None) is not torch.nn.Linear.forward:
                continue  # an adapter's layer, say, computes more than the product
            if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
                continue  # and so may a layer with hooks
            weight: Any = layer.weight
            total += 1
            if weight.shape[1] % 32 == 0 and weight.is_floating_point():
                found[f"{above}.{name}".lstrip(".")] = parent, name, layer, 8 if head in (layer, parent) else bits
    return found, total


def few_bits(model: torch.nn.Module, kind: Any, bits: int, *more: int, only: Any = ()) -> None:
    """Hold the weights of linear layers in `bits` bits, each by a layer ``kind(weight, bias, bits, *more)``; with 4 the
    head keeps 8, and so does every layer whose name is not among `only`, where there are any."""
    import logging

    layers, total = packable(model, bits)
    if not layers:
        raise RuntimeError(f"{bits} bits: 0 of {total} layers matched")
    known, held = dict(model.named_modules()), 0
    if missing := [name for name in only if name not in known]:
        raise RuntimeError(f"{bits} bits: the layer {missing[0]} was chosen, and the model has none of that name")
    for path, (parent, name, layer, most) in layers.items():
        is_chosen = not only or path.removesuffix(".fused") in only  # a fused layer has the name of its first
        setattr(parent, name, kind(layer.weight, layer.bias, most if is_chosen else 8, *more))
        held += is_chosen
    logging.getLogger("optimized").info("%d bits: %d of %d linear layers", bits, held, total)


@torch.no_grad()
def four_bits_part(model: torch.nn.Module, batches: Any, kind: Any, tokens: int, limit: float) -> list[str]:
    """The names of as many linear layers as can have 4 bits where the others have 8, each in a ``kind(weight, bias,
    bits)``, with a divergence up to `limit`. It is measured as recipes are judged: on so many `tokens` that the model
    as given writes after each of the first batches.

    Layers are tried in groups: those with one number of inputs and alike parents, at about the same depth.
    """
    import logging
    import re

    prompts = [{**dict(zip(("input_ids",), args, strict=False)), **kwargs} for args, kwargs in map(spread, batches[:4])]
    texts = [write(decoder_of(model), new_tokens=tokens, **prompt) for prompt in prompts]

    def said() -> torch.Tensor:
        pairs = zip(prompts, texts, strict=True)
        scores = [score(decoder_of(model), text, text.shape[1], **prompt) for prompt, text in pairs]
        return torch.cat([one.flatten(0, 1) for one in scores]).log_softmax(-1)

    layers, packed, wanted = packable(model, 4)[0], dict[Any, Any](), said()

    def divergence(bits: dict[str, int]) -> float:
        for path, number in bits.items():
            parent, name, layer, _ = layers[path]
            if (path, number) not in packed:
                packed[path, number] = kind(layer.weight, layer.bias, number)
            setattr(parent, name, packed[path, number])
        terms = wanted.exp() * (wanted - said())
        for path in bits:
            parent, name, layer, _ = layers[path]
            setattr(parent, name, layer)
        found = float(torch.where(wanted.isinf(), 0.0, terms).sum(-1).mean())
        return max(0.0, found) if found < float("inf") else float("inf")  # also where it is NaN

    kinds: dict[Any, dict[str, list[str]]] = {}
    for path, (_, _, layer, bits) in layers.items():
        above = path.rpartition(".")[0]
        if bits == 4:
            kinds.setdefault((re.sub(r"\d+", "*", above), layer.weight.shape[1]), {}).setdefault(above, []).append(path)
    groups = []
    for units in (list(parents.values()) for parents in kinds.values()):
        runs = layer_groups([1] * len(units), max(1, 12 // len(kinds)))
        groups += [[path for unit in run for path in units[unit]] for run in runs]
    gains = [sum(layers[path][2].weight.numel() for path in group) for group in groups]
    costs = [divergence(dict.fromkeys(group, 4)) for group in groups]
    eight = dict.fromkeys(layers, 8)
    chosen, line = chosen_layers(
        "4 bits", "a divergence", 1.0, groups, gains, costs, limit,
        lambda names: divergence(eight | dict.fromkeys(names, 4)),
    )  # fmt: skip
    logging.getLogger("optimized").info("%s", line, extra={"learned": {"int4_layers": chosen}})
    return chosen
