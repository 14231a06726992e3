"""What a level needs that is not installed is named with the extra that has it."""

from types import SimpleNamespace

import pytest

from fettle.techniques import Facts, find
from fettle.techniques._generation import _fixed_size


@pytest.mark.parametrize(
    ("technique", "level", "says"),
    [("runtime", "openvino", "extra openvino"), ("runtime", "onnxruntime", "extra onnx"),
     ("quantize", "int8-dynamic", "extra quant")],
)  # fmt: skip
def test_the_extra_is_named(technique: str, level: str, says: str) -> None:
    (found,) = [one for one in find(technique).levels(Facts(num_linear=1)) if one.name == level]
    assert "is not installed" in found.why_not
    assert found.why_not.endswith(says)


def test_a_cache_of_fixed_size_that_does_not_count_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    layer = type("StaticLayer", (), {})()  # of transformers 4
    monkeypatch.setattr(transformers, "StaticCache", lambda **_: SimpleNamespace(layers=[layer]))
    model = SimpleNamespace(config=SimpleNamespace())
    assert _fixed_size(model) == "whole"
    levels = {one.name: one.why_not for one in find("kv_cache").levels(Facts(new_tokens=4, keeps="whole"))}
    assert levels["static"].endswith("a later one may have it")
    assert levels["int8"] == ""
    layer.cumulative_length = 0
    assert _fixed_size(model) == "static"
