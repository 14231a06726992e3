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


@pytest.mark.parametrize("text", ["", "grad=inference_mode precision=bf16 compile=default", "cuda_graphs=on"])
def test_it_answers_on_both_as_the_model_did(text: str, tmp_path) -> None:
    torch.manual_seed(0)
    model = Positions().cuda().eval()
    batch = torch.randn(4, 8, device="cuda")
    package = write_package(Workload(model, [batch]), Recipe.parse(text), tmp_path / "p", name="p")
    assert package.settings.devices == ("cuda",)
    with torch.no_grad():
        wanted = model(batch)
    for device in ["cuda", *([] if "cuda" in text else ["cpu"])]:
        run, _ = load_model(package, device)
        answer = run(batch.to(device))
        (found,) = answer if isinstance(answer, (list, tuple)) else (answer,)
        assert found.device.type == device
        torch.testing.assert_close(found.float().cpu(), wanted.cpu(), rtol=0.05, atol=0.05)
