"""Writing text with a model, as plain PyTorch: what is handed out in ``optimized.py`` and what is measured.

A *decoder* has two methods: ``prefill(room=n, **prompt)`` reads a prompt and returns the scores [rows, vocabulary] of
the first new token, with room for n more; ``decode(tokens)`` takes the next tokens [rows, k] and returns the scores
[rows, k, vocabulary] of the token after each. Guessing ahead also needs ``crop(k)``, which forgets the last k tokens,
and says so after a prompt by ``will_crop()`` where there is one.

The sources of these functions are copied into ``optimized.py``: they use builtins, torch and each other only.
"""

from typing import Any

import torch


def part(output: Any, name: str, place: int) -> Any:
    """A part of a model's answer, by its name, or by its place in a tuple."""
    if isinstance(output, dict):
        if name not in output:
            raise TypeError(
                f"the model's answer has no {name}: give a model that writes, whose answer has logits and "
                "past_key_values, as most of AutoModelForCausalLM's have, or an object with prefill and decode"
            )
        return output[name]
    return getattr(output, name) if hasattr(output, name) else output[place]


def is_two_parts(model: Any) -> bool:
    """Whether it is an encoder with a decoder, as transformers says of its models."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


class Kept:
    """A model with its keys and values kept as the model makes them: the prompt once, then the new tokens only.

    For models that take `past_key_values` (or `cache_params`, or `state`) and give it back, as those of transformers
    do: causal or encoder-decoder.
    Rows of unequal length are filled up on the left, with zeros in `attention_mask`.
    """

    piece: int = 0  # a prompt is read in pieces of so many tokens; 0: in one call

    def __init__(self, model: Any) -> None:
        import inspect

        self.model: Any = model
        self.config: Any = getattr(model, "config", None)
        self.takes = set(inspect.signature(model.forward).parameters)
        states = [name for name in ("cache_params", "state") if name in self.takes]
        self.kept = states[0] if states and "past_key_values" not in self.takes else "past_key_values"
        # A recurrent state takes one token at a time. Whether there is one beside keys and values shows after a prompt.
        self.one_at_a_time = self.kept != "past_key_values"
        if self.kept not in self.takes:  # a wrapper that hands on what it does not name, as PEFT's
            self.takes |= {"past_key_values", "use_cache", "return_dict", "attention_mask", "position_ids"}
        self.two_parts = is_two_parts(model)
        self.past: Any = None
        self.mask: Any = None
        self.given: dict[str, Any] = {}
        self.is_whole = False
        self.beside = 0  # places that no token has: a picture's, where none of the prompt's tokens stand for it

    @torch.no_grad()
    def prefill(self, room: int = 0, **prompt: Any) -> torch.Tensor:
        """Read a prompt: scores [rows, vocabulary] of the first new token. At most `room` tokens follow."""
        mask = prompt.pop("attention_mask", None)
        if mask is not None and bool(mask.all()):
            mask = None
        if self.two_parts:
            tokens, first = prompt.pop("decoder_input_ids", None), next(iter(prompt.values()))
            if tokens is None:
                tokens = torch.full((len(first), 1), self.start_token(), device=first.device)
            self.given, mask = self.encoded(mask, **prompt), None
        else:
            tokens, self.given = prompt.pop("input_ids"), prompt
        self.past = self.new_cache(tokens, room)
        self.mask = self.new_mask(None if mask is None else mask.long())
        self.is_whole, self.beside = bool(self.given), 0  # its other arguments are about the whole prompt
        for new in [tokens] if self.is_whole or not self.piece else tokens.split(self.piece, 1):
            scores = self.ahead(new, 1)
        if not self.two_parts:
            if self.is_whole and hasattr(self.past, "get_seq_length"):
                self.beside = self.past.get_seq_length() - tokens.shape[1]
            self.given = {}
        if self.kept != "past_key_values":  # padding is not in the state
            self.mask = None
        return scores[:, -1]

    @torch.no_grad()
    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Go on with `tokens` [rows, k]: scores [rows, k, vocabulary] of the token after each."""
        return self.ahead(tokens, 0)

    def will_crop(self) -> None:
        """To be called after `prefill` by who calls `crop`: a layer with a sliding window keeps what it needs then."""
        if self.one_at_a_time:
            raise RuntimeError("the model keeps a state, which cannot forget a wrong guess: write without guesses")
        if hasattr(self.past, "activate_past_recording"):
            self.past.activate_past_recording()

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if count == 0:
            return
        if self.mask is not None:
            self.mask = self.mask[:, :-count]
        if hasattr(self.past, "crop"):
            self.past.crop(-count)
        else:  # tuples of keys and values [rows, heads, tokens, size]
            self.past = tuple(tuple(kept[..., :-count, :] for kept in layer[:2]) + layer[2:] for layer in self.past)

    def start_token(self) -> Any:
        """The token that an encoder's decoder begins with, as transformers' `generate` chooses it."""
        known = (getattr(self.model, "generation_config", None), self.config)
        names = ("decoder_start_token_id", "bos_token_id")
        for token in [getattr(one, name, None) for name in names for one in known]:
            if token is not None:
                return token
        raise RuntimeError("the model's config does not say what a decoder begins with: set decoder_start_token_id")

    def encoded(self, mask: Any, **prompt: torch.Tensor) -> dict[str, Any]:
        """What the decoder is given of a prompt in each call: the encoder's states, and which of them are there."""
        masked = {} if mask is None else {"attention_mask": mask}
        return {"encoder_outputs": self.model.get_encoder()(**prompt, **masked), **masked}

    def new_cache(self, tokens: torch.Tensor, room: int) -> Any:
        """None: the model makes its own."""

    def new_mask(self, mask: Any) -> Any:
        """What attention may see before the first call: nothing yet, of each row of a prompt that has a mask."""
        self.next_mask = mask
        return None if mask is None else mask[:, :0]

    def ahead(self, tokens: torch.Tensor, last: int) -> torch.Tensor:
        """One call of the model; with `last` only so many scores are needed."""
        given = {self.kept: self.past, "use_cache": True, "return_dict": True, "logits_to_keep": last}
        # Untold, Bamba counts places from 0 in each call, and GIT those of a picture as well.
        told = self.beside or (self.one_at_a_time and not self.is_whole)
        if self.mask is not None:
            count = tokens.shape[1]
            new = torch.cat([self.next_mask, torch.ones_like(tokens)], 1)[:, :count]
            self.mask, self.next_mask = torch.cat([self.mask, new], 1), self.next_mask[:, count:]
            places = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -count:]
            given |= {"attention_mask": self.mask, "position_ids": places}
        elif told and self.past is not None and "position_ids" in self.takes:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            given["position_ids"] = places + (self.past.get_seq_length() - self.beside)
        given = {name: value for name, value in given.items() if name in self.takes}
        name = "decoder_input_ids" if self.two_parts else "input_ids"
        output = self.model(**{name: tokens}, **(given | self.given))
        self.past = part(output, self.kept, 1)
        self.one_at_a_time = self.one_at_a_time or not getattr(self.past, "is_croppable", True)
        scores: torch.Tensor = part(output, "logits", 0)
        return scores


def decoder_of(model: Any) -> Any:
    """The model itself where it has `prefill` and `decode`, else with its keys and values kept."""
    return model if hasattr(model, "prefill") and hasattr(model, "decode") else Kept(model)


def score(decoder: Any, forced: torch.Tensor, stride: int = 1, room: int = 0, **prompt: Any) -> torch.Tensor:
    """Scores [rows, tokens, vocabulary] of the tokens that `forced` [rows, tokens] has, whatever the model would have
    written: each goes in as if it had been, `stride` at a time where the model can."""
    found = [decoder.prefill(room=forced.shape[1] + room, **prompt)[:, None].to(torch.float32, copy=True)]
    stride = 1 if getattr(decoder, "one_at_a_time", False) else stride
    for place in range(0, forced.shape[1] - 1, stride):
        scores = decoder.decode(forced[:, place : min(place + stride, forced.shape[1] - 1)])
        found.append(scores.to(torch.float32, copy=True))
    return torch.cat(found, 1)


def chances(scores: torch.Tensor, temperature: float, top_p: float = 1.0) -> torch.Tensor:
    """What tokens are drawn from: softmax(scores / temperature) over the last axis, and of that only the fewest
    likeliest tokens that add up to `top_p`."""
    found = (scores.float() / temperature).softmax(-1)
    if top_p < 1:
        ordered, tokens = found.sort(-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
        found = torch.zeros_like(found).scatter(-1, tokens, ordered)
    return found / found.sum(-1, keepdim=True)


def pick(scores: torch.Tensor, temperature: float, top_p: float, generator: Any) -> torch.Tensor:
    """The next token of each row [rows, 1] by its scores [rows, vocabulary]: the likeliest, or drawn."""
    if temperature == 0:
        return scores.argmax(-1, keepdim=True)
    return torch.multinomial(chances(scores, temperature, top_p), 1, generator=generator)


@torch.no_grad()
def write(
    decoder: Any, input_ids: Any = None, *, new_tokens: int, stop_tokens: Any = (), on_tokens: Any = None,
    forced: Any = None, stride: int = 1, temperature: float = 0.0, top_p: float = 1.0, generator: Any = None,
    **prompt: Any,
) -> torch.Tensor:  # fmt: skip
    """Write `new_tokens` after a prompt: tokens [rows, new tokens], always the likeliest, or with a `temperature` drawn
    from their `chances` by a `generator` of the scores' device.

    ``on_tokens(tokens)`` hears of tokens [rows, k] as soon as they are known. It ends early when every row has had one
    of `stop_tokens`. With `forced` tokens nothing is written: returned are their scores, see `score`.
    """
    if input_ids is not None:
        prompt["input_ids"] = input_ids
    if forced is not None:
        return score(decoder, forced, stride, **prompt)
    how = (temperature, top_p, generator)
    tokens = pick(decoder.prefill(room=new_tokens, **prompt), *how)
    found = [tokens]
    if on_tokens is not None:
        on_tokens(tokens)
    stops = torch.tensor(list(stop_tokens), device=tokens.device)
    ended = torch.isin(tokens, stops)
    while len(found) < new_tokens and not (len(stops) and bool(ended.all())):
        tokens = pick(decoder.decode(tokens)[:, -1], *how)
        found.append(tokens)
        if on_tokens is not None:
            on_tokens(tokens)
        if len(stops):
            ended = ended | torch.isin(tokens, stops)
    return torch.cat(found, 1)
