import pytest

from bsam.data.digits import digits
from bsam.training.config import Run
from bsam.training.loop import fit
from bsam.training.workers import Workers


def test_results_equal_those_of_this_process_and_an_error_arrives_here():
    runs = [Run("sgd", epochs=1, seed=1, radius=0.05), Run("bsam", {"rho_max": 0.1, "rho_min": 0.1}, epochs=1, seed=2)]
    found = {}
    with Workers(1) as workers:
        workers.fit_all(runs, lambda result: found.__setitem__(result.run.seed, result))
        with pytest.raises(TypeError, match="rhoo"):
            workers.fit_all([Run("sam", {"rhoo": 1.0}, epochs=1)], lambda result: None)
    for run in runs:
        here = fit(run, digits())
        assert found[run.seed].run == run
        assert found[run.seed].last.accuracy == pytest.approx(here.last.accuracy, abs=2 / 757)  # this process may use more threads
