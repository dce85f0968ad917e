"""The page that compares the methods: accuracy against seconds on one task, from stored runs and measurements."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from bsam.lab import read_runs
from bsam.lab.analysis.sentences import numbers_text
from bsam.lab.config import BASE
from bsam.lab.report.figures.style import style_of
from bsam.methods import METHODS

ROOT = Path(__file__).parents[2]
FIGURE = "accuracy-and-seconds.svg"
TASK = {"model": "resnet18", "data": "cifar10", "label_noise": 0.4, "noise_labels": "all", "epochs": 200, "batch": 128}
TICKS = (200, 300, 500, 1000, 2000)  # seconds
PAGE = """\
# Accuracy and seconds

All methods on one task: ResNet-18 on CIFAR-10 with 40 % of the training labels drawn from all classes (36 % are wrong),
200 epochs with batch size 128, in bf16. Accuracies are those of the last epoch on the test set, from the finished runs
in `results/cifar10-resnet18-label-noise`: mean ± standard deviation (number of seeds). Seconds are the training time
of 200 epochs on one {machine}, without evaluation and checkpoints, from medians of {n} epochs with {steps} steps each
(`benchmarks/throughput.py`): those of SGD, times the method's ratio to SGD in the same process.

![Test accuracy against the seconds of 200 epochs]({figure})

Marks on the axis are methods that were timed, but not run.

| method | radius | passes | seconds | relative to SGD | step | accuracy in % |
|---|---|---|---|---|---|---|
{rows}

- **Radius** is `rho`, or the sum of BSAM's two. Each run has the radius of its paper, or the sum of BSAM's radii; none
  was tuned on this task.
- **Step**: captured in a CUDA graph or, if the method does not allow that, eager, as `bsam train` runs it. Eager steps
  of a network of this size wait for Python, not for the GPU, and vary more from epoch to epoch. They were timed in a
  process with the networks of all methods; alone, they may be faster.
"""


def passes(method: str, arguments: Mapping[str, Any]) -> float:
    """Return the passes per step; methods with equal passes take equal time, whatever their radii."""
    return 1.0 if method == BASE else METHODS[method].passes_with(arguments)


def timed_cases() -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return one row per timed method, and how they were timed."""
    content = json.loads((ROOT / "benchmarks/results/throughput_methods_cuda.json").read_text(encoding="utf-8"))
    sgd = content["results"][0]["epoch_seconds"]["SGD"]["median"]
    rows = [
        {
            **case,
            "passes": passes(**case),
            "seconds": TASK["epochs"] * sgd * result["over_base"][name]["median"],
            "over_base": result["over_base"][name]["median"],
            "step": "captured" if result["captured"][name] else "eager",
        }
        for result in content["results"]
        for name, case in result["cases"].items()
        if name != "BSAM3 in turn"
    ]
    first = content["results"][0]
    facts = {"machine": content["machine"]["gpu"], "n": first["n"], "steps": first["steps_timed"]}
    return pd.DataFrame(rows).drop_duplicates(["method", "passes"]), facts


def comparison() -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return one row per method and radius, the fastest first, and how they were timed.

    A method without runs has no score.
    """
    timed, facts = timed_cases()
    runs = read_runs(ROOT / "results/cifar10-resnet18-label-noise")
    runs = runs[(runs["state"] == "finished") & runs["settings"].map(lambda settings: TASK.items() <= settings.items())]
    runs = runs.assign(passes=[passes(s["method"], s["arguments"]) for s in runs["settings"]])
    groups = runs.groupby(["method", "passes", "row", "radius"], dropna=False)["score"]
    table = timed.merge(groups.agg(["mean", "std", "count"]).reset_index(), how="outer", on=["method", "passes"])
    table["row"] = table["row"].replace("SAM (sum)", "SAM").fillna(table.apply(name_of, axis=1))
    return table.sort_values(["seconds", "mean"], ignore_index=True), facts


def name_of(case: pd.Series) -> str:
    """Return the name of a timed method, with the arguments that change its passes."""
    if case["method"] == BASE:
        return "SGD"
    changed = case["passes"] != passes(case["method"], {})
    arguments = ", ".join(f"{name}={value}" for name, value in case["arguments"].items())
    return METHODS[case["method"]].title + (f" ({arguments})" if changed else "")


def page() -> str:
    """Return the page."""
    table, facts = comparison()
    rows = []
    for row in table.to_dict("records"):
        name = row["row"] if row["method"] == BASE else f"[{row['row']}]({row['method']}.md)"
        radius = "-" if pd.isna(row["radius"]) else f"{row['radius']:g}"
        score = "not run" if pd.isna(row["mean"]) else numbers_text(row["mean"], row["std"], int(row["count"]))
        time = f"{row['seconds']:.0f} | {row['over_base']:.2f} | {row['step']}"
        rows.append(f"| {name} | {radius} | {row['passes']:.3g} | {time} | {score} |")
    return PAGE.format(rows="\n".join(rows), figure=FIGURE, **facts)


def draw(path: Path) -> None:
    """Draw the accuracies against the seconds; a mark on the axis is a method that was not run."""
    import matplotlib.pyplot as plt  # seconds for tests, which need only the pages
    from draw import GREY, STYLE

    table, _ = comparison()
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
        for row in table[table["mean"].notna()].to_dict("records"):
            colour = style_of(row["method"], row["row"])["line"]["color"]
            ax.plot(row["seconds"], row["mean"], color=colour, marker="o", markersize=7)
            name = row["row"] + ("" if pd.isna(row["radius"]) else f", radius {row['radius']:g}")
            ax.annotate(
                name, (row["seconds"], row["mean"]), (8, 0), textcoords="offset points", va="center", color=colour
            )
        ax.set(xlabel="seconds for 200 epochs", ylabel="test accuracy, %", xscale="log")
        ax.set_xticks(TICKS, map(str, TICKS))
        ax.minorticks_off()
        not_run = table.loc[table["mean"].isna(), "seconds"]
        ax.plot(not_run, [0] * len(not_run), "|", color=GREY, markersize=10, transform=ax.get_xaxis_transform())
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)
