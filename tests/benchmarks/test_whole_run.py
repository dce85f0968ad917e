"""The benchmark of a whole run adds up, and times what a run does between its epochs."""

import json

import pytest
from torch import nn

from bsam.lab.models import MODELS
from bsam.lab.training.run_dir import RunWriter
from bsam.lab.training.trainer import Trainer

PARTS = {  # of a run of 11 epochs
    "n": 11,
    "checkpoint_every": 60.0,
    "start_seconds": 30.0,
    "first_epoch_seconds": 20.0,
    "end_seconds": 1.0,
    "metrics_seconds": {"median": 0.01},
    "checkpoint_seconds": {"median": 0.31},
    "after_the_first_epoch": {"whole": 10.8, "training": 10.0, "evaluation": 0.4, "saving": 0.4, "other": 0.0},
    "ratio": 1.5,
}


def test_the_ratio_of_200_epochs_counts_start_up_and_checkpoints(whole_run):
    training = 20.0 + 199 * 1.0
    whole = 30.0 + 199 * 1.05 + 1.0
    assert whole_run.long_ratio(PARTS) == pytest.approx(
        (whole + 4 * 0.3) / training
    )  # after 60, 120 and 180 s, and last
    often = {**PARTS, "checkpoint_every": 0.0}
    assert whole_run.long_ratio(often) == pytest.approx((whole + 200 * 0.3) / training)
    assert whole_run.long_ratio({**PARTS, "n": 200}) == 1.5  # measured


class Tiny(nn.Sequential):
    def __init__(self, *_, **__):
        super().__init__(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10))


@pytest.mark.parametrize(("method", "every", "checkpoints"), [("sgd", "60", 1), ("sam", "0", 3)])
def test_results(method, every, checkpoints, whole_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bsam.lab.tasks.classification.build_float_network", lambda *_: Tiny())
    monkeypatch.setattr(whole_run, "SIZES", (100, 256))
    before = Trainer.evaluate, RunWriter.save
    flags = ["--device", "cpu", "--epochs", "3", "--steps", "2", "--evaluation", "--checkpoint-every", every]
    flags += ["--method", method]
    whole_run.main([*flags, "--folder", str(tmp_path), "--out", str(tmp_path / "new" / "whole_run.json")])
    assert (Trainer.evaluate, RunWriter.save) == before
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    content = json.loads((tmp_path / "new" / "whole_run.json").read_text())
    assert {"date", "device", "machine", "versions"} <= set(content)
    result = content["result"]
    assert result["method"] == {"sgd": "base", "sam": "sam"}[method]
    expected = {"n": 3, "steps": 2, "eval_samples": 256, "compile": False, "checkpoints": checkpoints}
    assert {name: result[name] for name in expected} == expected
    after = result["after_the_first_epoch"]
    assert after["whole"] == pytest.approx(sum(after[name] for name in ("training", "evaluation", "saving", "other")))
    assert all(after[name] > 0 for name in ("training", "evaluation", "saving"))
    assert 0 <= after["other"] < after["whole"] / 2
    assert (result["metrics_seconds"] is None) == (checkpoints == 3)
    assert result["ratio"] > 1
    assert result["ratio_without_start"] == pytest.approx(after["whole"] / after["training"])
    assert [(row["way"], row["batch"]) for row in result["evaluations"]] == [("eager", 100), ("eager", 256)]
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("evaluation", "saving", "200 epochs", "(extrapolated)"))


def test_refusals(whole_run, capsys):
    assert "resnet18" in MODELS
    with pytest.raises(SystemExit):
        whole_run.main(["--device", "cpu", "--epochs", "1"])
    assert "--epochs" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # importing inductor warns
def test_a_compiled_and_captured_run(whole_run, tmp_path, capsys):
    out = tmp_path / "whole_run.json"
    flags = ("--device", "cuda", "--model", "resnet8", "--epochs", "3", "--steps", "8", "--evaluation")
    whole_run.main([*flags, "--out", str(out)])
    result = json.loads(out.read_text())["result"]
    assert (result["compile"], result["captured"], result["precision"]) == (True, True, "bf16")
    assert [row["way"] for row in result["evaluations"]] == ["eager"] * len(whole_run.SIZES) + ["compiled"]
