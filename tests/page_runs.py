"""A table of runs that nobody trained, with every part that the page of a report shows."""

import base64
import json
import re
from html import unescape

import numpy as np
import pandas as pd

from bsam.lab.analysis.runs_table import COLUMNS
from bsam.lab.config import Run
from bsam.lab.paper import join
from bsam.lab.recipes.plan import describe
from bsam.lab.recipes.variants import arguments_on, variants

UNIT = "test accuracy in %"
EVIL = "</script><script>document.title = 'broken'</script>"  # a name that is text on the page
METHODS = {"SGD": (1, None, 60.0), "SAM": (2, 0.1, 80.0), "SAM, rho 0.2": (2, 0.2, 84.0), EVIL: (3, 0.2, 90.0)}
PROBLEM = "folder/broken: metrics.jsonl <b>cannot</b> be read"


def score_of(method, seed):
    """Known beforehand, and different for each run."""
    return METHODS[method][2] + (seed - 1) * (0.5 + 0.25 * list(METHODS).index(method))


def landscape(steepness, side=9):
    """A bowl."""
    axis = np.linspace(-1, 1, side)
    loss = 0.1 + steepness * np.add.outer(axis**2, axis**2)
    return {"axis": axis.tolist(), "loss": loss.tolist()}


def flatness(run, steepness):
    """An entry of a ``flatness.json``."""
    values = [steepness * (20 - i) for i in range(20)]
    spread = {"mean": np.mean(values), "variance": np.var(values), "maximum": max(values), "converged": True}
    density = {"nodes": [-1.0, 0.0, steepness], "weights": [0.1, 0.8, 0.1], "sigma": 0.1}
    parts = {"density": density, "landscape": landscape(steepness), "eigenvalues": {"values": values, **spread}}
    return {"run": run.settings(), "samples": 1000, **parts}


def write_files(folder, readings):
    """Write a probe, and predictions for three classes, one with a name like a tag."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {"max_sharpness": 1.0, "min_sharpness": 0.5, "bilateral": 1.5, "cosine": 0.1}
    lines = (json.dumps({"step": step, **names, "max_sharpness": 1.0 + step}) for step in range(readings))
    (folder / "probe.jsonl").write_text("".join(f"{line}\n" for line in lines))
    arrays = {
        "class_names": np.array(["cat", "<b>dog</b>", "cow"]),
        "confusion": np.array([[8, 2, 0], [1, 9, 0], [0, 0, 10]]),
        "pixels": np.arange(3 * 8 * 8, dtype=np.uint8).reshape(3, 8, 8, 1),
        "truth": np.array([0, 0, 1]),
        "found": np.array([1, 1, 0]),
        "confidence": np.array([0.9, 0.8, 0.7]),
    }
    np.savez_compressed(folder / "predictions.npz", **arrays)


def table(rows):
    """A table of runs with these columns."""
    joined = {"chosen": "", "claimed": np.nan, "note": ""}
    return pd.DataFrame([{**COLUMNS, **joined, "settings": {}, **row} for row in rows])


def example_runs(folder, seeds=3, epochs=20):
    """Finished runs of four methods, one diverged and one unfinished run; and their epochs."""
    rows = []
    common = {"experiment": "DigitsNet, digits", "unit": UNIT, "epochs": epochs, "model": "digits_net"}
    for place, (method, (passes, radius, _)) in enumerate(METHODS.items()):
        for seed in range(seeds):
            variant = "sgd" if radius is None else "sam-follow" if method == EVIL else "sam"
            run = Run("base" if radius is None else "sam", {"rho": radius} if radius else {}, epochs=epochs, seed=seed)
            path = folder / f"run-{place}-{seed}"
            if seed == 0:
                write_files(path, 500 if epochs > 100 else 5)
            numbers = {"score": score_of(method, seed), "passes": float(passes), "seconds": 2.0 * passes}
            numbers |= {"radius": radius or np.nan, "published": 61.5 if radius is None else np.nan}
            numbers |= {
                "eigenvalue_samples": 256,
                "memorised": 30.0,
                "top_eigenvalue": 10.0 + place,
                "epochs_done": epochs,
                "place": place,
            }
            about = {
                "row": method,
                "seed": seed,
                "variant": variant,
                "method": run.method,
                "name": f"{method}-seed{seed}",
            }
            about |= {"chosen": "the paper's" if radius else "", "settings": run.settings(), "path": path}
            about["flatness"] = [flatness(run, 1.0 + place)] if seed == 0 else None
            rows.append({**common, **about, **numbers})
    half = {**common, "settings": Run("gsam", epochs=epochs).settings(), "epochs_done": epochs // 2, "path": folder}
    failed = {"state": "diverged", "reason": "the loss of step 7 is nan", "name": "diverged"}
    rows.append({**half, "row": "SAM", "seed": 7, "place": 1, "method": "sam", "variant": "sam", **failed})
    unfinished = {"state": "unfinished", "reason": "epoch 10 of 20", "name": "half"}
    rows.append({**half, "row": "GSAM", "seed": 0, "place": 4, "method": "gsam", "variant": "gsam", **unfinished})
    runs = table(rows).sort_values(["place", "seed"], kind="stable").reset_index(drop=True)
    return runs, epochs_of(runs)


def epochs_of(runs):
    """The metrics of each epoch; the last score is that of the run, or 50."""
    lines = []
    for place, run in runs.iterrows():
        score, n = 50.0 if np.isnan(run["score"]) else run["score"], run["epochs"]
        for epoch in range(1, run["epochs_done"] + 1):
            metrics = {
                "train_loss": 2.0 / epoch,
                "test_accuracy": score / 100 * epoch / n,
                "memorised": 0.3 * epoch / n,
            }
            key = {name: run[name] for name in ("experiment", "row", "seed", "state")}
            lines.append({"run": place, **key, "epoch": epoch, **metrics})
    return pd.DataFrame(lines)


def claim_runs():
    """Runs of four seeds that bear on claims of the paper, in two experiments; the second has one seed."""
    clean = {"sgd": 95.0, "sam": 96.0, "bsam": 95.5, "sam-sum": 95.2, "sam-follow": 95.5}
    rows = []
    for data, scores, seeds in (("cifar10", clean, 4), ("cifar100", {"sgd": 79.0, "sam": 80.0, "bsam": 81.0}, 1)):
        for place, (name, score) in enumerate(scores.items()):
            variant = variants()[name]
            for seed in range(seeds):
                given = arguments_on(variant, data)
                run = Run(variant.method, given, model="resnet18", data=data, epochs=200, seed=seed)
                known = {key: value for key, value in describe(run).items() if key in COLUMNS and value is not None}
                noise = 0.1 * ((seed + place) % 4)
                top = {"top_eigenvalue": 100 - score + 2 * noise, "eigenvalue_samples": 256}
                numbers = {"score": score + noise, "epochs_done": 200, **top}
                about = {"seed": seed, "method": run.method, "unit": UNIT, "epochs": 200, "name": f"{name}-{seed}"}
                rows.append({**COLUMNS, **known, **numbers, **about, "settings": run.settings()})
    return join(pd.DataFrame(rows))


def plots_of(html):
    """The plots in a page, by name; numbers are arrays."""
    found = re.findall(r'data-figure="(.*?)"></div><script type="application/json">(.*?)</script>', html)
    return {name: json.loads(text, object_hook=decoded) for name, text in found}


def decoded(content):
    """The array that plotly wrote in base64."""
    if "bdata" not in content:
        return content
    array = np.frombuffer(base64.b64decode(content["bdata"]), content["dtype"])
    return array.reshape([int(side) for side in content["shape"].split(",")]) if "shape" in content else array


def cells_of(html, number=0):
    """The fields of the CSV copy of a table, by the first cell of each row."""
    content = re.findall(r"<table.*?</table>", html, re.DOTALL)[number]
    head, *rows = re.findall(r"<tr.*?</tr>", content, re.DOTALL)
    lines = [[unescape(text) for text in re.findall(r'data-csv="(.*?)"', row)] for row in (head, *rows)]
    import csv

    return list(csv.DictReader(",".join(line) for line in lines))
