"""Several tokens a step: what comes next is guessed, and one call of the model checks the guesses.

What is written stays the model's own: token by token where it is always the likeliest one, and in distribution where
tokens are drawn (Leviathan et al. 2023: *Fast inference from transformers via speculative decoding*).

Guesses come from the text so far, which pays where texts repeat what they were given: summaries, code, answers about a
document (prompt lookup; Saxena 2023). Or a smaller model writes them, the workload's `draft`.
"""

from typing import Any

import torch

from fettle.generate.decoding import chances, decoder_of, pick, score
from fettle.generate.workload import positions_of
from fettle.techniques._base import Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques.kv_cache import AHEAD


class Lookup:
    """Guesses from the text itself."""

    def begin(self, room: int, **prompt: Any) -> None:
        """A prompt: nothing is to be read."""

    def guess(self, text: torch.Tensor, ahead: int, *how: Any) -> Any:
        """The `ahead` tokens [rows, ahead] that followed when the last three, or two, tokens of each row of `text` came
        up before, and None: they were not drawn. Both None where they came up in no row."""
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
        return (torch.stack(found) if known else None), None

    def keep(self, tokens: int) -> None:
        """Only so many tokens of the text were right."""


class Draft:
    """Guesses of a smaller model, `model.draft`, which keeps its own keys and values of the text."""

    def __init__(self, model: Any) -> None:
        if getattr(model, "draft", None) is None:
            raise RuntimeError("guessing=draft: model.draft is to be the smaller model that guesses")
        self.decoder = decoder_of(model.draft)
        self.most = positions_of(self.decoder) or float("inf")  # beyond these it cannot guess
        self.read = 0  # tokens of the text that it has read

    def begin(self, room: int, **prompt: Any) -> None:
        self.read = prompt["input_ids"].shape[1]
        if not 0 < self.read < self.most:  # it guesses nothing
            return
        self.decoder.prefill(room=room, **prompt)
        if hasattr(self.decoder, "will_crop"):
            self.decoder.will_crop()

    def guess(self, text: torch.Tensor, ahead: int, temperature: float, top_p: float, generator: Any) -> Any:
        """The tokens [rows, ahead] that the smaller model writes, and what it drew them from [rows, ahead, vocabulary];
        None for the likeliest. Both None where there was no prompt, or the text is too long for it."""
        if not self.read or text.shape[1] + ahead - 1 > self.most:
            return None, None
        tokens, found, drawn_from = text[:, self.read :], [], []
        for _ in range(ahead):
            scores = self.decoder.decode(tokens)[:, -1]
            tokens = pick(scores, temperature, top_p, generator)
            found.append(tokens)
            if temperature > 0:
                drawn_from.append(chances(scores, temperature, top_p))
        self.read = text.shape[1] + ahead - 1
        return torch.cat(found, 1), (torch.stack(drawn_from, 1) if drawn_from else None)

    def keep(self, tokens: int) -> None:
        if self.read > tokens:
            self.decoder.crop(self.read - tokens)
            self.read = tokens


def draw_after(own: torch.Tensor, guessed: torch.Tensor, theirs: Any, generator: Any) -> torch.Tensor:
    """The tokens [rows, 1 to ahead + 1] that come next, distributed as the model itself draws them: the guesses that
    are right for all rows, and one token more.

    `own` [rows, ahead + 1, vocabulary] are the model's chances, `theirs` [rows, ahead, vocabulary] those that `guessed`
    [rows, ahead] was drawn from, None where it was certain. A guess stays with the chance own / theirs, and in place of
    one that does not, a token is drawn from what `own` has more than `theirs` (Leviathan et al. 2023, algorithm 1).
    """
    if theirs is None:
        theirs = torch.nn.functional.one_hot(guessed, own.shape[-1]).to(own.dtype)
    wanted, offered = (each.gather(-1, guessed[..., None])[..., 0] for each in (own[:, :-1], theirs))
    stays = torch.rand(wanted.shape, generator=generator, device=own.device) * offered < wanted
    right = int(stays.all(0).long().cumprod(0).sum())
    if right == guessed.shape[1]:
        return torch.cat([guessed, torch.multinomial(own[:, right], 1, generator=generator)], 1)
    more = (own[:, right] - theirs[:, right]).clamp(min=0) + 1e-20 * own[:, right]  # never nothing, by rounding
    drawn = torch.multinomial(more, 1, generator=generator)
    last = guessed[:, right : right + 1]
    return torch.cat([guessed[:, :right], torch.where(stays[:, right : right + 1], last, drawn)], 1)


@torch.no_grad()
def write_guessing(
    decoder: Any, input_ids: Any = None, *, new_tokens: int, stop_tokens: Any = (), on_tokens: Any = None,
    forced: Any = None, stride: int = 1, temperature: float = 0.0, top_p: float = 1.0, generator: Any = None,
    ahead: int, guesses: Any, **prompt: Any,
) -> torch.Tensor:  # fmt: skip
    """`write`, with `ahead` tokens guessed at a time where there is something to guess from.

    Rows go on together, as far as the guess is right for all of them."""
    given = {} if input_ids is None else {"input_ids": input_ids}
    if forced is not None:
        return score(decoder, forced, max(stride, 1 + ahead), room=ahead, **given, **prompt)
    how = (temperature, top_p, generator)
    scores = decoder.prefill(room=new_tokens + ahead, **given, **prompt)
    if hasattr(decoder, "will_crop"):
        decoder.will_crop()
    text = pick(scores, *how)
    if input_ids is None:  # sound, say: then there is only what is written
        input_ids = text[:, :0]
    text = torch.cat([input_ids, text], 1)
    end, most = input_ids.shape[1] + new_tokens, positions_of(decoder) or float("inf")
    if getattr(decoder, "two_parts", False):  # its decoder has not read the prompt
        begun = prompt.get("decoder_input_ids")
        most += input_ids.shape[1] - (1 if begun is None else begun.shape[1])
    if on_tokens is not None:
        on_tokens(text[:, -1:])
    guesses.begin(new_tokens + ahead, input_ids=input_ids, **prompt)
    stops = torch.tensor(list(stop_tokens), device=text.device)
    ended = torch.isin(text[:, -1:], stops)
    while text.shape[1] < end and not (len(stops) and bool(ended.all())):
        guessed, theirs = guesses.guess(text, ahead, *how) if text.shape[1] + ahead <= most else (None, None)
        if guessed is None:
            new = pick(decoder.decode(text[:, -1:])[:, -1], *how)
        else:
            scores = decoder.decode(torch.cat([text[:, -1:], guessed], 1))
            if temperature > 0:
                new = draw_after(chances(scores, temperature, top_p), guessed, theirs, generator)
            else:
                likeliest = scores.argmax(-1)
                right = int((likeliest[:, :-1] == guessed).all(0).long().cumprod(0).sum())
                new = likeliest[:, : right + 1]
            decoder.crop(guessed.shape[1] + 1 - new.shape[1])
            guesses.keep(text.shape[1] + new.shape[1] - 1)
        new = new[:, : end - text.shape[1]]
        if len(stops):
            over = torch.cat([ended, torch.isin(new, stops)], 1).long().cumsum(1)[:, 1:] > 0
            new = new[:, : int((~over.all(0)).sum()) + 1]
            ended = over[:, new.shape[1] - 1 : new.shape[1]]
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
    served = False

    def levels(self, facts: Facts) -> list[Level]:
        why_not = facts.no_text
        if facts.keeps == "state":
            why_not = "a state takes one token at a time, so that guesses cannot be checked in one call"
        elif not facts.forgets:
            why_not = "the workload's object has no `crop`, by which wrong guesses are forgotten"
        no_draft = why_not or ("" if facts.has_draft else "the workload has no `draft`, a smaller model that guesses")
        if facts.draft_fails:
            no_draft = no_draft or f"the workload's `draft` cannot guess: {facts.draft_fails}"
        return [
            Level("off", "one token a step"),
            Level("prompt", "what followed the same tokens before, checked in one call", why_not),
            Level("draft", "what the workload's smaller model writes, checked in one call", no_draft),
        ]

    def bundles(self, facts: Facts) -> list[Bundle]:
        return [Bundle(15, {"guessing": "draft"})] if facts.has_draft else []

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        given = (f'kwargs.setdefault("ahead", {AHEAD})', 'kwargs.setdefault("guesses", guesses)')
        own, made = (Lookup, "Lookup()") if level == "prompt" else (Draft, "Draft(model)")
        return Code(
            helpers=(positions_of, own, draw_after, write_guessing),
            setup=(f"guesses = {made}",),
            inputs=given,
            writer="write_guessing",
        )
