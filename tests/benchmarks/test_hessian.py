"""The benchmark of the Hessian runs, on noise and on files, and its residuals are those of what each tool returned."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

FEW = [
    "--device",
    "cpu",
    "--images",
    "8",
    "--batch",
    "4",
    "--epochs",
    "0",
    "--repeats",
    "1",
    "--k",
    "2",
    "--tol",
    "0.1",
    "--max-gb",
    "1",
]


def tiny(name):
    """Convolutions and batch norm, as in the network of that name, and much faster."""
    assert name == "resnet8"
    layers = torch.nn.Conv2d(3, 4, 3, stride=4), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))


@pytest.mark.filterwarnings(
    "ignore:Using backward:UserWarning", "ignore:.torch.jit:DeprecationWarning"
)  # PyHessian's, and of what curvlinops imports
def test_each_tool_is_measured_and_ours_again_at_its_residual(hessian, tmp_path, monkeypatch):
    monkeypatch.setattr(hessian, "build", tiny)
    monkeypatch.setattr(hessian, "NOISE", 64)
    hessian.main([*FEW, "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    ours, *peers = found["eigenvalues"][:3]
    assert [ours["tool"], *(p["tool"] for p in peers)] == ["bsam", "PyHessian", "curvlinops"]
    assert [(again["tool"], again["tol"]) for again in found["eigenvalues"][3:]] == [
        ("bsam", p["worst_relative_residual"]) for p in peers
    ]
    assert ours["converged"]
    assert ours["worst_relative_residual"] <= 0.1
    assert ours["values"] == pytest.approx(peers[1]["values"], rel=1e-2)
    assert found["product"]["n"] == found["linearized_product"]["n"] == 1
    assert (found["product"]["recorded"], found["linearized_product"]["recorded"]) == (0, 2)


def test_images_come_from_the_binary_layout(hessian, tmp_path):
    records = np.random.default_rng(0).integers(0, 256, (3, hessian.RECORD), dtype=np.uint8)
    records[:, 0] = [7, 0, 9]
    records.tofile(tmp_path / "test_batch.bin")
    x, y = hessian.images(tmp_path, ["test_batch"], torch.device("cpu"))
    assert y.tolist() == [7, 0, 9]
    assert x.shape == (3, 3, 32, 32)
    green = records[1, 1 + 1024 + 5 * 32 + 6] / 255
    assert float(x[1, 1, 5, 6]) == pytest.approx((green - hessian.MEAN[1]) / hessian.STD[1], abs=1e-5)


def test_training_lowers_the_loss(hessian):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    x, y = torch.randn(64, 3, 2, 2), torch.randint(3, (64,))
    before = torch.nn.functional.cross_entropy(model(x), y).item()
    hessian.train(model, x, y, 30)
    assert torch.nn.functional.cross_entropy(model(x), y).item() < before
    assert not model.training
