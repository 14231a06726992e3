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
