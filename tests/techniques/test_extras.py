"""What a level needs that is not installed is named with the extra that has it."""

import pytest

from fettle.techniques import Facts, find


@pytest.mark.parametrize(
    ("technique", "level", "says"),
    [("runtime", "openvino", "extra openvino"), ("runtime", "onnxruntime", "extra onnx"),
     ("quantize", "int8-dynamic", "extra quant")],
)  # fmt: skip
def test_the_extra_is_named(technique: str, level: str, says: str) -> None:
    (found,) = [one for one in find(technique).levels(Facts(num_linear=1)) if one.name == level]
    assert "is not installed" in found.why_not
    assert found.why_not.endswith(says)
