"""Several tokens a step: what comes next is guessed from the text so far, and one call of the model checks the guesses.

What is written stays the model's own, token by token. It pays where texts repeat what they were given: summaries, code,
answers about a document (prompt lookup; Saxena 2023, and Leviathan et al. 2023 for checking ahead).
"""

from typing import Any

import torch

from fettle.generate.decoding import score, write
from fettle.techniques._base import Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._generation import NO_TEXT
from fettle.techniques.kv_cache import AHEAD


def guess(text: torch.Tensor, ahead: int) -> Any:
    """The `ahead` tokens [rows, ahead] that followed when the last three, or two, tokens of each row of `text` came up
    before; None where they did in no row."""
    found, known = [], False
    for row in text:
        following = row[-1:]
        for length in (3, 2):
            if len(row) > length:
                same = (row.unfold(0, length, 1)[:-1] == row[-length:]).all(1).nonzero()
                if len(same):
                    start = int(same[-1]) + length
                    following, known = row[start : start + ahead], True
                    break
        found.append(torch.cat([following, following[-1:].expand(ahead - len(following))]))
    return torch.stack(found) if known else None


@torch.no_grad()
def write_guessing(
    decoder: Any, input_ids: Any = None, *, new_tokens: int, stop_tokens: Any = (), on_tokens: Any = None,
    forced: Any = None, stride: int = 1, ahead: int, **prompt: Any,
) -> torch.Tensor:  # fmt: skip
    """`write`, with `ahead` tokens guessed at a time where the text has something to guess from. Rows go on together,
    as far as the guess is right for all of them."""
    if forced is not None:
        prompt |= {} if input_ids is None else {"input_ids": input_ids}
        return score(decoder, forced, max(stride, 1 + ahead), room=ahead, **prompt)
    if input_ids is None or stop_tokens:  # nothing to look up in, or rows that end by themselves
        return write(decoder, input_ids, new_tokens=new_tokens, stop_tokens=stop_tokens, on_tokens=on_tokens, **prompt)
    scores = decoder.prefill(room=new_tokens + ahead, input_ids=input_ids, **prompt)
    text = torch.cat([input_ids, scores.argmax(-1, keepdim=True)], 1)
    end = input_ids.shape[1] + new_tokens
    if on_tokens is not None:
        on_tokens(text[:, -1:])
    while text.shape[1] < end:
        guessed = guess(text, ahead)
        tokens = text[:, -1:] if guessed is None else torch.cat([text[:, -1:], guessed], 1)
        likeliest = decoder.decode(tokens).argmax(-1)
        right = 0
        if guessed is not None:
            right = int((likeliest[:, :-1] == guessed).all(0).long().cumprod(0).sum())
            decoder.crop(guessed.shape[1] - right)
        new = likeliest[:, : right + 1][:, : end - text.shape[1]]
        text = torch.cat([text, new], 1)
        if on_tokens is not None:
            on_tokens(new)
    return text[:, input_ids.shape[1] :]


@register
class Guessing(Technique):
    name = "guessing"
    order = 656
    title = "tokens guessed ahead"
    default = "off"

    def levels(self, facts: Facts) -> list[Level]:
        why_not = "" if facts.generates else NO_TEXT
        return [
            Level("off", "one token a step"),
            Level("prompt", "what followed the same tokens before, checked in one call", why_not),
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        ahead = (f'kwargs.setdefault("ahead", {AHEAD})',)
        return Code(helpers=(guess, write_guessing), inputs=ahead, writer="write_guessing")
