"""Steps of the trainer: the direction of each method and what it gets, against steps written by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bsam.lab.training.trainer import TrainStep, build_method

KNOWN = {"seed": 7, "total_steps": 40, "samples": 24, "classes": 3}


class Recording(nn.Module):
    """Records the first feature of every sample in a pass, which is its index."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 3)
        self.passes = []

    def forward(self, x):
        self.passes.append(x[:, 0].long().tolist())
        return self.body(x / 10)


def batch(start=8, size=8):
    generator = torch.Generator().manual_seed(start)
    index = torch.arange(start, start + size)
    x = torch.cat((index.unsqueeze(1).float(), torch.randn(size, 3, generator=generator)), 1)
    return x, torch.randint(0, 3, (size,), generator=generator), index


def build(method, **arguments):
    model = Recording()
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer, loss = build_method(method, arguments, base, model, **KNOWN)
    return TrainStep(model, optimizer, loss=loss)


def test_a_method_gets_the_values_it_accepts_and_arguments_take_precedence():
    assert build("rst").optimizer.seed == 7
    assert build("esam").optimizer.seed == 7
    assert build("rst", seed=3).optimizer.seed == 3
    assert build("aesam").optimizer.total_steps == 40
    assert build("saf").loss.table.shape[1:] == (24, 3)
    assert build("sam", rho=0.3).optimizer.param_groups[0]["rho"] == 0.3
    with pytest.raises(TypeError, match="rhoo"):
        build("sam", rhoo=0.3)


@pytest.mark.parametrize("method", ["base", "sam", "gam"])
def test_a_step_is_the_step_on_the_mean_loss(method):
    train_step, other = build(method), build(method)
    x, y, index = batch()
    for _ in range(3):
        train_step.step(x, y, index)

        def closure():
            other.optimizer.zero_grad()
            loss = F.cross_entropy(other.model(x), y)
            loss.backward()
            return loss

        other.optimizer.step(closure)
    for p, q in zip(train_step.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)


def test_ksam_passes_over_the_samples_that_it_chose():
    train_step = build("ksam", k=3)
    x, y, index = batch()
    losses = F.cross_entropy(train_step.model(x), y, reduction="none")
    hardest = sorted(index[losses.topk(3).indices].tolist())
    train_step.model.passes.clear()
    train_step.step(x, y, index)
    assert train_step.model.passes == [index.tolist(), hardest, hardest]


def test_saf_stores_logits_by_index_in_the_training_set():
    train_step = build("saf", start_epoch=0, epochs_back=1)
    x, y, index = batch()
    train_step.loss.set_epoch(0)
    logits = train_step.model(x).detach()
    train_step.step(x, y, index)
    assert (train_step.loss.stamp[0] == 0).nonzero().flatten().tolist() == index.tolist()
    assert torch.equal(train_step.loss.table[0, index], logits)
    train_step.loss.set_epoch(1)
    far = train_step.evaluate(-x, y, index)
    assert (far > F.cross_entropy(train_step.model(-x), y, reduction="none")).all()


def test_mesa_averages_the_weights():
    train_step = build("mesa", start_epoch=0, decay=0.5)
    x, y, index = batch()
    train_step.loss.set_epoch(1)
    train_step.loss.average.passes.clear()
    before = train_step.model.body.weight.detach().clone()
    train_step.step(x, y, index)
    assert train_step.loss.average.passes == [index.tolist()]
    assert not torch.equal(train_step.model.body.weight, before)
    assert torch.allclose(train_step.loss.average.body.weight, (before + train_step.model.body.weight) / 2)
