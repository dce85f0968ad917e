"""Draw the picture of the guide on poses: python docs/figures/draw_skeletons.py

Two small networks learn drawn figures, in a minute on two cores; the picture has figures that they have not seen.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bsam.lab.report.figures.prediction_pictures import draw_skeletons
from bsam.lab.training import POSE, Run, fit
from bsam.lab.training.run_dir import RunDir

HERE = Path(__file__).parent
SETTINGS = {**POSE, "image_size": 32, "simcc_sigma": 3.0, "limit_train": 400, "batch": 16, "lr": 0.006, "epochs": 12}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        states = []
        for method in ("base", "bsam"):
            run = Run.of(method, task="pose", data="stick_figures", model="simcc_resnet8", **SETTINGS)
            fit(run, Path(folder, method), device="cpu")
            states.append(RunDir(Path(folder, method)).state(run))
        path = HERE / "skeletons.png"
        draw_skeletons(states, path)
        print(path, path.stat().st_size)
