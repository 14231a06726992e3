"""Where an error is said to come from, and what fixes it."""

from importlib import metadata
from pathlib import Path

import pytest
import torch

from fettle.errors import extra, first_line, is_users, place, type_text
from fettle.workload import Workload


def test_the_place_is_the_callers_innermost_line(tmp_path: Path) -> None:
    path = tmp_path / "fettle" / "model.py"  # a folder of that name is not this package
    code = "import torch\ndef call(model, x):\n    return torch.mm(x, x[0])\n"
    names: dict[str, object] = {}
    exec(compile(code, str(path), "exec"), names)
    with pytest.raises(RuntimeError) as raised:
        Workload(torch.nn.Identity(), [torch.ones(2, 2)], call=names["call"]).run(None, torch.ones(2, 2))
    assert place(raised.value) == " at model.py:3"
    assert first_line(raised.value).startswith("RuntimeError: ")
    assert place(ValueError("never raised")) == ""
    assert is_users("/home/me/torch/model.py")
    assert not any(is_users(file) for file in (torch.__file__, Workload.run.__code__.co_filename, "<string>"))


def test_a_type_has_its_article() -> None:
    assert list(map(type_text, (3, [], None))) == ["an int", "a list", "None"]


class Exponents(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.frexp(x).mantissa


def test_what_the_exporter_of_onnx_met_is_said_and_not_in_which_step() -> None:
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as raised:
        torch.onnx.export(Exponents().eval(), (torch.ones(2),), dynamo=True, verbose=False)
    assert "No ONNX function found for <OpOverload(op='prims.frexp'" in first_line(raised.value)


@pytest.mark.parametrize(
    ("told", "installed"),
    [
        ('{"url": "file:///home/me/a%20clone", "dir_info": {"editable": true}}', "-e '/home/me/a clone[study]'"),
        ('{"url": "file:///home/me/clone", "dir_info": {}}', "'/home/me/clone[study]'"),
        ('{"url": "https://git.me/fettle", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}}',
         "'torch-fettle[study] @ git+https://git.me/fettle@1a2b'"),
        ('{"url": "file:///home/me/torch_fettle-0.1.0-py3-none-any.whl", "archive_info": {}}',
         "'torch-fettle[study] @ file:///home/me/torch_fettle-0.1.0-py3-none-any.whl'"),
        (None, "'torch-fettle[study]'"),
        ("no JSON", "'torch-fettle[study]'"),
    ],
)  # fmt: skip
def test_an_extra_comes_from_where_fettle_was_installed_from(
    told: str | None, installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata.PathDistribution, "read_text", lambda self, name: told)
    assert str(extra("effects need statsmodels", "study")) == f"effects need statsmodels: pip install {installed}"
