"""Linear layers of transformers' GPT-2, whose weights lie the other way round, are quantised like torch's own."""

import logging

import pytest
import torch

from fettle.recipe import Recipe
from fettle.techniques import Facts, load, probe_facts, source
from fettle.techniques._linear import is_conv1d, linear_of_conv1d
from fettle.techniques.quantize import quantize_linear, rows_of_linear
from fettle.workload import Workload

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(12).view(2, 6)


@pytest.fixture
def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=64, n_layer=2, n_head=4, n_positions=32)
    return transformers.GPT2Model(config).eval()


def answer(model):
    with torch.no_grad():
        return model(TOKENS).last_hidden_state


def test_they_are_counted_and_replaced_by_layers_that_answer_alike(gpt2):
    assert probe_facts(Workload(gpt2, [{"input_ids": TOKENS}])).num_linear == 8
    wanted, gpt2.again = answer(gpt2), gpt2.h[0].attn.c_attn
    linear_of_conv1d(gpt2)
    assert not any(map(is_conv1d, gpt2.modules()))
    assert gpt2.again is gpt2.h[0].attn.c_attn
    torch.testing.assert_close(answer(gpt2), wanted)


def test_all_of_them_are_quantised(gpt2, caplog):
    wanted = answer(gpt2)
    with caplog.at_level(logging.INFO, logger="optimized"):
        load(source(Recipe.parse("quantize=int8-weight"), Facts(num_linear=8)), "quantised")(gpt2, [])
    assert "int8-weight: 8 of 8 linear layers" in caplog.text
    assert 0 < (answer(gpt2) - wanted).norm() < 0.02 * wanted.norm()


def test_a_layer_of_two_names_is_quantised_once_and_one_whose_weight_is_computed_not_at_all(caplog):
    torch.manual_seed(0)
    shared = torch.nn.Linear(32, 32)
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(32, 32))
    model, x = torch.nn.Sequential(shared, torch.nn.Sequential(shared), normed).eval(), torch.rand(4, 32)
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="optimized"):
        wanted = model(x)
        quantize_linear(model, "Int8WeightOnlyConfig", "int8-weight")
        assert 0 < (model(x) - wanted).norm() < 0.02 * wanted.norm()
    assert "int8-weight: 1 of 2 linear layers" in caplog.text


def test_counting_rows_leaves_what_is_remembered_as_it_was():
    class Counting(torch.nn.Linear):
        steps = 0

        def forward(self, x):
            self.calls += 1
            self.steps += 1
            return super().forward(x)

    layer = Counting(4, 4)
    layer.register_buffer("calls", torch.zeros(()))
    assert rows_of_linear(layer, [torch.rand(3, 4)]) == {layer: 3}
    assert layer.calls == layer.steps == 0
