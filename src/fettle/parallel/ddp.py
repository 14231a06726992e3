"""DDP's reducer as a plan sees it: its buckets, what it does with gradients, and what it sends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fettle.parallel import formulas
from fettle.parallel.strategies import Strategy
from fettle.parallel.timeline import Collective, Timeline


def ddp_buckets(trained: list[torch.nn.Parameter], strategy: Strategy, timeline: Timeline) -> None:
    """DDP's flat buckets, and what its reducer does with a gradient as soon as it is there."""
    with timeline.phase("before"):
        views = _bucket_views(trained)
        timeline.see(views, "gradients" if strategy.buckets == "view" else "transients", final=True)
        if strategy.compress == "powersgd":
            errors = [torch.empty_like(view) for view in views]  # the error that PowerSGD carries to the next step
            timeline.see(errors, "transients", final=True)
            views[0]._fettle_errors = errors  # type: ignore[attr-defined]
    sent: list[torch.Tensor] = []

    def ready(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            with torch.no_grad():
                view.copy_(parameter.grad)
                if strategy.buckets == "view":
                    parameter.grad = view
                if strategy.compress == "fp16":
                    sent.append(view.to(torch.float16))  # an upper bound: all are still on their way at the end
                    timeline.see(sent[-1], "transients", final=True)

        return hook

    for parameter, view in zip(trained, views, strict=True):
        parameter.register_post_accumulate_grad_hook(ready(view))  # type: ignore[no-untyped-call]


def _bucket_views(trained: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """One view a parameter into flat buckets, one bucket set for each type."""
    views: dict[int, torch.Tensor] = {}
    for dtype in {p.dtype for p in trained}:
        same = [p for p in trained if p.dtype == dtype]
        left = list(reversed(same))
        for size in formulas.bucket_sizes([p.numel() * p.element_size() for p in same]):
            flat = torch.empty(size // left[0].element_size(), dtype=dtype)
            offset = 0
            while offset < flat.numel():
                parameter = left.pop(0)
                views[id(parameter)] = flat[offset : offset + parameter.numel()].view(parameter.shape)
                offset += parameter.numel()
    return [views[id(p)] for p in trained]


def collectives_of_ddp(model: torch.nn.Module, strategy: Strategy) -> list[Collective]:
    """What DDP sends in a step, and ZeRO-1 after it."""
    if strategy.kind not in ("ddp", "zero1"):
        return []
    trained = [p for p in model.parameters() if p.requires_grad]
    sizes = [p.numel() * p.element_size() for p in trained]
    divisor = 2 if strategy.compress == "fp16" and trained[0].element_size() == 4 else 1
    made = [Collective("all_reduce", size // divisor) for size in formulas.bucket_sizes(sizes)]
    if strategy.kind == "zero1":  # the owner of each parameter sends its new value to all
        made += [Collective("broadcast", size) for size in sizes]
    return made
