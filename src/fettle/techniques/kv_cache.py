"""How the keys and values of the tokens before are kept while text is written.

Left alone a model makes longer tensors for each new token and copies what it had. With room set aside before nothing is
copied, and all steps have one shape: then a step can be one compiled graph, which no longer text compiles again.

In 8 bits they take half the memory of 16. torch has no attention to those: a step makes ordinary numbers of them, of
one layer at a time.
"""

from typing import Any

import torch

from fettle.generate.decoding import Kept
from fettle.techniques._base import Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques.compile import FREEZING, During
from fettle.techniques.precision import computes_in_bf16
from fettle.techniques.runtime import NOT_WHOLE, STATEFUL

BLOCK = 64
"""Room is set aside in so many tokens at a time."""


def attention_of_few(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention of a few tokens to all before them, as sums that the compiler turns into loops: for one token the
    kernel that is made for many takes longer. Queries [rows, heads, tokens, size], as for torch's own."""
    rows, heads, tokens, size = q.shape
    groups = k.shape[1]
    if tokens > 2 or is_causal or dropout_p:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    each = q.reshape(rows, groups, -1, 1, size).float() * (size**-0.5 if scale is None else scale)
    scores = (each * k[:, :, None].float()).sum(-1).reshape(rows, heads, tokens, -1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    shares = scores.softmax(-1).reshape(rows, groups, -1, k.shape[2], 1)
    found: torch.Tensor = (shares * v[:, :, None].float()).sum(-2)
    return found.to(q.dtype).reshape(rows, heads, tokens, -1)


def compiled(call: Any, options: Any, guarded: bool) -> Any:
    """`call` as one graph, compiled at its first call. Without guards it must be given the same shapes ever after, and
    tensors that are not among its arguments must stay where they are: to look through all that a model has and to
    gather it for the graph takes a fifth of a step."""
    from torch._inductor.compile_fx import compile_fx
    from torch.utils._pytree import tree_leaves

    kept: list[Any] = []  # what was compiled, the tensors it was called with, and what it gave

    def backend(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch._C._nn.scaled_dot_product_attention:
                node.target = attention_of_few
        graph.recompile()
        # Otherwise Inductor fuses the rotation of a query into the product, and computes it again for every key.
        patches: dict[str, Any] = {"realize_opcount_threshold": 8}
        if not guarded and all(one.is_cpu for one in inputs if isinstance(one, torch.Tensor)):
            # Python, in place of C++, takes a tenth of a small model's step to call the kernels.
            patches |= {"cpp_wrapper": True, "cpp_wrapper_build_separate": True}
        run: Any = compile_fx(graph, inputs, config_patches=patches)

        def keep(*tensors: Any) -> Any:
            kept[:] = run, list(tensors), run(*tensors)
            return kept[2]

        return run if guarded else keep

    if options.get("mode") and not guarded:
        return torch.compile(call, fullgraph=True, dynamic=False, **options)
    if guarded:
        return torch.compile(call, fullgraph=True, backend=backend)
    none: Any = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    whole: Any = torch.compile(call, fullgraph=True, dynamic=False, backend=backend, options=none)
    places: list[Any] = []  # of the arguments' tensors among those of the graph

    def step(*given: Any) -> Any:
        new = [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
        if places:
            run, tensors, _ = kept
            for place, tensor in zip(places, new, strict=True):
                if place is not None:
                    tensors[place] = tensor
            return run(*tensors)[0]
        scores = whole(*given)
        _, tensors, found = kept
        if len(found) == 1 and found[0] is scores:
            places[:] = [next((i for i, one in enumerate(tensors) if one is tensor), None) for tensor in new]
        return scores

    return step


class Static(Kept):
    """The same with room for `tokens` set aside before, once for each number of rows; longer texts make it larger. A
    layer with a sliding window keeps every token too, and its mask says which it sees. An encoder's states are filled
    up to one length, so that all steps have one shape.

    `compile` are options of torch.compile for calls of 1 and of `compiled` tokens, and with `prompts` for those; None
    runs them as they are.
    """

    def __init__(self, model: Any, tokens: int, compile: Any = None, compiled: int = 1, prompts: bool = False) -> None:
        super().__init__(model)
        self.tokens, self.compiled, self.caches = tokens, compiled, {}  # type: ignore[var-annotated]
        self.compile, self.prompts, self.graphs = compile, prompts, {}  # type: ignore[var-annotated]
        self.encoder: Any = model.get_encoder() if self.two_parts else None
        self.source = 0  # room for the encoder's states, in tokens

    def encoded(self, mask: Any, **prompt: torch.Tensor) -> dict[str, Any]:
        from transformers.modeling_outputs import BaseModelOutput

        if self.prompts:
            self.encoder, self.prompts = compiled(self.encoder, self.compile, guarded=True), False
        masked = {} if mask is None else {"attention_mask": mask}
        states: torch.Tensor = self.encoder(**prompt, **masked)[0]
        rows, length = states.shape[:2]
        room = length
        if "input_ids" in prompt:  # not sound or pictures: they have one length, and some decoders see all of it
            room = max(self.source, -(-length // 64) * 64)
            mask = torch.ones(rows, length, device=states.device) if mask is None else mask
            masked = {"attention_mask": torch.nn.functional.pad(mask.long(), (0, room - length))}
            states = torch.nn.functional.pad(states, (0, 0, 0, room - length))
        if room != self.source:
            self.source, self.caches, self.graphs = room, {}, {}
        return {"encoder_outputs": BaseModelOutput(states), **masked}

    def new_cache(self, tokens: torch.Tensor, room: int) -> Any:
        from transformers import EncoderDecoderCache, StaticCache
        from transformers.cache_utils import StaticLayer

        class Layer(StaticLayer):  # type: ignore[no-untyped-call]
            def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
                return super().update(key_states, value_states.to(key_states.dtype))  # autocast gives them two types

        rows, length = tokens.shape
        if length + room > self.tokens:
            self.tokens, self.caches, self.graphs = -(-(length + room) // 64) * 64, {}, {}
        caches: Any = self.caches.get(rows)
        made_there = caches is not None and caches[0].layers[0].cumulative_length.is_inference()
        if made_there and not torch.is_inference_mode_enabled():  # which could not write into it
            self.caches, self.graphs, caches = {}, {}, None
        if caches is None:
            config = self.model.get_decoder().config if self.two_parts else self.config
            caches = self.caches[rows] = [StaticCache(config=config, max_cache_len=self.tokens)]
            caches[0].layers = [Layer(self.tokens) for _ in caches[0].layers]
            if self.two_parts:
                caches.append(StaticCache(config=config, max_cache_len=self.source))
                caches[1].layers = [Layer(self.source) for _ in caches[1].layers]
        for layer in (layer for cache in caches for layer in cache.layers):
            layer.cumulative_length.zero_()  # what lies behind the last token is never looked at
        self.own = caches[0]
        return EncoderDecoderCache(*caches) if self.two_parts else self.own

    def new_mask(self, mask: Any) -> Any:
        self.places = None
        if mask is None:
            return None
        self.places = self.next_places = (mask.cumsum(1) - 1).clamp(min=0)
        whole = mask.new_ones(len(mask), self.tokens)
        whole[:, : mask.shape[1]] = mask
        return whole

    def crop(self, count: int) -> None:
        for layer in self.own.layers:
            layer.cumulative_length.sub_(count)
        if self.places is not None:
            self.places = self.places - count

    def call(self, tokens: torch.Tensor, past: Any, mask: Any, places: Any, own: Any, last: int) -> torch.Tensor:
        """One call of the model, with what is its `own` besides."""
        if mask is None and "position_ids" in self.takes and torch.compiler.is_compiling():
            # Without positions some models count tokens by the mask, whose changing length a graph cannot have.
            places = (past.get_seq_length() + torch.arange(tokens.shape[1], device=tokens.device))[None]
            mask = tokens.new_ones(len(tokens), self.tokens)
        given = {"attention_mask": mask, "position_ids": places, "logits_to_keep": last}
        given = {name: value for name, value in given.items() if name in self.takes and value is not None}
        name = "decoder_input_ids" if self.two_parts else "input_ids"
        output = self.model(**{name: tokens}, past_key_values=past, use_cache=True, **(given | own))
        scores: torch.Tensor = output.logits
        return scores

    def ahead(self, tokens: torch.Tensor, last: int) -> torch.Tensor:
        count, first = tokens.shape[1], bool(last)
        if self.places is not None and first:
            self.places, self.next_places = self.next_places[:, :count], self.next_places[:, count:]
        elif self.places is not None:
            self.places = self.places[:, -1:] + torch.arange(1, count + 1, device=tokens.device)
        call = self.call
        if self.compile is not None and (self.prompts and count > 1 if first else count in (1, self.compiled)):
            kind = (len(tokens), 0 if first else count, self.mask is None, *self.given)
            if kind not in self.graphs:
                self.graphs[kind] = compiled(self.call, self.compile, guarded=first)
            call, tokens = self.graphs[kind], tokens.clone(memory_format=torch.contiguous_format)
            if first:
                torch._dynamo.maybe_mark_dynamic(tokens, 1)
        scores: torch.Tensor = call(tokens, self.past, self.mask, self.places, self.given, last)
        return scores


class Rounded(Kept):
    """The same with keys and values rounded to 8 bits, with a scale for each token of each head."""

    def new_cache(self, tokens: torch.Tensor, room: int) -> Any:
        from transformers.cache_utils import Cache, DynamicLayer

        class Layer(DynamicLayer):  # type: ignore[no-untyped-call]
            keys: Any
            values: Any

            def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
                is_first = not self.is_initialized
                if is_first:
                    self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
                    self.keys, self.values = (new[:, :, :0].to(torch.int8) for new in (key_states, value_states))
                    self.scales = [new[:, :, :0, :1] for new in (key_states, value_states)]
                held = [self.keys, self.values]
                for number, new in enumerate((key_states, value_states)):
                    steps = (new.float().abs().amax(-1, keepdim=True) / 127).to(new.dtype)
                    steps = steps.clamp(min=torch.finfo(new.dtype).tiny)
                    codes = (new.float() / steps.float()).round().clamp(-127, 127).to(torch.int8)
                    held[number] = torch.cat([held[number], codes], 2)
                    self.scales[number] = torch.cat([self.scales[number], steps], 2)
                self.keys, self.values = held
                if is_first:  # a prompt attends to its own keys and values unrounded
                    return key_states, value_states
                return tuple(codes.to(self.dtype).mul_(steps) for codes, steps in zip(held, self.scales, strict=True))

            def crop(self, *count: int) -> None:
                super().crop(*count)
                self.scales = [steps[:, :, : self.keys.shape[2]] for steps in self.scales]

        return Cache(layer_class_to_replicate=Layer)


@register
class KvCache(Technique):
    name = "kv_cache"
    order = 655
    title = "keys and values"
    default = "as-given"
    served = False
    packages = ("transformers",)
    compiles = frozenset({"static-compiled", "static-prompts", "static-frozen"})

    def levels(self, facts: Facts) -> list[Level]:
        why_not = facts.no_text or "the workload's object keeps them itself" * (facts.keeps == "own")
        able = facts.keeps in ("static", "whole")
        older = "this transformers has no cache of fixed size that works for this model: a later one may have it"
        none = "transformers has no cache of fixed size for this model"
        static = why_not or none * (not able) or older * (facts.keeps == "whole")
        return [
            Level("as-given", "as the model makes them"),
            Level("static", "room set aside before, nothing copied", static),
            Level("static-compiled", "room set aside before, and each step one compiled graph", static),
            Level("static-prompts", "the same, and prompts of all lengths one more", static),
            Level("static-frozen", "each step one compiled graph with weights as its constants", static),
            Level(
                "int8",
                f"rounded to 8 bits, which saves memory, and time with runtime={STATEFUL}",
                why_not or NOT_WHOLE * (facts.sees_part or not able),
            ),
        ]

    def level_cost(self, level: str) -> int:
        return 2 if level.startswith("static-") else 1

    def only_saves_memory(self, level: str, recipe: Recipe) -> bool:
        return level == "int8" and recipe.levels.get("runtime") != STATEFUL

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if level.startswith("static-") and recipe.levels.get("compile", "off") != "off":
            return "the step is compiled by itself: needs compile=off"
        return ""

    def bundles(self, facts: Facts) -> list[Bundle]:
        if facts.keeps != "static":
            return []
        half = {"precision": "bf16"} if computes_in_bf16(facts) else {}
        if facts.device == "cuda":  # where what a step launches takes longer than what it computes
            return [Bundle(20, {"kv_cache": "static-compiled", **half})]
        compiled = Bundle(60, {"kv_cache": "static-compiled", **half})
        if facts.has_block_products:  # weights in few bits come first
            return [compiled]
        return [
            Bundle(20, {"kv_cache": "static", **half}),
            Bundle(30, {"kv_cache": "static-frozen", **half}),
            compiled,
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        if level == "int8" and recipe.levels.get("runtime") == STATEFUL:
            return Code()  # the runtime's own
        if level == "int8":
            return Code(helpers=(Rounded,), decoder="Rounded(model)")
        ahead = 1 + AHEAD if recipe.levels.get("guessing", "off") != "off" else 1
        tokens = -(-(facts.prompt_tokens + facts.new_tokens + ahead) // BLOCK) * BLOCK
        if level == "static":
            return Code(helpers=(Static,), decoder=f"Static(model, {tokens})")
        options = {"mode": "reduce-overhead"} if facts.device == "cuda" else {}
        limit = "torch._dynamo.config.recompile_limit = 64  # a graph for each number of rows"
        frozen = level == "static-frozen"
        prompts = ", prompts=True" if level == "static-prompts" else ""
        return Code(
            helpers=(attention_of_few, compiled, Static, *((During,) if frozen else ())),
            setup=(limit, *(FREEZING if frozen else ())),
            contexts=("frozen",) if frozen else (),
            decoder=f"Static(model, {tokens}, compile={options}, compiled={ahead}{prompts})",
        )


AHEAD = 6
"""Tokens that are guessed at a time."""
