"""What a denoiser's deep blocks found in one step is used in the next ones as well (Ma et al. 2023: *DeepCache*).

Neighbouring steps of a sampling differ little where the UNet is deep. In a step in between only the layers of the
highest resolution are computed, for what the deep blocks would have found is extrapolated from the last two steps that
computed them (to first order, as Liu et al. 2025, *TaylorSeer*, do). It is another way to the picture, which the
workload's metric has to judge.
"""

from typing import Any

import torch

from fettle.techniques._base import Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques.runtime import AS_GIVEN, Runtime
from fettle.workload import spread


def is_unet(module: Any) -> bool:
    """Whether a module is a UNet of diffusers whose outermost blocks can be computed alone."""
    if type(module).__name__ != "UNet2DConditionModel" or not type(module).__module__.startswith("diffusers."):
        return False
    config, up, down = module.config, module.up_blocks[-1], module.down_blocks[0]
    plain = not (config.center_input_sample or config.class_embed_type or config.num_class_embeds)
    plain = plain and config.addition_embed_type in (None, "text", "text_time")
    kinds = (type(up).__name__, type(down).__name__)
    return (
        plain
        and kinds[0] in ("CrossAttnUpBlock2D", "UpBlock2D")
        and kinds[1] in ("CrossAttnDownBlock2D", "DownBlock2D")
        and len(module.up_blocks) > 1
        and len(up.resnets) > 1
    )


class ShallowUnet(torch.nn.Module):
    """A UNet that answers with what its deep blocks found beside its own answer; given that, it leaves them out."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet: Any = unet
        self.training = unet.training
        self.joined: list[Any] = []
        unet.up_blocks[-1].resnets[-2].register_forward_pre_hook(self.note)

    def note(self, _: Any, args: Any) -> None:
        """What the last layer but one of the last block is given: what came from below, then the block's own."""
        self.joined[:] = [args[0]]

    def forward(
        self, sample: Any, timestep: Any, encoder_hidden_states: Any, deep: Any = None, added_cond_kwargs: Any = None,
        return_dict: bool = True, **others: Any,
    ) -> Any:  # fmt: skip
        unet, text = self.unet, encoder_hidden_states
        if deep is None:
            answer = unet(
                sample, timestep, text, added_cond_kwargs=added_cond_kwargs, return_dict=return_dict, **others
            )
            joined = self.joined.pop()
            return answer, joined[:, : joined.shape[1] - unet.config.block_out_channels[0]]
        if others:
            raise RuntimeError(f"step_cache: steps in between are made without {', '.join(others)}")

        def layer(block: Any, place: int, values: Any) -> Any:
            values = block.resnets[place](values, emb)
            if not hasattr(block, "attentions"):
                return values
            return block.attentions[place](values, encoder_hidden_states=text, return_dict=False)[0]

        emb = unet.time_embedding(unet.get_time_embed(sample=sample, timestep=timestep))
        more = unet.get_aug_embed(emb=emb, encoder_hidden_states=text, added_cond_kwargs=added_cond_kwargs)
        emb = emb if more is None else emb + more
        emb = emb if unet.time_embed_act is None else unet.time_embed_act(emb)
        text = unet.process_encoder_hidden_states(encoder_hidden_states=text, added_cond_kwargs=added_cond_kwargs)
        first = unet.conv_in(sample)
        found = layer(unet.up_blocks[-1], -2, torch.cat([deep, layer(unet.down_blocks[0], 0, first)], 1))
        self.joined.clear()
        found = layer(unet.up_blocks[-1], -1, torch.cat([found, first], 1))
        if unet.conv_norm_out is not None:
            found = unet.conv_act(unet.conv_norm_out(found))
        found = unet.conv_out(found)
        if not return_dict:
            return (found,), None
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

        return UNet2DConditionOutput(sample=found), None


class Steps:
    """Which steps compute everything, and what was found in them.

    A step is one timestep; the halves of a guidance may be calls of their own in it. A call of the pipeline, a timestep
    that is no smaller than the last one, or another sample at the same one begins a new picture. Where pictures are
    made in turn, a step of each at a time, everything is computed.
    """

    from threading import local

    now: Any = local()
    """The thread's `call` of a pipeline."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.call: Any = None
        self.begin()

    def begin(self) -> None:
        """A new picture."""
        self.step, self.place = -1, 0
        self.time = float("inf")
        self.sample: Any = None
        self.others: list[Any] = []  # samples of other pictures at the last timestep
        self.found: dict[int, Any] = {}

    def expected(self, sample: Any, timestep: Any) -> Any:
        """What this call should find, on the line through what the last two found in its place; None in a step that
        computes everything. A timestep is a number, or a tensor with one for all rows or for each."""
        time = float(torch.as_tensor(timestep).reshape(-1)[0])
        call = getattr(self.now, "call", None)
        if call is not self.call:  # the last one may have stopped early
            self.begin()
            self.call = call
        same = self.sample is not None and sample.shape == self.sample.shape
        if same and time == self.time and torch.equal(sample, self.sample):
            self.place += 1
        else:
            others = [*self.others, self.sample] if same and time == self.time else []
            # A step changes a sample little: it goes on with the nearest one, which may be another than the last.
            near = same and all((sample - one).norm() > (sample - self.sample).norm() / 2 for one in self.others)
            if not near or time >= self.time:
                self.begin()
            self.step, self.place, self.time = self.step + 1, 0, time
            self.sample, self.others = sample, others
        if self.step % self.every == 0 or self.place not in self.found:
            return None
        (then, last), *earlier = self.found[self.place]
        if earlier:
            before, older = earlier[0]
            return last + (last - older) * ((time - then) / (then - before))
        return last.clone()  # the caller may write into it

    def keep(self, found: Any) -> None:
        """Note what a call that computed everything has found."""
        self.found[self.place] = [(self.time, found), *self.found.get(self.place, ())][:2]


ANEW = Code(helpers=(Steps,), inputs=("Steps.now.call = object()  # a sampling knows nothing of the last one",))
"""Lines of a pipeline with a part that has steps."""


class StepCache(Steps):
    """What the deep blocks of a UNet found in its steps."""

    def __init__(self, unet: Any, every: int) -> None:
        import inspect

        super().__init__(every)
        self.signature = inspect.signature(unet.forward)

    def given(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Arguments of the UNet by name, without those that are None."""
        bound = self.signature.bind(*args, **kwargs).arguments
        return {name: value for name, value in bound.items() if value is not None}

    def before(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """What the model is called with: with `deep` in a step in between."""
        given = self.given(args, kwargs)
        deep = self.expected(given["sample"], given["timestep"])
        return given if deep is None else {**given, "deep": deep}

    def after(self, output: Any) -> Any:
        """The UNet's answer; what the deep blocks found is kept."""
        answer, deep = output
        if deep is not None:
            self.keep(deep)
        return answer

    def samples(self, model: Any, batches: Any) -> list[Any]:
        """Calls of either kind to calibrate on: everything computed, and with what was found then."""
        found = []
        with torch.no_grad():
            for batch in batches:
                given = self.given(*spread(batch))
                found += [given, {**given, "deep": model(**given)[1].clone()}]
        return found


def sampled_in_openvino(place: int, levels: dict[str, str], facts: Facts) -> list[Bundle]:
    """A bundle for a sampling, where the user's metric judges the picture: it is off by more than errors may be."""
    if not facts.by_metric or facts.device != "cpu" or not facts.has_bf16:
        return []
    streams = {"streams": "per-core"} if facts.samples >= facts.physical_cores > 1 else {}
    return [Bundle(place, {**levels, "runtime": "openvino-bf16", **streams, **AS_GIVEN})]


@register
class CachedSteps(Technique):
    name = "step_cache"
    order = 605
    title = "step caching"
    default = "off"
    of_module = True
    packages = ("diffusers",)

    def levels(self, facts: Facts) -> list[Level]:
        why_not = ""
        if not facts.is_unet:
            why_not = "it is no UNet of diffusers"
        elif facts.calls < 3:
            why_not = "it is not called for step after step"
        return [
            Level("off", "as given"),
            Level("2", "the deep blocks are computed in every second step", why_not),
            Level("3", "the deep blocks are computed in every third step", why_not),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        levels = recipe.levels
        if levels.get("quantize") == "int8-static":
            return "quantize=int8-static leaves one graph, without blocks"
        if levels.get("runtime") == "openvino-int8-part":
            return "layers are chosen for one graph, and steps in between are another"
        if levels.get("skip_steps", "off") != "off":
            return "skip_steps leaves out the same steps"
        return ""

    def bundles(self, facts: Facts) -> list[Bundle]:
        return sampled_in_openvino(5, {"step_cache": "2"}, facts)

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        calibrated = recipe.levels.get("runtime") in Runtime.calibrated
        return Code(
            helpers=(spread, ShallowUnet, Steps, StepCache),
            prepare=(
                f"steps = StepCache(model, {level})",
                "model = ShallowUnet(model)",
                *(["batches = steps.samples(model, batches)"] if calibrated else []),
            ),
            inputs=("args, kwargs = (), steps.before(args, kwargs)",),
            outputs=("output = steps.after(output)",),
            whole=ANEW,
        )
