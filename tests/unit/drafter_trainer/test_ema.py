"""The moving average of weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drafter_trainer.ema import WeightAverage


def test_average_follows_the_definition() -> None:
    module = nn.Linear(3, 2, bias=False)
    average = WeightAverage(module, decay=0.5)
    expected = module.weight.detach().clone()
    for number in range(20):
        with torch.no_grad():
            module.weight.normal_()
        average.update()
        decay = min(0.5, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * module.weight.detach()
    with average.applied():
        torch.testing.assert_close(module.weight.detach(), expected)


def test_own_weights_come_back_bit_for_bit_also_after_an_error() -> None:
    module = nn.Linear(3, 2)
    average = WeightAverage(module, decay=0.9)
    with torch.no_grad():
        module.weight += 1
    own = module.weight.detach().clone()

    def evaluate() -> None:
        with average.applied():
            assert not torch.equal(module.weight, own)
            raise RuntimeError("evaluation")

    with pytest.raises(RuntimeError, match="evaluation"):
        evaluate()
    assert torch.equal(module.weight, own)


def test_state_continues_bit_for_bit() -> None:
    module = nn.Linear(3, 2)
    average = WeightAverage(module, decay=0.9)
    average.update()
    other = WeightAverage(nn.Linear(3, 2), decay=0.9)
    other.load_state_dict({name: tensor.clone() for name, tensor in average.state_dict().items()})
    other._module = module
    with torch.no_grad():
        module.weight += 1
    average.update()
    other.update()
    for name, tensor in average.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_average_is_not_trained() -> None:
    average = WeightAverage(nn.Linear(3, 2), decay=0.9)
    assert not any(tensor.requires_grad for tensor in average.state_dict().values())
