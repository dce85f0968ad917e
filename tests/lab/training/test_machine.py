"""``Machine``: the folders and options of training."""

from pathlib import Path

import pytest

from bsam import BsamError
from bsam.lab import Machine


def test_strings_are_folders():
    assert Machine(data_dir="data", cache_dir=Path("cache")) == Machine(data_dir=Path("data"), cache_dir="cache")
    assert Machine("cpu", cache_dir="cache").folders == {"cache_dir": Path("cache")}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device": "tpu"}, "device must be cpu, cuda or cuda:N, got 'tpu'"),
        ({"checkpoint_every": -1.0}, "checkpoint_every"),
        ({"checkpoint_every": float("nan")}, "checkpoint_every"),
        ({"checkpoint_every": float("inf")}, "checkpoint_every"),
        ({"checkpoint_every": "60"}, "checkpoint_every"),
        ({"checkpoint_every": None}, "checkpoint_every"),
        ({"jobs": 0}, "jobs"),
        ({"jobs": 2, "ray": ""}, "--jobs.*--ray"),
        ({"gpus_per_run": 0.5}, "--gpus-per-run.*needs ray"),
        ({"ray": "", "gpus_per_run": 1.5}, "gpus_per_run must be between 0 and 1, or a whole number; got 1.5"),
        ({"ray": "", "gpus_per_run": -1}, "gpus_per_run"),
        ({"ray": "", "device": "cuda:1"}, "with Ray, device must be"),
    ],
)
def test_refusals(fields, words):
    with pytest.raises(BsamError, match=words):
        Machine(**fields)
