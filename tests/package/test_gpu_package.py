"""A model that lies on a GPU, packaged and loaded there and on the CPU. Not run where there is none."""

import pytest
import torch
from torch import nn

from fettle.package.export import write_package
from fettle.package.model_runner import load_model
from fettle.recipe import Recipe
from fettle.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Positions(nn.Module):
    """Makes a tensor on its input's device, as models do with positions and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + torch.arange(4, device=x.device)


@pytest.mark.parametrize("text", ["", "precision=bf16 compile=default", "cuda_graphs=on"])
def test_it_answers_on_both_as_the_model_did(text: str, tmp_path) -> None:
    torch.manual_seed(0)
    model = Positions().cuda().eval()
    batch = torch.randn(4, 8, device="cuda")
    recipe = Recipe.parse(f"grad=inference_mode {text}")
    package = write_package(Workload(model, [batch]), recipe, tmp_path / "p", name="p")
    assert package.settings.devices == ("cuda",)
    with torch.no_grad():
        wanted = model(batch)
    for device in ["cuda", *([] if "cuda" in text else ["cpu"])]:
        run, _ = load_model(package, device)
        answer = run(batch.to(device))
        (found,) = answer if isinstance(answer, (list, tuple)) else (answer,)
        assert found.device.type == device
        torch.testing.assert_close(found.float().cpu(), wanted.cpu(), rtol=0.05, atol=0.05)


def test_texts_are_written_by_recorded_graphs_as_by_the_model_alone(tmp_path) -> None:
    from fettle.package.handler import find_handler
    from fettle.package.handlers.asking import Ask
    from fettle.package.handlers.sampling import Sampling
    from fettle.package.model_runner import ModelRunner
    from tests.package.test_cache import llama, packaged

    model = llama().cuda()
    package = packaged(tmp_path / "m", model)
    running = find_handler(package, ModelRunner(package, "cuda"), "").running(8, 0, 32)
    assert running is not None
    assert running.cache.recorded is not None
    running.warm()
    graphs = len(running.cache.recorded.graphs)
    prompts = [tuple(range(1, 2 + n)) for n in (0, 3, 20, 40, 9)]
    texts = dict.fromkeys(range(len(prompts)), "")

    def tell(number, said) -> None:
        assert not isinstance(said, Exception), said
        texts[number] += said.text

    for number, tokens in enumerate(prompts):  # one joins between two steps
        running.add(number, Ask(tokens=tokens, sampling=Sampling(max_tokens=12, ignore_eos=True)))
        running.step(tell)
    while running.texts:
        running.step(tell)
    for number, tokens in enumerate(prompts):
        ids = list(tokens)
        with torch.no_grad():
            for _ in range(12):
                ids.append(int(model(input_ids=torch.tensor([ids], device="cuda")).logits[0, -1].argmax()))
        assert texts[number].split() == [str(token) for token in ids[len(tokens) :]]
    assert graphs
    assert len(running.cache.recorded.graphs) == graphs  # nothing was recorded while texts were written
