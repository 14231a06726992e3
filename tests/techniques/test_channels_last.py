"""What is laid out with the channels innermost, in models that have more than 2-D convolutions."""

import pytest
import torch

import fettle
from fettle.techniques import Facts, load, source


class Clip(torch.nn.Module):
    """A video's frames, joined by a 3-D convolution, seen by a 2-D one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frames, self.image = torch.nn.Conv3d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 5, 3)
        self.register_buffer("steps", torch.arange(120).view(2, 3, 4, 5))

    def forward(self, video):
        return self.image(self.frames(video).mean(2))


def is_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def test_weights_of_3d_convolutions_and_whole_numbers_stay_as_they_are():
    model, video = Clip().eval(), torch.randn(2, 3, 4, 8, 8)
    with torch.no_grad():
        wanted = model(video)
    found = fettle.apply(model, "channels_last=on", [video])(video)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert is_last(model.image.weight)
    assert model.frames.weight.is_contiguous()
    assert model.steps.is_contiguous()


@pytest.mark.parametrize("recipe", ["channels_last=on", "channels_last=on precision=bf16-master"])
def test_so_they_do_in_training(recipe):
    model, video = Clip(), torch.randn(2, 3, 4, 8, 8)
    train = load(source(fettle.Recipe.parse(recipe), Facts(mode="training", num_conv=1)), "trained")
    loss = next(train(model, lambda weights: torch.optim.SGD(weights, 0.1), lambda m, x: m(x).square().mean(), [video]))
    assert loss.isfinite()
    assert is_last(model.image.weight)
    assert model.frames.weight.is_contiguous()
