"""The benchmark of epochs times every method, each as `bsam train` would run it."""

import json

from torch import nn

from bsam.lab.recipes import RECIPES
from bsam.methods import METHODS, distillation


class Tiny(nn.Sequential):
    def __init__(self, *_, **__):
        super().__init__(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10))


def test_all_methods(throughput, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bsam.lab.tasks.classification.build_float_network", lambda *_: Tiny())
    compared, divergence = [], distillation.divergence
    monkeypatch.setattr(distillation, "divergence", lambda *given: compared.append(1) or divergence(*given))
    out = tmp_path / "throughput.json"
    flags = ["--device", "cpu", "--models", "resnet8", "--steps", "1", "--rounds", "2", "--methods", "all"]
    throughput.main([*flags, "--out", str(out)])
    results = json.loads(out.read_text())["results"]
    assert {case["method"] for r in results for case in r["cases"].values()} == {"base", *METHODS}
    assert results[0]["cases"]["BSAM2"] == {"method": "bsam", "arguments": {"passes": 2}}
    for result in results:
        assert list(result["epoch_seconds"]) == list(result["over_base"]) == list(result["cases"])
        assert all(s["median"] > 0 for s in result["epoch_seconds"].values())
    assert len(compared) == 2 * 3  # SAF and MESA, in both timed epochs and the one before


def test_sgd_is_always_timed(throughput, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bsam.lab.tasks.classification.build_float_network", lambda *_: Tiny())
    out = tmp_path / "throughput.json"
    flags = ["--device", "cpu", "--models", "resnet8", "--steps", "1", "--rounds", "1", "--methods", "VaSSO"]
    throughput.main([*flags, "--out", str(out)])
    (result,) = json.loads(out.read_text())["results"]
    assert list(result["cases"]) == ["SGD", "VaSSO"]


def test_transformers_with_adamw(throughput, tmp_path, capsys):
    """The base optimizer has the settings of the recipe, and all cases have its batch size."""
    out = tmp_path / "throughput.json"
    flags = ["--device", "cpu", "--models", "vit-nano", "--steps", "1", "--rounds", "1", "--methods", "SAM"]
    throughput.main([*flags, "--base", "adamw", "--batch", "20", "--out", str(out)])
    (result,) = json.loads(out.read_text())["results"]
    assert list(result["cases"]) == list(result["over_base"]) == ["AdamW", "SAM"]
    assert (result["base"], result["batch"]) == ("adamw", 20)
    assert "over adamw" in capsys.readouterr().out
    assert RECIPES["transformers"]("paper").plans[0].run.base == "adamw"
    timed = throughput.BASES["adamw"]
    assert timed.items() - {("warmup", 1)} <= RECIPES["transformers"]("paper").plans[0].run.settings().items()
