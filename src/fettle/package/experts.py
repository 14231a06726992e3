"""The products of a mixture of experts, as an operator of a stored graph.

torch 2.13 exports its own (`torch.nn.functional.grouped_mm`) in bfloat16 only. In place of it transformers has another,
which is not there where a package is served; a package holds this one, which does the same.
"""

import torch

OF_TRANSFORMERS, OWN = "torch.ops.transformers.grouped_mm_fallback.default", "torch.ops.fettle.grouped_mm.default"


@torch.library.custom_op("fettle::grouped_mm", mutates_args=())
def grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Rows [rows, in] in groups that end before the rows `offs` [groups], each times its matrix of `weight` [groups,
    in, out]: [rows, out]."""
    groups = zip(input.tensor_split(offs[:-1].tolist()), weight, strict=True)
    found = [rows.to(matrix.dtype) @ matrix for rows, matrix in groups if len(rows)]
    return torch.cat(found) if found else weight.new_empty(0, weight.shape[2])


@grouped_mm.register_fake
def _(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return weight.new_empty(len(input), weight.shape[2])
