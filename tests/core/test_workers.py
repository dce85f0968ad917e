import pytest

import bsam
from bsam.core.workers import Workers
from bsam.recipes.runner import run_all
from bsam.training.config import Run

SAME = {"lr": 0.1, "batch": 64, "label_smoothing": 0.0, "epochs": 1}


def test_runs_in_workers_equal_those_of_this_process_and_an_error_arrives_here(tmp_path):
    runs = [Run("sgd", seed=1, radius=0.05, **SAME), Run("bsam", {"rho_max": 0.1, "rho_min": 0.1}, seed=2, **SAME)]
    wild = Run("sgd", seed=3, **{**SAME, "lr": 1e30})
    with Workers(1) as pool:  # each imports torch, which takes seconds; cli/test_demo.py has two
        there = run_all([*runs, wild], tmp_path / "workers", workers=pool, device="cpu")
        with pytest.raises(bsam.BsamError, match="rho must be a finite number"):
            run_all([Run("sam", {"rho": -1.0}, **SAME)], tmp_path / "workers", workers=pool, device="cpu")
    here = run_all(runs, tmp_path / "here", device="cpu")
    assert there[2].diverged is not None
    for one, other in zip(there[:2], here, strict=True):
        assert one.finished
        assert {**one.epochs[-1], "seconds": 0} == {**other.epochs[-1], "seconds": 0}
        assert (one.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()
