from dataclasses import replace
from pathlib import Path

from bsam.lab.running.eta import EtaEstimator
from bsam.lab.training.config import Run
from bsam.lab.training.run_dir import RunState


def measured(run, *seconds):
    return RunState(run, Path("there"), tuple({"seconds": s} for s in seconds))


def test_the_estimate():
    sgd, sam = (Run(method, model="resnet8", epochs=10) for method in ("sgd", "sam"))
    eta = EtaEstimator([measured(sgd, 9.0, 1.0, 2.0), measured(sgd, 4.0)])
    assert eta.left(measured(sgd)) == 10 * 3.0  # the median of 1, 2, 4, 9
    assert eta.left(measured(sgd, 9.0, 1.0)) == 8 * 3.0
    assert eta.left(measured(sam)) == 2 * 10 * 3.0
    assert eta.left(measured(replace(sam, model="resnet18"))) is None
    assert eta.left(measured(replace(sam, weight_bits=4))) is None
    assert eta.left(replace(measured(sgd), diverged="nan")) == 0
    eta = EtaEstimator([measured(sgd, 1.0), measured(sam, 3.0)])
    assert eta.left(measured(sam)) == 10 * 3.0  # the same number of passes takes precedence
    states = [measured(sgd, *[1.0] * 8), measured(sam), measured(replace(sgd, model="resnet18"))]
    assert eta.total(states) == (2 * 1.0 + 10 * 3.0, 1)
