"""Draw the figures of the README from the files in results/: python docs/figures/draw.py

The colours are those of the report, readable on white and on dark pages: the background is transparent, and text and
axes are grey.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from bsam.lab import read_runs
from bsam.lab.report.figures.style import style_of

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results"
GREY = "#808080"
SGD, SAM, BSAM, LOOKSAM = (style_of(method, "")["line"]["color"] for method in ("base", "sam", "bsam", "looksam"))
METHODS = {"sgd": ("SGD", SGD), "sam": ("SAM", SAM), "bsam": ("BSAM", BSAM)}
NOISE_RUNS = {  # of seed 1, and their titles, colours and line styles
    "sgd": ("SGD", SGD, "-"),
    "sam": (r"SAM, $\rho$ 0.05", SAM, "-"),
    "bsam": (r"BSAM, $\rho$ 0.05 + 0.05", BSAM, "-"),
    "sam-rho0.1": (r"SAM, $\rho$ 0.1", SAM, "--"),
}
RADIUS_ROWS = {  # of the table, and their titles, colours, markers and line styles
    "SAM": (r"SAM, $\rho$ fixed", SAM, "o", "-"),
    "SAM (follow)": (r"SAM, $\rho$ falls to half, as BSAM's total radius does", SAM, "s", "--"),
    "BSAM (Algorithm 1)": ("BSAM", BSAM, "o", "-"),
    "BSAM (2 passes)": ("BSAM, two passes", BSAM, "D", "--"),
}
STYLE = {
    "font.size": 11,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "bsam",  # the same file from the same numbers
}


def label_noise() -> plt.Figure:
    """Test accuracy of every epoch, with 40 % wrong training labels."""
    figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for name, (title, colour, line) in NOISE_RUNS.items():
        lines = (RESULTS / f"cifar10-resnet18-noise40/{name}-seed1.jsonl").read_text(encoding="utf-8").splitlines()
        accuracy = [100 * json.loads(line)["test_accuracy"] for line in lines]
        ax.plot(range(1, len(accuracy) + 1), accuracy, color=colour, linewidth=1.5, linestyle=line)
        ax.annotate(
            f"{title}: {accuracy[-1]:.1f}", (len(accuracy), accuracy[-1]), (6, 0), textcoords="offset points",
            va="center", color=colour, fontweight="bold",
        )  # fmt: skip
    ax.set(xlim=(0, 200), ylim=(40, 96), xlabel="epoch", ylabel="test accuracy, %")
    ax.set_title("ResNet-18 on CIFAR-10, 40 % wrong training labels", fontsize=11, color=GREY)
    return figure


def radius() -> plt.Figure:
    """Test accuracy and memorised labels against the total radius, with 40 % wrong training labels."""
    runs = read_runs(RESULTS / "cifar10-resnet18-radius")
    rows = runs["row"].str.partition(", ")[0].replace("SAM (sum)", "SAM")
    means = runs[runs["state"] == "finished"].groupby([rows, runs["radius"].fillna(0.0)])[["score", "memorised"]].mean()
    cells = means.to_dict("index")
    totals = sorted({total for _, total in cells if total})
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.1), layout="constrained")
    sgd = cells["SGD", 0.0]
    for ax, name in zip(axes, ("score", "memorised"), strict=True):
        for number, (row, (title, colour, marker, line)) in enumerate(RADIUS_ROWS.items()):
            points = [(total, cells[row, total]) for total in totals if (row, total) in cells]
            x = [total * 1.015**number for total, _ in points]  # side by side
            y = [cell[name] for _, cell in points]
            ax.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.5, linestyle=line, label=title)
        ax.axhline(sgd[name], color=SGD, linewidth=1.5, label="SGD")
        ax.set(xscale="log", xlabel=r"total radius: $\rho$, or $\rho_{\max} + \rho_{\min}$")
        ax.set_xticks(totals, [f"{total:g}" for total in totals])
        ax.minorticks_off()
    axes[0].set(ylabel="test accuracy, %")
    axes[1].set(ylabel="wrong labels memorised, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    figure.suptitle("ResNet-18 on CIFAR-10, 40 % wrong training labels, 200 epochs", fontsize=11, color=GREY)
    return figure


PASSES = {  # of results/every: methods, their passes, titles, colours and markers; and the file of the CIFAR-10 run
    "sgd": (1, "SGD", SGD, "o", "cifar10-resnet18-noise40/sgd-seed1"),
    "looksam-alpha0.5": (1.2, r"LookSAM, $\alpha$ 0.5", LOOKSAM, "s", "every/looksam-alpha0.5-rho0.1-seed1"),
    "bsam-2-every5": (1.2, "BSAM(passes=2, every=5)", BSAM, "D", "every/bsam-2-every5-seed1"),
    "sam": (2, "SAM", SAM, "o", "cifar10-resnet18-noise40/sam-rho0.1-seed1"),
    "sam-follow": (2, "SAM, radius falls as BSAM's does", SAM, "v", "cifar10-resnet18-noise40/sam-follow-seed1"),
    "bsam-2": (2, "BSAM, two passes", BSAM, "s", "cifar10-resnet18-noise40/bsam-2-seed1"),
    "bsam": (3, "BSAM", BSAM, "o", "cifar10-resnet18-noise40/bsam-seed1"),
}


def passes() -> plt.Figure:
    """Test accuracy against passes per step, with 40 % wrong training labels, at equal total radius."""
    scores = json.loads((RESULTS / "every/digits.json").read_text(encoding="utf-8"))["scores"]
    figure, (digits, cifar) = plt.subplots(1, 2, figsize=(9, 4.1), layout="constrained")
    for name, (cost, title, colour, marker, file) in PASSES.items():
        seeds = 100 * np.array(scores[name]["0" if name == "sgd" else "0.2"])
        digits.errorbar(
            cost, seeds.mean(), seeds.std(ddof=1), color=colour, marker=marker, markersize=6, capsize=3, label=title
        )
        last = json.loads((RESULTS / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        cifar.plot(cost, 100 * last["test_accuracy"], color=colour, marker=marker, markersize=6)
    digits.set_title("digits, total radius 0.2, 10 seeds", fontsize=11, color=GREY)
    cifar.set_title("ResNet-18, CIFAR-10, total radius 0.1, one seed", fontsize=11, color=GREY)
    for ax in (digits, cifar):
        ax.set(xlabel="passes per step", ylabel="test accuracy, %", xticks=(1, 1.2, 2, 3))
    figure.legend(*digits.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return figure


NETWORKS = {"mlp": "MLP", "digits_net": "convolutional, with batch norm", "transformer": "transformer"}
SCHEDULES = {  # of the radius, and their titles, line styles and markers
    "constant": ("constant", "-", "o"),
    "warmup": ("rises over the first quarter", "--", "s"),
    "start": ("starts after a quarter", ":", "D"),
}


def radius_warmup() -> plt.Figure:
    """Test accuracy on digits against the radius, with a constant radius, with warm-up, and with a late start."""
    rows = pd.DataFrame(json.loads((RESULTS / "radius-warmup/digits.json").read_text(encoding="utf-8"))["rows"])
    seeds = 100 * np.array(rows["accuracy"].tolist())
    rows["mean"], rows["error"] = seeds.mean(axis=1), seeds.std(axis=1, ddof=1) / np.sqrt(seeds.shape[1])
    figure, axes = plt.subplots(3, 3, figsize=(9, 8.2), sharex=True, sharey="row", layout="constrained")
    panels, shares = rows.groupby(["wrong", "network"]), sorted(rows["wrong"].unique())
    for (wrong, network), ax in zip(itertools.product(shares, NETWORKS), axes.flat, strict=True):
        panel = panels.get_group((wrong, network))
        for schedule, method in itertools.product(SCHEDULES, ("sam", "bsam")):
            (title, colour), (words, line, marker) = METHODS[method], SCHEDULES[schedule]
            points = panel[(panel["method"] == method) & (panel["schedule"] == schedule)].sort_values("radius")
            ax.errorbar(
                points["radius"], points["mean"], points["error"], color=colour, linestyle=line, marker=marker,
                markersize=4, linewidth=1.5, label=f"{title}, {words}",
            )  # fmt: skip
        sgd = panel.loc[panel["method"] == "sgd", "mean"].item()
        ax.axhline(sgd, color=SGD, linewidth=1.5, label="SGD", zorder=0)
        ax.set(xscale="log", ylim=(0, 100))
        radii = sorted(panel["radius"].dropna().unique())
        ax.set_xticks(radii, [f"{radius:g}" for radius in radii])
        ax.minorticks_off()
    for ax, title in zip(axes[0], NETWORKS.values(), strict=True):
        ax.set_title(title, fontsize=11, color=GREY)
    for ax, wrong in zip(axes[:, 0], shares, strict=True):
        ax.set_ylabel(f"{100 * wrong:.0f} % wrong labels:\ntest accuracy, %")
    for ax in axes[-1]:
        ax.set_xlabel("total radius")
    (sgd_line, *handles), (_, *labels) = axes[0, 0].get_legend_handles_labels()
    handles, labels = [*handles, sgd_line], [*labels, "SGD"]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


ADAMW = {"AdamW": "-", "AdamW, twice the epochs": "--"}  # rows of results/cifar100-vit-tiny, and their line styles


def transformers() -> plt.Figure:
    """Test accuracy of a vision transformer with AdamW against the radius, with and without radius warm-up."""
    runs = read_runs(RESULTS / "cifar100-vit-tiny")
    sam = runs[runs["method"] == "sam"]
    schedules = np.where(sam["row"].str.endswith(", warm-up"), "warmup", "constant")
    figure, ax = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    for schedule, points in sam.groupby(schedules):
        words, line, marker = SCHEDULES[str(schedule)]
        scores = points.groupby("radius")["score"]
        ax.errorbar(
            scores.mean().index, scores.mean(), scores.std(), color=SAM, linestyle=line, marker=marker,
            markersize=5, linewidth=1.5, capsize=3, label=f"SAM, radius {words}",
        )  # fmt: skip
    for row, line in ADAMW.items():
        scores = runs.loc[runs["row"] == row, "score"]
        if len(scores):
            ax.axhline(scores.mean(), color=SGD, linestyle=line, linewidth=1.5, label=row)
            ax.axhspan(scores.mean() - scores.std(), scores.mean() + scores.std(), color=SGD, alpha=0.15, linewidth=0)
    radii = sorted(sam["radius"].unique())
    ax.set(xscale="log", xlabel=r"radius $\rho$", ylabel="test accuracy, %")
    ax.set_xticks(radii, [f"{radius:g}" for radius in radii])
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=10)
    ax.set_title("ViT-Ti from scratch on CIFAR-100", fontsize=11, color=GREY)
    return figure


def flatness() -> plt.Figure:
    """The largest eigenvalues of the Hessian of three trained networks, and the rise of their loss on a plane."""
    models = json.loads((RESULTS / "cifar100-resnet18/flatness.json").read_text(encoding="utf-8"))["models"]
    figure, (spectrum, *planes) = plt.subplots(
        1, 4, figsize=(10, 2.9), width_ratios=(1.5, 1, 1, 1), layout="constrained"
    )
    levels = np.linspace(0, 1.8, 13) ** 2
    colours = plt.colormaps["viridis"](np.linspace(0, 1, 12))
    for model, ax, (title, colour) in zip(models, planes, METHODS.values(), strict=True):
        values = model["eigenvalues"]["values"]
        spectrum.plot(range(1, len(values) + 1), values, color=colour, marker="o", markersize=3, label=title)
        axis, rise = model["landscape"]["axis"], np.array(model["landscape"]["loss"]) - model["landscape"]["centre"]
        filled = ax.contourf(axis, axis, np.maximum(rise, 0).T, levels=levels, colors=colours)
        ax.set(aspect="equal", xticks=[], yticks=[])
        test, loss = 100 * model["metrics"]["test_accuracy"], model["landscape"]["centre"]
        ax.set_title(f"{title}: {test:.1f} %, loss {loss:.2f}", fontsize=9, color=colour)
    measured = f"eigenvalue of the Hessian\n(cross-entropy,\n{models[0]['samples']:,} training samples)"
    spectrum.set(xlabel="number", ylabel=measured, ylim=(0, None), xticks=(1, 5, 10, 15, 20))
    spectrum.legend(frameon=False)
    figure.colorbar(filled, ax=planes, label="rise of the loss", ticks=levels[::3], format="%.1f", pad=0.02)
    return figure


if __name__ == "__main__":
    with plt.rc_context(STYLE):
        for draw in (radius, label_noise, passes, radius_warmup, transformers, flatness):
            path = HERE / f"{draw.__name__}.svg"
            draw().savefig(path, transparent=True, metadata={"Date": None})
            print(path, path.stat().st_size)
