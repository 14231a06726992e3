"""Worker processes of a DataLoader. `fettle data` looks at an input pipeline in depth."""

from typing import Any

import torch

from fettle.techniques._base import TRAINING, Code, Facts, Level, Recipe, Technique, register


def with_workers(loader: torch.utils.data.DataLoader, count: int) -> torch.utils.data.DataLoader:  # type: ignore[type-arg]
    """The same loader with `count` worker processes that live from one epoch to the next."""
    if type(loader).__iter__ is not torch.utils.data.DataLoader.__iter__:
        raise RuntimeError(f"loading: {type(loader).__name__} does more with its batches than a DataLoader")
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        options: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        options = {"batch_sampler": loader.batch_sampler}
    else:
        options = {"batch_size": None, "sampler": loader.sampler}
    if count > 0:
        options |= {
            "persistent_workers": True, "prefetch_factor": loader.prefetch_factor, "timeout": loader.timeout,
            "multiprocessing_context": loader.multiprocessing_context, "in_order": loader.in_order,
        }  # fmt: skip
    return torch.utils.data.DataLoader(
        loader.dataset, num_workers=count, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn, generator=loader.generator, **options,
    )  # fmt: skip


@register
class Loading(Technique):
    name = "loading"
    order = 200
    modes = TRAINING
    rung = 7
    title = "data loading"
    default = "as-given"
    changes_memory = False

    def levels(self, facts: Facts) -> list[Level]:
        why_not = "" if facts.loader_workers >= 0 else "the data is not a DataLoader"
        levels = [Level("as-given", "as the workload loads it")]
        for count in (0, 1, 2, 4):
            same = f"the loader has {count} already" if count == facts.loader_workers else ""
            many = f"there are {facts.physical_cores} cores" if count > facts.physical_cores else ""
            if facts.iterable_data and count > 1 >= facts.loader_workers:
                many = "the dataset is iterable: each worker may give all its rows"
            levels.append(Level(f"workers-{count}", f"{count} worker processes", why_not or same or many))
        return levels

    def is_met(self, level: str, facts: Facts) -> bool:
        return level == f"workers-{facts.loader_workers}"

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(helpers=(with_workers,), prepare=(f"data = with_workers(data, {level.removeprefix('workers-')})",))
