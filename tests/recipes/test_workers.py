import pytest

import bsam
from bsam.training.config import Run
from bsam.training.loop import fit
from bsam.training.workers import Workers

SAME = {"lr": 0.1, "batch": 64, "label_smoothing": 0.0, "epochs": 1}


def test_results_equal_those_of_this_process_and_an_error_arrives_here():
    runs = [Run("sgd", seed=1, radius=0.05, **SAME), Run("bsam", {"rho_max": 0.1, "rho_min": 0.1}, seed=2, **SAME)]
    found = {}
    with Workers(1) as workers:
        workers.fit_all(runs, lambda result: found.__setitem__(result.run.seed, result))
        with pytest.raises(bsam.BsamError, match="rho must be a finite number"):
            workers.fit_all([Run("sam", {"rho": -1.0}, **SAME)], lambda result: None)
    for run in runs:
        here = fit(run, device="cpu")
        assert found[run.seed].run == run
        assert found[run.seed].score == pytest.approx(here.score, abs=2 / 757)  # this process may use more threads
        assert found[run.seed].last.metrics["train_loss"] == pytest.approx(here.last.metrics["train_loss"], rel=1e-4)
