"""How near a recipe's text is to the reference's, by teacher forcing.

The reference, the model in eval mode in float32, writes its own continuation of each prompt. Every recipe is then fed
those tokens, and the workload's texts, one after the other in the way that it writes, and what it would have said is
compared token by token: the Kullback-Leibler divergence from the reference's distribution, whether the likeliest token
is the same, and the perplexity. One token that falls otherwise changes all that follow in free writing; it is one token
here.

The measures are those of llama.cpp's ``llama-perplexity --kl-divergence``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fettle.errors import UsageError
from fettle.estimates import mean_interval, ratio_of
from fettle.files import whole
from fettle.generate.decoding import Kept, decoder_of, score
from fettle.generate.speed import rows_in
from fettle.generate.workload import GenerationWorkload, learned_positions

MAX_KL = 0.01
"""Default limit on the mean divergence in nats per token. llama.cpp's table for Llama 3 8B against its 16-bit weights
(tools/perplexity/README.md): 8 bits (q8_0) 0.0014, 6 bits (q6_K) 0.0055, 5 bits (q5_K_M) 0.011, 4 bits 0.031
(q4_K_M) to 0.072 (q4_0), 3 bits (q3_K_M) 0.10; float16 against bfloat16 0.00003."""
STRIDE = 64
"""Tokens of a text that are fed in one call."""
_MOST_BYTES = 512 << 20
"""Of the reference's distributions that are kept."""
_BLOCK = 16
"""Tokens in a row whose losses count as one observation: neighbours are not independent."""
_ASTRAY = 0.1
"""Nats per token by which a recipe's own text may fall short of its own likeliest tokens: ties broken otherwise are
hundredths, text that does not follow its scores is whole nats."""
_ROUNDED = 0.1
"""Largest relative L2 distance between the scores of a row with padding and of that row alone: in 16 bits, or with
what comes in rounded to 8, they are hundredths apart."""


@dataclass(frozen=True)
class Piece:
    """What is judged at once: a prompt and the tokens that follow."""

    prompt: dict[str, torch.Tensor]
    forced: torch.Tensor
    """[rows, tokens]"""
    log_p: torch.Tensor
    """The reference's log probabilities [rows, tokens, vocabulary]."""
    is_text: bool
    """One of the workload's texts; else the reference's own words."""


@dataclass(frozen=True)
class Closeness:
    """A recipe beside the reference. Divergences and losses in nats per token; NaN where there is a problem."""

    kl: float = math.nan
    """Mean Kullback-Leibler divergence of the recipe's distribution from the reference's."""
    worst_kl: float = math.nan
    """The largest of any token."""
    agreement: float = math.nan
    """Share of tokens with the same likeliest one."""
    perplexity: float = math.nan
    """Of the recipe, on the workload's texts, or else on the reference's words."""
    ratio: float = math.nan
    """Its perplexity over the reference's,"""
    low: float = math.nan
    high: float = math.nan
    """with its interval."""
    problem: str = ""


def as_reference(model: Any) -> str:
    """Put a model into eval mode, and into float32 where transformers lets it be converted: the type that it has then.
    What is quantised as given is its own reference."""
    if not isinstance(model, torch.nn.Module):
        return "float32"
    model.eval()
    try:
        model.float()
    except ValueError:
        kinds = [tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()]
        return f"{str(kinds[0]).removeprefix('torch.') if kinds else 'integers'}, with its quantised weights"
    return "float32"


def write_pieces(workload: GenerationWorkload, path: str) -> list[Piece]:
    """Let the reference write and score, and save what recipes are judged by; the model stays `as_reference`. The
    pieces are those of the inputs, of the check inputs, then the texts, as far as memory for their distributions
    goes."""
    decoder = decoder_of(workload.model)
    as_reference(workload.model)
    pieces, left, row_bytes = [], _MOST_BYTES, 0
    for prompt, text in _what_is_judged(workload):
        if left <= 0:
            break
        if text is None:
            forced, scores = _written(decoder, prompt, int(workload.new_tokens))
            if isinstance(decoder, Kept):
                _check_padding(decoder, prompt, forced, scores)
                if not row_bytes:  # once is enough
                    _check_going_on(decoder, prompt, forced, scores)
        else:  # the inputs came first, so that `row_bytes` is known: score no more than is kept
            forced = text[:, : max(1, left // (len(text) * row_bytes))]
            scores = score(decoder, forced, STRIDE, **prompt)
        row_bytes = 4 * scores.shape[2]
        keep = max(1, left // (len(scores) * row_bytes))
        piece = Piece(prompt, forced[:, :keep].cpu(), scores[:, :keep].log_softmax(-1).cpu(), text is not None)
        pieces.append(piece)
        left -= piece.log_p.numel() * 4
    with whole(path) as partial:  # a resumed study trusts what is there
        torch.save([vars(piece) for piece in pieces], partial)
    return pieces


def _written(decoder: Any, prompt: dict[str, Any], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest `count` tokens after a prompt [rows, count], and the scores that each was chosen by."""
    found = [decoder.prefill(room=count, **prompt)[:, None].to(torch.float32, copy=True)]
    while len(found) < count:
        found.append(decoder.decode(found[-1].argmax(-1)).to(torch.float32, copy=True))
    scores = torch.cat(found, 1)
    return scores.argmax(-1), scores


def _check_padding(decoder: Kept, prompt: dict[str, Any], forced: torch.Tensor, scores: torch.Tensor) -> None:
    """Raise `UsageError` where the row of a prompt with the most padding is not given the scores that it has alone: a
    model may count positions in another way than by the mask, or not know the mask at all."""
    mask = prompt.get("attention_mask")
    if mask is None or bool(mask.all()) or decoder.two_parts or any(len(each) != len(mask) for each in prompt.values()):
        return
    counts = mask.long().sum(1)
    row = int(counts.where(counts > 0, mask.shape[1]).argmin())  # a row that is all padding has no scores of its own
    seen = mask[row].bool()
    alone = {
        name: tensor[row : row + 1, seen] if tensor.shape[:2] == mask.shape else tensor[row : row + 1]
        for name, tensor in prompt.items()
    }
    off = _apart(scores[row, :2], score(decoder, forced[row : row + 1, :2], **alone)[0])
    if off > _ROUNDED:
        raise UsageError(
            f"a row of a prompt gets other scores with padding than alone (relative error {off:.2g}): the model takes "
            "no attention_mask, or counts positions in its own way; give prompts without padding, such as of one row"
        )


def _check_going_on(decoder: Kept, prompt: dict[str, Any], forced: torch.Tensor, scores: torch.Tensor) -> None:
    """Raise `UsageError` where a token that follows the prompt in a call of its own gets other scores than as a part of
    the prompt: a model may count positions anew in each call."""
    if decoder.two_parts or forced.shape[1] < 2 or set(prompt) - {"input_ids", "attention_mask"}:
        return
    longer = {name: torch.cat([one, torch.ones_like(one[:, :1])], 1) for name, one in prompt.items()}
    longer["input_ids"][:, -1:] = forced[:, :1]
    off = _apart(scores[:, 1], decoder.prefill(room=1, **longer).float())
    if off > _ROUNDED:
        raise UsageError(
            f"a token gets other scores after the prompt than as its last token (relative error {off:.2g}): the model "
            "counts positions anew in calls with past_key_values; give an object with prefill and decode that hands "
            "it position_ids"
        )


def _apart(scores: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2 distance of scores, each token's less their mean."""
    found, exact = (one - one.mean(-1, keepdim=True) for one in (scores, wanted))
    return float((found - exact).norm()) / max(float(exact.norm()), 1e-30)


def read_pieces(path: str) -> list[Piece]:
    """What `write_pieces` saved; tensors only, nothing is executed."""
    return [Piece(**piece) for piece in torch.load(path, weights_only=True)]


def _what_is_judged(workload: GenerationWorkload) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    for prompt in [*workload.inputs, *workload.check_inputs]:
        yield prompt, None
    device = next(iter(workload.inputs[0].values())).device
    positions = learned_positions(workload.model)
    for text in (given.to(device) for given in workload.texts):
        for part in text.split(positions or text.shape[1], 1):
            if part.shape[1] > 1:
                yield {"input_ids": part[:, :1]}, part[:, 1:]


def scores_of(run: Callable[..., Any], piece: Piece, device: str) -> torch.Tensor:
    """The scores [rows, tokens, vocabulary] that a recipe gives the tokens of a piece."""
    prompt = {name: tensor.to(device) for name, tensor in piece.prompt.items()}
    found = run(**prompt, forced=piece.forced.to(device), stride=STRIDE if piece.is_text else 1)
    return found.detach().float().cpu()  # type: ignore[no-any-return]


def closeness(pieces: Sequence[Piece], scores: Sequence[torch.Tensor]) -> Closeness:
    """Compare a recipe's `scores` of each piece with the reference's."""
    divergences, same, losses = [], [], []
    texts = any(piece.is_text for piece in pieces)
    for piece, raw in zip(pieces, scores, strict=True):
        if raw.shape != piece.log_p.shape:
            shapes = f"{list(raw.shape)}, the reference's {list(piece.log_p.shape)}"
            return Closeness(problem=f"its scores have the shape {shapes}")
        if bool((~raw.isfinite() & piece.log_p.isfinite()).any()):
            return Closeness(problem="its scores have values that are NaN or infinite")
        log_q, log_p = raw.log_softmax(-1), piece.log_p
        terms = log_p.exp() * (log_p - log_q)
        divergences.append(torch.where(log_p.isinf(), 0.0, terms).sum(-1).flatten())
        same.append((log_q.argmax(-1) == log_p.argmax(-1)).flatten())
        if piece.is_text or not texts:
            place = piece.forced[..., None].long()
            losses.append(torch.stack([-(log.gather(-1, place)[..., 0]) for log in (log_p, log_q)], -1))
    kl = torch.cat(divergences).double()
    apart = [difference for loss in losses for difference in _blocks(loss[..., 1] - loss[..., 0])]
    mean, half = mean_interval(apart)
    own = torch.cat([loss[..., 1].flatten() for loss in losses]).double().mean().item()
    return Closeness(
        kl=max(0.0, kl.mean().item()),  # rounding makes it negative where it is 0
        worst_kl=kl.max().item(),
        agreement=torch.cat(same).double().mean().item(),
        perplexity=ratio_of(own),
        ratio=ratio_of(mean),
        low=ratio_of(mean - half),
        high=ratio_of(mean + half),
    )


def astray(
    run: Callable[..., Any], prompt: dict[str, Any], text: Any, new_tokens: int, scores: torch.Tensor | None = None
) -> str:
    """What is wrong with the `text` that a recipe wrote by itself after `prompt`, where that is not what its own scores
    say: forced tokens alone would never show it. Empty when nothing is. `scores` of that text, where they are known."""
    rows = rows_in(prompt)
    if not isinstance(text, torch.Tensor) or tuple(text.shape) != (rows, new_tokens):
        return f"it wrote {list(getattr(text, 'shape', []))} tokens in place of {[rows, new_tokens]}"
    log_q = (run(**prompt, forced=text).cpu() if scores is None else scores).float().log_softmax(-1)
    short = log_q.max(-1).values - log_q.gather(-1, text.cpu()[..., None])[..., 0]
    lost = float(short.mean())
    return "" if lost <= _ASTRAY else f"it does not write what it scores highest: {lost:.2g} nats a token below"


def unequal(forced: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> float:
    """Share of the tokens that a recipe wrote by itself which are not those that the reference wrote, over the first
    texts, as many as are `written`."""
    different = total = 0
    for wanted, text in zip(forced, written, strict=False):
        text = text.cpu()[:, : wanted.shape[1]]  # of a long text fewer tokens may have been kept
        different += int((text != wanted).sum())
        total += text.numel()
    return different / total if total else math.nan


def _blocks(differences: torch.Tensor) -> list[float]:
    """Means of `_BLOCK` tokens in a row, row by row; what is left at a row's end is one more where it is half of it."""
    found = []
    for row in differences.double():
        parts = row.split(_BLOCK)
        found += [part.mean().item() for part in parts if len(part) * 2 >= min(_BLOCK, len(row))]
    return found
