import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.methods import METHODS
from bsam.training.train_step import TrainStep, build_optimizer

KNOWN = {"seed": 7, "total_steps": 40, "samples": 24, "classes": 3}


class Watched(nn.Module):
    """Notes the first feature of every sample that it sees: its number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 3)
        self.seen = []

    def forward(self, x):
        self.seen.append(x[:, 0].long().tolist())
        return self.body(x / 10)


def batch(start=8, size=8):
    generator = torch.Generator().manual_seed(start)
    index = torch.arange(start, start + size)
    x = torch.cat((index.unsqueeze(1).float(), torch.randn(size, 3, generator=generator)), 1)
    return x, torch.randint(0, 3, (size,), generator=generator), index


def made(method, **arguments):
    model = Watched()
    return build_optimizer(
        method, arguments, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, **KNOWN
    )


@pytest.mark.parametrize("method", ["base", *METHODS])
def test_every_method_is_made_and_steps(method):
    learner = made(method)
    own = learner.optimizer if learner.loss is None else learner.loss
    assert type(own) is (torch.optim.SGD if method == "base" else METHODS[method])
    before = copy.deepcopy(learner.model.state_dict())
    for epoch in range(7):  # the losses have their second term from the sixth on
        learner.begin_epoch(epoch)
        learner.step(*batch())
    assert all(not torch.equal(before[name], value) for name, value in learner.model.state_dict().items())
    assert all(p.grad is not None for p in learner.model.parameters())


def test_a_method_gets_what_it_asks_for_and_the_arguments_come_first():
    assert made("rst").optimizer.seed == 7
    assert made("esam").optimizer.seed == 7
    assert made("rst", seed=3).optimizer.seed == 3
    assert made("aesam").optimizer.total_steps == 40
    assert made("saf").loss.table.shape[1:] == (24, 3)
    assert made("sam", rho=0.3).optimizer.param_groups[0]["rho"] == 0.3
    with pytest.raises(TypeError, match="rhoo"):
        made("sam", rhoo=0.3)


@pytest.mark.parametrize("method", ["base", "sam", "gam"])
def test_a_step_is_the_step_on_the_mean_loss(method):
    learner, other = made(method), made(method)
    x, y, index = batch()
    for _ in range(3):
        learner.step(x, y, index)

        def closure():
            other.optimizer.zero_grad()
            loss = F.cross_entropy(other.model(x), y)
            loss.backward()
            return loss

        other.optimizer.step(closure)
    for p, q in zip(learner.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)


def test_a_method_that_chooses_gets_the_samples_that_it_chose():
    learner = made("ksam", k=3)
    x, y, index = batch()
    losses = F.cross_entropy(learner.model(x), y, reduction="none")
    hardest = sorted(index[losses.topk(3).indices].tolist())
    learner.model.seen.clear()
    learner.step(x, y, index)
    assert learner.model.seen == [index.tolist(), hardest, hardest]


def test_saf_knows_samples_by_their_place_in_the_training_set():
    learner = made("saf", start_epoch=0, epochs_back=1)
    x, y, index = batch()
    learner.begin_epoch(0)
    logits = learner.model(x).detach()
    learner.step(x, y, index)
    assert (learner.loss.stamp[0] == 0).nonzero().flatten().tolist() == index.tolist()
    assert torch.equal(learner.loss.table[0, index], logits.half())
    learner.begin_epoch(1)
    far = learner.losses(-x, y, index)
    assert (far > F.cross_entropy(learner.model(-x), y, reduction="none")).all()


def test_mesa_sees_the_inputs_and_follows_the_optimizer():
    learner = made("mesa", start_epoch=0, decay=0.5)
    x, y, index = batch()
    learner.loss.average.seen.clear()
    before = learner.model.body.weight.detach().clone()
    learner.step(x, y, index)
    assert learner.loss.average.seen == [index.tolist()]
    assert not torch.equal(learner.model.body.weight, before)
    assert torch.allclose(learner.loss.average.body.weight, (before + learner.model.body.weight) / 2)


def test_the_loss_is_one_per_sample():
    learner = TrainStep(nn.Linear(4, 3), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    assert learner.losses(*batch()).shape == (8,)
    assert isinstance(made("bsam").optimizer, bsam.BSAM)
