"""Models of `busy.py`, each from its published configuration at a size for two cores, weights at random."""

import torch


def t5():
    """T5's small encoder, 4 x 128 tokens. Its fastest runtime is not torch."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, vocab_size=32128)
    return T5EncoderModel(config).eval(), [{"input_ids": torch.randint(0, 32128, (4, 128))} for _ in range(3)]


def distilbert():
    """DistilBERT, 8 x 64 tokens."""
    from transformers import DistilBertConfig, DistilBertModel

    torch.manual_seed(0)
    model = DistilBertModel(DistilBertConfig()).eval()
    return model, [{"input_ids": torch.randint(0, 30522, (8, 64))} for _ in range(3)]


def swin():
    """Swin-T, four pictures."""
    from transformers import SwinConfig, SwinModel

    torch.manual_seed(0)
    return SwinModel(SwinConfig()).eval(), [torch.randn(4, 3, 224, 224) for _ in range(3)]


def resnet():
    """ResNet-18, four pictures of 112 x 112."""
    from transformers import ResNetConfig, ResNetModel

    torch.manual_seed(0)
    config = ResNetConfig(layer_type="basic", hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2])
    return ResNetModel(config).eval(), [torch.randn(4, 3, 112, 112) for _ in range(3)]


def mlp():
    """Eight layers of 1024, a batch of 64: 8 ms a call in float32 on two cores."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers).eval(), [torch.randn(64, 1024) for _ in range(3)]


class UNet(torch.nn.Module):
    """A U-Net of three resolutions (Ronneberger et al. 2015), 0.5 million parameters."""

    def __init__(self, widths=(32, 64, 128)):
        super().__init__()
        small, middle, large = widths
        self.down = torch.nn.ModuleList([_convolutions(3, small), _convolutions(small, middle)])
        self.deepest = _convolutions(middle, large)
        self.larger = torch.nn.ModuleList([
            torch.nn.ConvTranspose2d(large, middle, 2, 2), torch.nn.ConvTranspose2d(middle, small, 2, 2),
        ])  # fmt: skip
        self.up = torch.nn.ModuleList([_convolutions(2 * middle, middle), _convolutions(2 * small, small)])
        self.head = torch.nn.Conv2d(small, 1, 1)

    def forward(self, pictures):
        kept = []
        for block in self.down:
            kept.append(block(pictures))
            pictures = torch.nn.functional.max_pool2d(kept[-1], 2)
        pictures = self.deepest(pictures)
        for larger, block in zip(self.larger, self.up, strict=True):
            pictures = block(torch.cat([kept.pop(), larger(pictures)], 1))
        return self.head(pictures)


def _convolutions(given, width):
    return torch.nn.Sequential(*[
        layer
        for channels in (given, width)
        for layer in (torch.nn.Conv2d(channels, width, 3, padding=1, bias=False), torch.nn.BatchNorm2d(width),
                      torch.nn.ReLU())
    ])  # fmt: skip


def _mask_loss(model, batch):
    pictures, masks = batch
    return torch.nn.functional.binary_cross_entropy_with_logits(model(pictures), masks)


def unet():
    """A U-Net's training step, four pictures of 96 x 96: where is the bright disc?."""
    torch.manual_seed(0)
    row, column = torch.meshgrid(torch.arange(96), torch.arange(96), indexing="ij")
    centre, radius = torch.randint(24, 72, (64, 2, 1, 1)), torch.randint(8, 24, (64, 1, 1))
    masks = ((row - centre[:, 0]) ** 2 + (column - centre[:, 1]) ** 2 < radius**2).float()[:, None]
    data = torch.utils.data.TensorDataset(masks + 0.5 * torch.randn(64, 3, 96, 96), masks)
    return {
        "model": UNet(), "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "loss": _mask_loss, "data": torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, drop_last=True),
        "steps": 12, "name": "unet",
    }  # fmt: skip
