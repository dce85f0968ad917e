from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from bsam.recipes import eta as eta_module
from bsam.recipes.eta import EtaEstimator
from bsam.training.config import Run
from bsam.training.run_dir import RunState


def measured(run, *seconds):
    return RunState(run, Path("there"), tuple({"seconds": s} for s in seconds))


def test_the_estimate():
    sgd, sam = (Run(method, model="resnet8", epochs=10) for method in ("sgd", "sam"))
    eta = EtaEstimator([measured(sgd, 9.0, 1.0, 1.0, 2.0)])
    assert eta.left(measured(sgd)) == 9 + 9 * 1.0  # the first epoch compiles
    assert eta.left(measured(sgd, 9.0, 1.0)) == 9 + 7 * 1.0  # again after a new start
    assert eta.left(measured(sam)) == 2 * (9 + 9 * 1.0)
    assert eta.left(measured(replace(sam, model="resnet18"))) is None
    assert eta.left(measured(replace(sam, weight_bits=4))) is None
    eta.add(sam, 3.0, first=False)
    assert eta.left(measured(sam)) == 18 + 9 * 3.0
    assert eta.left(replace(measured(sam), diverged="nan")) == 0
    states = [measured(sgd, *[1.0] * 8), measured(sam), measured(replace(sgd, model="resnet18"))]
    assert eta.total(states) == (9 + 1.0 + 45.0, 1)
    assert EtaEstimator([measured(sgd, 4.0)]).left(measured(sgd)) == 40.0  # nothing but a first epoch is known


def test_a_median_is_computed_once_for_all_runs_of_a_kind(monkeypatch):
    """The runs of a table are hundreds, and all of them are looked at each second."""
    medians = []
    counting = SimpleNamespace(median=lambda values: medians.append(1) or median(values))
    monkeypatch.setattr(eta_module, "statistics", counting)
    sgd, sam = (Run(method, model="resnet8", epochs=10) for method in ("sgd", "sam"))
    eta = EtaEstimator([measured(sgd, 9.0, 1.0)])
    states = [measured(replace(run, seed=seed)) for run in (sgd, sam) for seed in range(5)]
    assert [eta.total(states) for _ in range(3)] == [(5 * 18.0 + 5 * 36.0, 0)] * 3
    assert len(medians) == 4  # first and further epochs, of one and of two passes
    eta.add(replace(sgd, model="resnet18"), 7.0, first=True)
    eta.total(states)
    assert len(medians) == 4
    eta.add(sgd, 3.0, first=False)
    assert eta.total(states) == (5 * (9 + 9 * 2.0) + 5 * 2 * (9 + 9 * 2.0), 0)
    assert len(medians) == 8
