"""How the keys and values of the tokens before are kept while text is written.

Left alone a model makes longer tensors for each new token and copies what it had. With room set aside before nothing is
copied, and all steps have one shape: then a step can be one compiled graph, which no longer text compiles again.
"""

from typing import Any

import torch

from fettle.generate.decoding import Kept
from fettle.techniques._base import Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._generation import NO_TEXT

BLOCK = 64
"""Room is set aside in so many tokens at a time."""


class Static(Kept):
    """The same with room for `tokens` set aside before, once for each number of rows; longer texts make it larger.

    `compile` are options of torch.compile for calls of 1 and of `compiled` tokens; None runs them as they are.
    """

    def __init__(self, model: Any, tokens: int, compile: Any = None, compiled: int = 1) -> None:
        super().__init__(model)
        self.tokens, self.compiled, self.caches = tokens, compiled, {}  # type: ignore[var-annotated]
        self.step: Any = None if compile is None else torch.compile(self.call, fullgraph=True, dynamic=False, **compile)

    def new_cache(self, room: int, **prompt: Any) -> Any:
        from transformers import StaticCache

        rows, length = prompt["input_ids"].shape
        if length + room > self.tokens:
            self.tokens, self.caches = -(-(length + room) // 64) * 64, {}
        cache: Any = self.caches.get(rows)
        if cache is None:
            cache = self.caches[rows] = StaticCache(config=self.config, max_cache_len=self.tokens)
        for layer in cache.layers:
            layer.cumulative_length.zero_()  # what lies behind the last token is never looked at
        return cache

    def new_mask(self, mask: Any) -> Any:
        self.places = None
        if mask is None:
            return None
        self.places = (mask.cumsum(1) - 1).clamp(min=0)
        whole = mask.new_ones(len(mask), self.tokens)
        whole[:, : mask.shape[1]] = mask
        return whole

    def crop(self, count: int) -> None:
        for layer in self.past.layers:
            layer.cumulative_length.sub_(count)
        if self.places is not None:
            self.places = self.places - count

    def call(self, tokens: torch.Tensor, past: Any, mask: Any, places: Any, last: int) -> torch.Tensor:
        """One call of the model."""
        given = {"attention_mask": mask, "position_ids": places, "logits_to_keep": last}
        given = {name: value for name, value in given.items() if name in self.takes and value is not None}
        output = self.model(input_ids=tokens, past_key_values=past, use_cache=True, **given, **self.given)
        scores: torch.Tensor = output.logits
        return scores

    def ahead(self, tokens: torch.Tensor, last: int) -> torch.Tensor:
        count, first = tokens.shape[1], bool(last)
        if self.places is not None and not first:
            self.places = self.places[:, -1:] + torch.arange(1, count + 1, device=tokens.device)
        call = self.call
        if self.step is not None and not first and count in (1, self.compiled):
            call, tokens = (
                self.step,
                tokens.clone(memory_format=torch.contiguous_format),
            )  # other strides, another graph
        scores: torch.Tensor = call(tokens, self.past, self.mask, self.places, last)
        return scores


@register
class KvCache(Technique):
    name = "kv_cache"
    order = 655
    title = "keys and values"
    default = "as-given"
    packages = ("transformers",)

    def levels(self, facts: Facts) -> list[Level]:
        why_not = ""
        if not facts.generates:
            why_not = NO_TEXT
        elif facts.keeps == "own":
            why_not = "the workload's object keeps them itself"
        elif facts.keeps != "static":
            why_not = "transformers has no cache of fixed size for this model"
        return [
            Level("as-given", "as the model makes them"),
            Level("static", "room set aside before, nothing copied", why_not),
            Level("static-compiled", "room set aside before, and each step one compiled graph", why_not),
            Level("static-frozen", "the same with weights as constants of the graph", why_not),
        ]

    def level_cost(self, level: str) -> int:
        return 2 if level.startswith("static-") else 1

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if level.startswith("static-") and recipe.levels.get("compile", "off") != "off":
            return "the step is compiled by itself: needs compile=off"
        return ""

    def bundles(self, facts: Facts) -> list[Bundle]:
        if facts.keeps != "static":
            return []
        half = {"precision": "bf16"} if facts.device != "cpu" or facts.has_bf16 else {}
        return [
            Bundle(10, {"kv_cache": "static-frozen", **half}),
            Bundle(20, {"kv_cache": "static", **half}),
            Bundle(30, {"kv_cache": "static-compiled", **half}),
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        ahead = 1 + AHEAD if recipe.levels.get("guessing", "off") != "off" else 1
        tokens = -(-(facts.prompt_tokens + facts.new_tokens + ahead) // BLOCK) * BLOCK
        if level == "static":
            return Code(helpers=(Static,), decoder=f"Static(model, {tokens})")
        options: dict[str, Any] = {}
        if facts.device == "cuda":
            options["mode"] = "reduce-overhead"
        setup: tuple[str, ...] = ("torch._dynamo.config.recompile_limit = 64  # a graph for each number of rows",)
        if level == "static-frozen":
            setup += ("from torch._inductor import config as inductor", "inductor.freezing = True")
        decoder = f"Static(model, {tokens}, compile={options}, compiled={ahead})"
        return Code(helpers=(Static,), setup=setup, decoder=decoder)


AHEAD = 6
"""Tokens that are guessed at a time."""
