"""Records of runs that nobody trained, with every part that the page of a report shows."""

import json

import numpy as np

from bsam.lab.analysis.run_record import Record, Records
from bsam.lab.training.config import Run
from bsam.lab.training.run_dir import LossSurface

UNIT = "test accuracy in %"
EVIL = "</script><script>document.title = 'broken'</script>"  # a name that is text on the page
METHODS = {"SGD": (1, None, 60.0), "SAM": (2, 0.1, 80.0), "SAM, rho 0.2": (2, 0.2, 84.0), EVIL: (3, 0.2, 90.0)}


def score_of(method, seed):
    """Known beforehand, and different for each run."""
    return METHODS[method][2] + (seed - 1) * (0.5 + 0.25 * list(METHODS).index(method))


def epochs_of(score, n):
    """The metrics of each epoch; the last score is ``score``."""
    return tuple(
        {
            "epoch": e,
            "train_loss": 2.0 / e,
            "test_accuracy": score / 100 * e / n,
            "memorised": 0.3 * e / n,
            "seconds": 2.0,
        }
        for e in range(1, n + 1)
    )


def surface(steepness, side=9):
    """A bowl."""
    axis = np.linspace(-1, 1, side)
    loss = 0.1 + steepness * np.add.outer(axis**2, axis**2)
    return LossSurface(tuple(axis.tolist()), tuple(tuple(row) for row in loss.tolist()))


def flatness(steepness):
    """An entry of a ``flatness.json``."""
    values = [steepness * (20 - i) for i in range(20)]
    density = {"nodes": [-1.0, 0.0, steepness], "weights": [0.1, 0.8, 0.1], "sigma": 0.1}
    land = surface(steepness)
    parts = {"density": density, "landscape": {"axis": land.axis, "loss": land.loss}}
    return {"samples": 1000, "eigenvalues": {"values": values}, **parts}


def write_classes(folder):
    """Write predictions for three classes, one with a name like a tag."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "class_names": np.array(["cat", "<b>dog</b>", "cow"]),
        "confusion": np.array([[8, 2, 0], [1, 9, 0], [0, 0, 10]]),
        "pixels": np.arange(3 * 8 * 8, dtype=np.uint8).reshape(3, 8, 8, 1),
        "truth": np.array([0, 0, 1]),
        "found": np.array([1, 1, 0]),
        "confidence": np.array([0.9, 0.8, 0.7]),
    }
    np.savez_compressed(folder / "predictions.npz", **arrays)
    return folder / "predictions.npz"


def example_records(folder, seeds=3, epochs=20, experiments=1):
    """Finished runs of four methods, one diverged and one unfinished run, and a problem."""
    runs = []
    for number in range(experiments):
        about = {"experiment": f"DigitsNet, digits {number}", "unit": UNIT, "higher_is_better": True}
        for place, (method, (passes, radius, _)) in enumerate(METHODS.items()):
            for seed in range(seeds):
                score = score_of(method, seed)
                first = seed == 0
                place_of_run = folder / f"run-{number}-{place}-{seed}"
                arguments = {"rho": radius} if radius else {}
                arguments |= {"rho_floor": radius / 2} if method == EVIL else {}  # another line than SAM's
                run = Run("base" if radius is None else "sam", arguments, epochs=epochs, seed=seed)
                probe = [
                    {"step": s, "max_sharpness": 1.0 + s, "min_sharpness": 0.5, "bilateral": 1.5 + s, "cosine": 0.1}
                    for s in range(500 if epochs > 100 else 5)
                ]
                runs.append(
                    Record(
                        name=f"{method}-seed{seed}",
                        folder=place_of_run,
                        method=method,
                        seed=seed,
                        state="finished",
                        reason=None,
                        score=score,
                        epochs=epochs_of(score, epochs),
                        passes=float(passes),
                        seconds=2.0 * passes,
                        radius=radius,
                        chosen="the paper's" if radius else "",
                        published=61.5 if radius is None else None,
                        settings=run.settings(),
                        probe=tuple(probe),
                        top_eigenvalue=10.0 + place,
                        surface=surface(1.0 + place),
                        flatness=flatness(1.0 + place) if first else None,
                        predictions=write_classes(place_of_run) if first else None,
                        **about,
                    )
                )
        common = {"folder": folder, "score": None, "settings": Run("gsam", epochs=epochs).settings(), **about}
        halves = epochs_of(50.0, epochs)[: epochs // 2]
        reason = "the loss of step 7 is nan"
        runs.append(Record("diverged", method="SAM", seed=7, state="diverged", reason=reason, epochs=halves, **common))
        runs.append(
            Record("half", method="GSAM", seed=0, state="unfinished", reason="epoch 10 of 20", epochs=halves, **common)
        )
    return Records(tuple(runs), ("folder/broken: metrics.jsonl <b>cannot</b> be read",))


def embedded(html):
    """The JSON in a page."""
    start = html.index(b'id="data">') + len(b'id="data">')
    return json.loads(html[start : html.index(b"</script>", start)])
