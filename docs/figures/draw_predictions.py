"""Draw the picture of the guide on fine-tuning, as `bsam predict --grid` does: python docs/figures/draw_predictions.py

A small network learns drawn shapes, in a minute; the picture has images that it has not seen.
"""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path

from bsam.lab.inference import predict
from bsam.lab.inference.pictures import predictions_grid, save
from bsam.lab.training import Machine, Run, fit

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples/fine_tune.py"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        photos, new = Path(folder, "photos"), Path(folder, "new")
        runpy.run_path(str(EXAMPLE))["draw_folder"](photos, images=60)
        new.mkdir()
        for path in sorted(photos.glob("*/000.png")):
            path.rename(new / f"{path.parent.name}.png")
        run = Run("bsam", data=f"folder:{photos}", model="timm:test_resnet", image_size=32, lr=0.02, batch=8, epochs=6)
        fit(run, Path(folder, "run"), Machine("cpu"))
        path = HERE / "predictions.png"
        save(predictions_grid(predict(Path(folder, "run"), sorted(new.iterdir()), device="cpu")), path)
        print(path, path.stat().st_size)
