"""Measure how long a page of a report takes, and how large it is, for runs that are written without training.

python benchmarks/report_page.py                    # 50 runs of 200 epochs
python benchmarks/report_page.py --runs 100 --keep page.html
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from bsam.lab.analysis.runs_table import read_epochs, read_runs
from bsam.lab.config import Run
from bsam.lab.paper import join
from bsam.lab.report.page.page import write_page
from bsam.lab.training.run_dir import run_dir_name

METHODS = {
    "base": {},
    "sam": {"rho": 0.1},
    "asam": {},
    "gsam": {},
    "bsam": {"rho_max": 0.05, "rho_min": 0.05},
}
SIDE = 21  # points along a loss surface
READINGS = 1000  # of a probe


def main() -> None:
    """Write run directories, then read them and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--keep", type=Path, help="keep the page here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in range(options.runs):
            name = list(METHODS)[number % len(METHODS)]
            seed = number // len(METHODS)
            settings = {"label_noise": 0.4, "curvature": True, "surface": SIDE, "epochs": options.epochs}
            settings |= {"probe": 1} if name != "base" else {}
            write_run(Run.of(name, METHODS[name], seed=seed, **settings), folder, number)
        moments = [time.perf_counter()]
        runs = join(read_runs([folder]))
        epochs = read_epochs(runs)
        moments.append(time.perf_counter())
        page = options.keep or folder / "page.html"
        write_page(page, runs, epochs)
        moments.append(time.perf_counter())
        size = page.stat().st_size / 1e6
    read, written = np.diff(moments).tolist()
    print(f"{len(runs)} runs of {options.epochs} epochs: {size:.2f} MB")
    print(f"read {read:.2f} s, page {written:.2f} s, total {moments[-1] - moments[0]:.2f} s")


def write_run(run: Run, folder: Path, number: int) -> None:
    """Write the directory of a finished run with all that the page shows."""
    path = folder / run_dir_name(run)
    path.mkdir()
    random = np.random.default_rng(number)
    axis = np.linspace(-1, 1, SIDE)
    loss = 0.1 + (1 + number % len(METHODS)) * np.add.outer(axis**2, axis**2)
    epochs = [
        {
            "epoch": epoch,
            "train_loss": 2 / epoch,
            "lr": 0.1,
            "seconds": 1.0,
            "test_loss": 1 / math.sqrt(epoch),
            "test_accuracy": random.uniform(0.8, 0.9),
            "memorised": random.uniform(),
        }
        for epoch in range(1, run.epochs + 1)
    ]
    names = ("loss", "max_sharpness", "min_sharpness", "bilateral", "cosine", "rho", "rho_min")
    readings = [{"step": step, **{name: random.uniform() for name in names}} for step in range(READINGS)]
    weights = save({"weight": np.ones(2, np.float32)})
    flatness = {
        "run_dir": path.name,
        "sha256": hashlib.sha256(weights).hexdigest(),
        "samples": 256,
        "eigenvalues": {"maximum": random.uniform(1, 9), "converged": True},
        "landscape": {"axis": axis.tolist(), "loss": loss.tolist()},
    }
    files = {
        "config.json": run.settings(),
        "flatness.json": {"models": [flatness]},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    for name, rows in {"metrics.jsonl": epochs, **({"probe.jsonl": readings} if run.probe else {})}.items():
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "model.safetensors").write_bytes(weights)
    pixels = random.integers(0, 256, (16, 32, 32, 3), np.uint8)
    labels = {"class_names": np.arange(10).astype(str), "confusion": random.integers(1, 100, (10, 10))}
    mistakes = {"truth": np.arange(16) % 10, "found": np.arange(1, 17) % 10, "confidence": random.uniform(size=16)}
    np.savez_compressed(path / "predictions.npz", pixels=pixels, **labels, **mistakes)


if __name__ == "__main__":
    main()
