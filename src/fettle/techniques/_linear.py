"""Linear layers that are not torch's own, for the techniques that change the weights of those."""

from typing import Any

import torch


def is_conv1d(layer: torch.nn.Module) -> bool:
    """Whether it is the linear layer of transformers' GPT-2, whose weight is [in, out]."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def linear_of_conv1d(model: torch.nn.Module) -> None:
    """Put torch's linear layers, which answer alike, in the place of those of transformers' GPT-2."""
    made: dict[Any, torch.nn.Linear] = {}
    layer: Any
    for parent in list(model.modules()):
        for name, layer in list(parent._modules.items()):
            if layer is not None and is_conv1d(layer) and not (layer._forward_hooks or layer._forward_pre_hooks):
                if layer not in made:
                    inputs, outputs = layer.weight.shape
                    made[layer] = torch.nn.Linear(inputs, outputs, device="meta").train(layer.training)
                    weight = layer.weight.detach().T.contiguous()
                    made[layer].weight = torch.nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
                    made[layer].bias = layer.bias
                setattr(parent, name, made[layer])
