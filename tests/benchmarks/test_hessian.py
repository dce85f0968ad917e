"""The benchmark of the Hessian runs, on noise and on files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

FEW = ("--device=cpu", "--images=8", "--batch=4", "--epochs=0", "--repeats=1", "--k=2", "--tol=0.1", "--max-gb=1")


def tiny(name):
    """A much faster network."""
    assert name == "resnet8"
    return torch.nn.Sequential(torch.nn.AvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(48, 10))


# warnings of PyHessian, and of imports in curvlinops
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning", "ignore:.torch.jit:DeprecationWarning")
def test_tools_are_compared(hessian, tmp_path, monkeypatch):
    monkeypatch.setattr(hessian, "build", tiny)
    monkeypatch.setattr(hessian, "NOISE", 64)
    hessian.main([*FEW, "--out", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    ours, *peers = result["eigenvalues"][:3]
    assert [ours["tool"], *(p["tool"] for p in peers)] == ["bsam", "PyHessian", "curvlinops"]
    assert [(again["tool"], again["tol"]) for again in result["eigenvalues"][3:]] == [
        ("bsam", p["worst_relative_residual"]) for p in peers
    ]
    assert ours["converged"]
    assert ours["worst_relative_residual"] <= 0.1
    assert ours["values"] == pytest.approx(peers[1]["values"], rel=1e-2)
    assert result["product"]["n"] == result["linearized_product"]["n"] == 1
    assert (result["product"]["recorded"], result["linearized_product"]["recorded"]) == (0, 2)


def test_images_from_the_binary_layout(hessian, tmp_path):
    records = np.random.default_rng(0).integers(0, 256, (3, hessian.RECORD), dtype=np.uint8)
    records[:, 0] = [7, 0, 9]
    records.tofile(tmp_path / "test_batch.bin")
    x, y = hessian.images(tmp_path, ["test_batch"], torch.device("cpu"))
    assert y.tolist() == [7, 0, 9]
    assert x.shape == (3, 3, 32, 32)
    green = records[1, 1 + 1024 + 5 * 32 + 6] / 255
    assert float(x[1, 1, 5, 6]) == pytest.approx((green - hessian.MEAN[1]) / hessian.STD[1], abs=1e-5)
