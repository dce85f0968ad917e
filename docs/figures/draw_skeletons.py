"""Draw the picture of the guide on poses: python docs/figures/draw_skeletons.py

Two small networks learn drawn figures, in a minute on two cores; the picture has figures that they have not seen: a row
of labels, and a row of the joints that each network found.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from bsam.lab.inference.pictures import (
    GAP,
    arrange,
    save,
    scaled,
    side_legend,
    text_picture,
)
from bsam.lab.recipes.variants import variant_of
from bsam.lab.tasks import task_of
from bsam.lab.tasks.found import Picture
from bsam.lab.tasks.pose import PoseInputs
from bsam.lab.training import Machine, Run, fit
from bsam.lab.training.run_dir import RunDir

HERE = Path(__file__).parent
SETTINGS = {"image_size": 32, "simcc_sigma": 3.0, "limit_train": 400, "batch": 16, "lr": 0.006, "epochs": 12}
PERSON, PERSONS = 180, 8  # pixels, the side of a person; the number of columns

if __name__ == "__main__":
    drawings = []  # row by row
    with tempfile.TemporaryDirectory() as folder:
        for method in ("base", "bsam"):
            run = Run.of(method, task="pose", data="stick_figures", model="simcc_resnet8", **SETTINGS)
            fit(run, Path(folder, method), Machine("cpu"))
            directory = RunDir(Path(folder, method))
            skeleton, arrays = PoseInputs.from_json(directory.note("pose")).skeleton, directory.predictions()
            truth = np.where(arrays["truth"][..., 2:] > 0, arrays["truth"][..., :2], np.nan)  # only labelled joints
            score = f"PCK {100 * directory.last_metrics()['test_pck']:.1f} %"
            for title, joints in ((["label"], truth), ([variant_of(run).title, score], arrays["found"])):
                persons = zip(arrays["pixels"][:PERSONS], joints, strict=False)
                pictures = [Picture(pixels, joints=places, skeleton=skeleton) for pixels, places in persons]
                drawn = [scaled(picture, PERSON) for picture in pictures]
                if title != ["label"] or not drawings:
                    drawings += [text_picture(title, PERSON), *drawn]
    sheet, path = arrange(drawings, 1 + PERSONS, GAP), HERE / "skeletons.png"
    where = text_picture([f"{' on '.join(task_of(run).titles(run))}, seed {run.seed}"], sheet.width)
    save(arrange([where, sheet, side_legend()]), path)
    print(path, path.stat().st_size)
