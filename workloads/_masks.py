"""From a photograph to the masks of all that is in it, as Segment Anything generates them over a grid of points.

The photographs are the two that ship with scikit-learn; masks are judged by how alike they are to those of float32.
"""

from functools import partial

import numpy as np
import torch
from _shared import kept_answer
from sklearn.datasets import load_sample_image

MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
AT_ONCE = 64
"""Points that the decoder is given in one call, as in the published generator."""


def photograph(name: str, size: int) -> torch.Tensor:
    """One of scikit-learn's photographs with its longer side `size`, normalised and padded to a square."""
    pixels = torch.tensor(load_sample_image(name)).permute(2, 0, 1)[None].float()
    scale = size / max(pixels.shape[-2:])
    height, width = (round(side * scale) for side in pixels.shape[-2:])
    pixels = torch.nn.functional.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    pixels = (pixels - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(DEVIATION).view(1, 3, 1, 1)
    return torch.nn.functional.pad(pixels, (0, size - width, 0, size - height))


def grid(side: int, size: int) -> torch.Tensor:
    """Points in the middle of side x side cells: 1 x points x 1 x 2, in pixels."""
    places = (torch.arange(side) + 0.5) * size / side
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    return torch.stack([columns, rows], -1).reshape(1, -1, 1, 2)


def decoded(
    model: torch.nn.Module, images: torch.Tensor, position: torch.Tensor, points: torch.Tensor, **more: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (points x 3 x height x width) and predicted IoU of the masks at points, images x points x 1 x 2, of
    encoded images. `position` is that of their places; `more` the decoder is given."""
    labels = torch.ones(points.shape[:-1], dtype=torch.int, device=points.device)
    sparse, dense = model.prompt_encoder(input_points=points, input_labels=labels, input_boxes=None, input_masks=None)
    masks, predicted, *_ = model.mask_decoder(
        image_embeddings=images,
        image_positional_embeddings=position,
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
        multimask_output=True,
        **more,
    )
    return masks.flatten(0, 1), predicted.flatten(0, 1)


def masks_at(model: torch.nn.Module, image: torch.Tensor, points: torch.Tensor, **more: object) -> dict:
    """Of one encoded image what `decoded` says, and those masks that are good, stable and no repetition of a better
    one, as run lengths."""
    position = model.get_image_wide_positional_embeddings()
    found = [decoded(model, image, position, some, **more) for some in points.split(AT_ONCE, 1)]
    logits, scores = map(torch.cat, zip(*found, strict=True))
    return {"logits": logits, "scores": scores, "masks": distinct(logits.flatten(0, 1), scores.flatten())}


def distinct(logits: torch.Tensor, scores: torch.Tensor, most: int = 100) -> list:
    """The best of the stable masks, none of which overlaps a better one by more than 0.7 of their union."""
    logits = logits.flatten(1)
    stable = (logits > 1).sum(1) / (logits > -1).sum(1).clamp(min=1)
    order = torch.argsort(scores * stable, descending=True)[: 2 * most]
    filled = logits[order] > 0
    masks = filled.float()
    together = masks @ masks.T
    area = together.diagonal()
    alike = together / (area[:, None] + area - together).clamp(min=1) > 0.7
    table, kept = alike.cpu().numpy(), []  # one copy to the host, not one for each pair
    free = np.ones(len(table), dtype=bool)
    for place, overlaps in enumerate(table):
        if free[place] and len(kept) < most:
            kept.append(place)
            free &= ~overlaps
    return run_lengths(filled[torch.tensor(kept, device=filled.device)])


def run_lengths(masks: torch.Tensor) -> list:
    """Lengths of the runs of each flat mask, the first of which is empty pixels: an array for each mask."""
    changes = torch.nn.functional.pad(masks[:, 1:] != masks[:, :-1], (1, 1), value=True)  # both ends are edges
    lengths = changes.nonzero()[:, 1].diff().cpu().numpy()
    ends, first, found = changes.sum(1).cumsum(0).tolist(), 0, []
    for filled, end in zip(masks[:, 0].tolist(), ends, strict=True):
        found.append(np.concatenate([np.zeros(int(filled), lengths.dtype), lengths[first : end - 1]]))
        first = end
    return found


def behave(model: torch.nn.Module) -> torch.nn.Module:
    """The model with random weights that behave like trained ones."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "embedding" not in name and "embed" not in name:
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)  # the configuration's 1e-10 would give zeros
        elif "pos" in name or "embed" in name or "token" in name:
            torch.nn.init.normal_(weight, std=0.02 if "rel_pos" in name or "pos_embed" in name else 1.0)
    return model


def filled_by(run, batch: tuple) -> torch.Tensor:
    """What is filled at every point of each image: images * points x 3 x height x width."""
    found = run(*batch)
    return torch.cat([one["filled"] for one in found]) if isinstance(found, list) else found["logits"] > 0


def float32_masks(model: torch.nn.Module, call, batch: tuple) -> torch.Tensor:
    """What is filled at every point as the model in float32 has it, computed once for weights and inputs."""

    def make() -> torch.Tensor:
        training = model.training
        with torch.inference_mode():
            masks = filled_by(partial(call, model.eval()), batch)
        model.train(training)
        return masks

    return kept_answer(make, model, batch, "sam")


def pipeline(
    model: torch.nn.Module, call, side: int, name: str, device: str, views: int = 1, counts: tuple[int, ...] = ()
) -> dict:
    """A grid of side x side points. `views` is how many photographs are taken at once: one, turned and mirrored. With
    `counts` each has so many of these points, in one list, and a list says whose they are."""
    model = model.to(device)
    size = model.config.prompt_encoder_config.image_size
    points = (grid(side, size),)
    if counts:
        some = torch.cat([torch.linspace(0, side * side - 1, count).long() for count in counts])
        points = (points[0][0, some], torch.arange(views).repeat_interleave(torch.tensor(counts)))
    images = []
    for photo in ("china.jpg", "flower.jpg"):
        pixels = photograph(photo, size)
        turned = [pixels.flip(3) if view % 2 else pixels for view in range(views)]
        turned = [one.rot90(view // 2, (2, 3)) for view, one in enumerate(turned)]
        images.append(tuple(one.to(device) for one in (torch.cat(turned), *points)))
    wanted = float32_masks(model, call, images[1]).cpu()  # as large as an answer, and none of the model's memory

    def mean_iou(run) -> float:
        pairs = ((a, b.to(a.device)) for a, b in zip(filled_by(run, images[1]), wanted, strict=True))
        both = [((a & b).sum((-2, -1)), (a | b).sum((-2, -1))) for a, b in pairs]
        return float(torch.cat([torch.where(of > 0, of_both / of.clamp(min=1), 1.0) for of_both, of in both]).mean())

    return {
        "model": model,
        "inputs": images[:1],
        "check_inputs": images[1:],
        "call": call,
        "parts": ["vision_encoder", "mask_decoder", "prompt_encoder"],
        "metric": mean_iou,
        "name": name,
        "samples": views,
    }
