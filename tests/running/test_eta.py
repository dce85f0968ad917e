from dataclasses import replace
from pathlib import Path

from bsam.running.eta import EtaEstimator
from bsam.training.config import Run
from bsam.training.run_dir import RunState


def measured(run, *seconds):
    return RunState(run, Path("there"), tuple({"seconds": s} for s in seconds))


def test_the_estimate():
    sgd, sam = (Run(method, model="resnet8", epochs=10) for method in ("sgd", "sam"))
    eta = EtaEstimator([measured(sgd, 9.0, 1.0, 1.0, 4.0)])
    assert eta.left(measured(sgd)) == 9 + 9 * 2.0  # the first epoch compiles
    assert eta.left(measured(sgd, 9.0, 1.0)) == 9 + 7 * 2.0  # again after a new start
    assert eta.left(measured(sam)) == 2 * (9 + 9 * 2.0)
    assert eta.left(measured(replace(sam, model="resnet18"))) is None
    assert eta.left(measured(replace(sam, weight_bits=4))) is None
    eta.add(sam, 3.0, first=False)
    assert eta.left(measured(sam)) == 18 + 9 * 3.0
    assert eta.left(replace(measured(sam), diverged="nan")) == 0
    states = [measured(sgd, *[1.0] * 8), measured(sam), measured(replace(sgd, model="resnet18"))]
    assert eta.total(states) == (9 + 2.0 + 45.0, 1)
    assert EtaEstimator([measured(sgd, 4.0)]).left(measured(sgd)) == 40.0  # nothing but a first epoch is known
