from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from bsam.flatness import HessianOperator, landscape, sharpness, spectral_density, top_eigenvalues, trace
from bsam.lab.inference.measure import FlatnessSettings, loss_of, measure

ITS = FlatnessSettings(
    k=3,
    which="magnitude",
    tol=0.03,
    trace_samples=9,
    density_steps=5,
    density_probes=2,
    span=0.5,
    points=5,
    rho=0.2,
    seed=3,
)

STAGES = ("sharpness", "eigenvalues", "trace", "density", "landscape")


@pytest.fixture
def data(problem):
    return list(zip(problem.x.split(14), problem.y.split(14), strict=True))


@pytest.mark.parametrize("its", [replace(ITS, mode="train"), replace(ITS, micro_batch=8)])
def test_every_instrument_gets_every_setting_and_the_loss_alone_is_the_same(its, problem, data):
    before = [t.clone() for t in problem.model.state_dict().values()]
    found = measure(problem.model, F.cross_entropy, data, its)
    options = {"micro_batch": its.micro_batch, "mode": its.mode}
    H = HessianOperator(problem.model, F.cross_entropy, data, **options)
    assert found.sharpness == sharpness(problem.model, F.cross_entropy, data, 0.2, 0.2, **options)
    assert found.eigenvalues.values.tolist() == top_eigenvalues(H, 3, "magnitude", 0.03, 3).values.tolist()
    assert found.trace == trace(H, 9, 3)
    assert found.density.nodes.tolist() == spectral_density(H, 5, 2, 3).nodes.tolist()
    expected = landscape(problem.model, F.cross_entropy, data, 0.5, 5, 2, 3, **options)
    assert found.landscape.loss.tolist() == expected.loss.tolist()
    assert found.landscape.axes[0].tolist() == expected.axes[0].tolist()
    assert (found.parameters, found.samples) == (sum(p.numel() for p in problem.model.parameters()), 24)
    assert tuple(found.seconds) == STAGES
    assert min(found.seconds.values()) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, problem.model.state_dict().values(), strict=True))
    assert loss_of(problem.model, F.cross_entropy, data, its) == found.landscape.loss[2, 2]


def test_progress_names_the_stage_and_ends_at_the_end(problem, data):
    told = []
    measure(problem.model, F.cross_entropy, data, ITS, lambda *what: told.append(what))
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == list(STAGES)
    for stage in STAGES:
        done = [(d, n) for name, d, n in told if name == stage]
        assert [d for d, _ in done] == sorted(d for d, _ in done)
        assert done[-1][0] == done[-1][1]
    assert [(d, n) for name, d, n in told if name == "trace"][:2] == [(1, 9), (2, 9)]
    assert ("landscape", 25, 25) in told
