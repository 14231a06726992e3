"""What deep blocks found in one step of a sampling is used in the next."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fettle
from fettle.techniques import bundles, conflict, find, probe_facts
from fettle.techniques.skip_steps import SkippedSteps, denoiser_of
from fettle.techniques.step_cache import ShallowUnet, StepCache, is_unet
from fettle.workload import Workload

diffusers = pytest.importorskip("diffusers")
OUTER = {True: ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"), False: ("DownBlock2D", "UpBlock2D")}
SDXL = {
    "addition_embed_type": "text_time", "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 8 + 6 * 4,
}  # fmt: skip


def unet(attends: bool = True, **more: Any) -> Any:
    torch.manual_seed(0)
    down, up = OUTER[attends]
    return diffusers.UNet2DConditionModel(
        sample_size=8, cross_attention_dim=8, block_out_channels=(8, 16), attention_head_dim=4, layers_per_block=2,
        norm_num_groups=4, down_block_types=(down, "DownBlock2D"), up_block_types=("UpBlock2D", up), **more,
    ).eval()  # fmt: skip


def given(time: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(time)
    sample, text = torch.randn(rows, 4, 8, 8, generator=generator), torch.randn(rows, 5, 8, generator=generator)
    return sample, torch.tensor(time), text


@pytest.mark.parametrize(("attends", "more"), [(True, {}), (False, SDXL)])
def test_with_what_its_deep_blocks_find_a_step_in_between_is_the_whole_one(attends: bool, more: dict[str, Any]) -> None:
    plain = unet(attends, **more)
    assert is_unet(plain)
    assert not is_unet(unet(attends, class_embed_type="timestep"))
    added = {"added_cond_kwargs": {"text_embeds": torch.randn(2, 8), "time_ids": torch.randn(2, 6)}} if more else {}
    with torch.no_grad():
        wanted = plain(*given(500), **added).sample
        shallow = ShallowUnet(plain)
        whole, deep = shallow(*given(500), **added)
        between, nothing = shallow(*given(500), deep=deep, **added)
        (bare,), _ = shallow(*given(500), deep=deep, return_dict=False, **added)
        other = shallow(*given(500), deep=0.5 * deep, **added)[0].sample
    assert nothing is None
    assert torch.equal(whole.sample, wanted)
    torch.testing.assert_close(between.sample, wanted)
    assert torch.equal(bare, between.sample)
    assert (other - wanted).norm() > 1e-3 * wanted.norm()
    with pytest.raises(RuntimeError, match="steps in between are made without attention_mask"):
        shallow(*given(500), deep=deep, attention_mask=torch.ones(2, 5))


def test_which_steps_are_whole_and_what_the_others_are_given() -> None:
    def forward(sample: Any, timestep: Any, text: Any = None) -> None: ...

    steps = StepCache(SimpleNamespace(forward=forward), 2)

    def call(time: float, sample: torch.Tensor) -> float | None:
        """What comes from below is the timestep itself where it is computed."""
        named = steps.before((sample, torch.tensor(time)), {"text": None})
        assert list(named)[:2] == ["sample", "timestep"]
        assert "text" not in named
        deep = named.get("deep")
        assert steps.after(("answer", torch.tensor(time) if deep is None else None)) == "answer"
        return None if deep is None else float(deep)

    def picture(times: list[float], calls: int = 1) -> list[list[float | None]]:
        start = torch.rand(1, 4)
        latents = [start + 0.01 * torch.rand(1, 4) for _ in times]
        return [[call(time, latent) for _ in range(calls)] for time, latent in zip(times, latents, strict=True)]

    # 800 is as 900 was; from then on the line through the last two is followed, whatever their distance
    assert picture([900, 800, 700, 550, 500, 100]) == [[None], [900], [None], [550], [None], [100]]
    assert picture([900, 800]) == [[None], [900]]  # a new picture: nothing is left of the last
    assert picture([900, 800, 700, 600], calls=2) == [[None, None], [900, 900], [None, None], [600, 600]]
    assert picture([700]) == [[None]]  # one that was given up,
    assert picture([700, 600]) == [[None], [700]]  # and one that begins where it ended
    assert picture([100, 200, 300]) == [[None], [None], [None]]  # the other way nothing is left out
    assert call(200, torch.rand(1, 4)) == 300
    assert call(100, torch.rand(2, 4)) is None  # another number of rows


def test_of_two_pictures_that_are_made_in_turn_none_is_given_what_the_other_found() -> None:
    def forward(sample: Any, timestep: Any) -> None: ...

    steps = StepCache(SimpleNamespace(forward=forward), 2)
    pictures = [torch.full((1, 4), 1.0), torch.full((1, 4), -1.0)]
    for time in (900, 800, 700, 600):
        for picture in pictures:
            picture = picture + time / 1e4
            given = steps.before((picture, torch.tensor(time)), {})
            assert "deep" not in given
            steps.after(("answer", picture))


def test_a_timestep_for_each_row_is_one_step() -> None:
    def forward(sample: Any, timestep: Any) -> None: ...

    steps = StepCache(SimpleNamespace(forward=forward), 2)
    for time, is_whole in ((900, True), (800, False), (700, True)):
        given = steps.before((torch.rand(2, 4), torch.tensor([time, time])), {})
        assert ("deep" not in given) == is_whole
        steps.after(("answer", torch.ones(1) if is_whole else None))


def test_answers_of_steps_left_out_lie_on_the_line_through_the_last_two() -> None:
    asked = []

    def model(sample: torch.Tensor, timestep: torch.Tensor) -> tuple[torch.Tensor, ...]:
        asked.append(float(timestep[0]))
        return sample.new_full((2,), asked[-1]), sample.new_full((1, 3), 2 * asked[-1])

    skipped = SkippedSteps(model, 2, "sample", 1)
    found = [skipped(torch.rand(1, 4), timestep=torch.tensor([time, time])) for time in (900, 800, 700, 550)]
    assert asked == [900, 700]
    assert [one.tolist() for one, _ in found] == [[900, 900], [900, 900], [700, 700], [550, 550]]
    assert found[-1][1].tolist() == [[1100, 1100, 1100]]
    assert denoiser_of(unet()) == ("sample", 1)
    assert denoiser_of(torch.nn.Linear(2, 2)) == ("", 0)


def test_where_it_is_offered() -> None:
    facts = replace(probe_facts(Workload(unet(), [given(500)])), calls=10)
    technique = find("step_cache")
    assert facts.is_unet
    assert technique.why_not("2", facts) == ""
    assert technique.why_not("2", replace(facts, calls=1)) == "it is not called for step after step"
    assert "no UNet" in technique.why_not("2", probe_facts(Workload(torch.nn.Linear(2, 2), [torch.rand(2, 2)])))
    cores = {"packages": {"openvino": ""}, "cpu_flags": ("avx512_bf16",), "physical_cores": 2, "samples": 2}
    judged = replace(facts, by_metric=True, **cores)
    assert bundles(judged)[0].levels.items() >= {"step_cache": "2", "streams": "per-core"}.items()
    assert "streams" not in bundles(replace(judged, samples=1))[0].levels
    assert not any("step_cache" in one.levels for one in bundles(replace(judged, by_metric=False)))  # off by too much
    assert technique.conflict("2", fettle.Recipe.parse("cuda_graphs=on"), facts) == ""
    recipe = fettle.Recipe.parse("step_cache=2 runtime=openvino-int8-part")
    assert "another" in conflict(recipe, replace(facts, calibration_batches=2, packages={"openvino": "", "nncf": ""}))


def sample(pipe: Any, start: torch.Tensor) -> torch.Tensor:
    """Eight steps down a straight line."""
    for time in torch.arange(800, 0, -100):
        found = pipe["unet"](start, time, torch.ones(len(start), 5, 8)).sample
        start = start - 0.1 * found
    return start


def test_a_sampling_with_steps_left_out() -> None:
    model = torch.nn.ModuleDict({"unet": unet()}).eval()
    work = Workload(model, [torch.randn(2, 4, 8, 8) for _ in range(2)], sample, parts=["unet"])
    with torch.no_grad():
        wanted = sample(model, work.inputs[0])
        calls: list[int] = []
        model["unet"].mid_block.register_forward_hook(lambda *_: calls.append(1))
        fast = fettle.apply(work, "grad=no_grad precision[unet]=bf16 skip_steps[unet]=2")
        calls.clear()
        found = [fast(work.inputs[0]) for _ in range(2)]
    assert len(calls) == 8  # four of eight steps, twice
    assert found[0].dtype == torch.float32
    assert 0 < (found[0] - wanted).norm() / wanted.norm() < 0.05
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("level", ["step_cache", "skip_steps"])
def test_a_sampling_that_stopped_early_leaves_nothing_to_the_next(level: str) -> None:
    def sample(pipe: Any, start: torch.Tensor, text: float = 1.0, last: int = 100) -> torch.Tensor:
        for time in torch.arange(400, last - 1, -100):
            start = start - 0.1 * pipe["unet"](start, time, torch.full((len(start), 5, 8), text)).sample
        return start

    model, start = torch.nn.ModuleDict({"unet": unet()}).eval(), torch.randn(1, 4, 8, 8)
    fast = fettle.apply(Workload(model, [start], sample, parts=["unet"]), f"grad=no_grad {level}[unet]=2")
    wanted = fast(start)
    fast(start, text=5.0, last=400)
    assert torch.equal(fast(start), wanted)


@pytest.mark.parametrize(
    "runtime",
    ["", *(pytest.param(f"runtime[unet]={level}", marks=pytest.mark.slow) for level in ("openvino", "openvino-int8"))],
)
def test_a_sampling_with_cached_steps(runtime: str) -> None:
    if runtime:
        pytest.importorskip("openvino")
        pytest.importorskip("nncf")
    model = torch.nn.ModuleDict({"unet": unet()}).eval()
    work = Workload(model, [torch.randn(2, 4, 8, 8) for _ in range(2)], sample, parts=["unet"])
    with torch.no_grad():
        wanted = sample(model, work.inputs[0])
        calls = []
        hook = model["unet"].mid_block.register_forward_hook(lambda *_: calls.append(1))
        fast = fettle.apply(work, f"grad=no_grad step_cache[unet]=2 {runtime}")
        calls.clear()
        found = fast(work.inputs[0])
        again = fast(work.inputs[0])
        hook.remove()
    assert len(calls) == 8 or runtime  # four of eight steps, twice
    assert 0 < (found - wanted).norm() / wanted.norm() < (0.05 if "int8" in runtime else 0.01)
    torch.testing.assert_close(found, again)
