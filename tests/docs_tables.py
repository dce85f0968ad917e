"""Rows of the tables in docs/benchmarks.md, from the stored measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bsam.methods import METHODS

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TITLES = {method.__name__: method.title for method in METHODS.values()}
COLUMNS = ("SAM", "BSAM3", "BSAM2", "pytorch_optimizer SAM")


def stored(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def spread(ratio: dict[str, float] | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]"


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def step_times() -> list[str]:
    results = [r for name in ("cuda_bf16", "cuda_fp32", "cpu") for r in stored(f"step_time_{name}")["results"]]
    heads = [(r["model"], r["base"], f"{r['precision']} {r['mode']}", r["n"]) for r in results]
    return [row(*head, *(spread(r["ratios"].get(c)) for c in COLUMNS)) for head, r in zip(heads, results, strict=True)]


def method_costs() -> list[str]:
    runs = [stored(f"step_time_cpu_methods{n}")["results"][0]["costs"] for n in ("", "_again", "_third")]
    return [
        row(
            TITLES.get(name, name),
            f"{costs['promised']:g}",
            *(spread(r.get(name)) for r in runs),
        )
        for name, costs in runs[0].items()
    ]


def memory() -> list[str]:
    """On a GPU, the numbers that the tests count; on the CPU, measured ones."""
    measured = stored("memory_cpu")
    on_gpu = {m.__name__: m.memory_in_words() for m in METHODS.values()}
    on_gpu |= {"BSAM3": on_gpu["BSAM"], "BSAM2": on_gpu["BSAM"]}
    columns = [measured[dtype]["methods"] for dtype in ("fp32", "bf16")]
    return [
        row(TITLES.get(name, name), on_gpu.get(name, "-"), *(f"{column[name]['extra_step']:.2f}" for column in columns))
        for name in columns[0]
    ]


def epochs() -> list[str]:
    cases = ("SGD", "SAM", "BSAM2", "BSAM3", "BSAM3 in turn")
    return [
        row(
            r["model"] + ", compiled" * r["compile"],
            *(f"{r['epoch_seconds'][name]['median']:.2f}" for name in cases),
            *(f"{r['over_base'][name]['median']:.2f}" for name in ("BSAM3", "BSAM3 in turn")),
            r["steps_timed"],
        )
        for r in stored("throughput_cuda")["results"]
    ]


def transformer_epochs() -> list[str]:
    cases = ("AdamW", "SAM", "BSAM2", "BSAM3")
    return [
        row(
            r["model"] + ", compiled" * r["compile"],
            *(f"{r['epoch_seconds'][name]['median']:.2f}" for name in cases),
            *(f"{r['over_base'][name]['median']:.2f}" for name in cases[1:]),
            r["steps_timed"],
        )
        for r in stored("throughput_vit_tiny_cuda")["results"]
    ]


def whole_runs() -> list[str]:
    lines = []
    for title, name in (("SGD", "whole_run_cuda"), ("BSAM", "whole_run_bsam_cuda")):
        r = stored(name)["result"]
        start = r["start_seconds"] - r["first_epoch_seconds"] - r["first_evaluation_seconds"]
        each = [f"{r[f'{part}_seconds']['median']:.3f}" for part in ("training", "evaluation", "metrics", "checkpoint")]
        lines.append(row(title, *each, f"{start:.1f}", f"{r['ratio_of_200_epochs']:.2f}", r["n"]))
    return lines


def products() -> list[str]:
    return [
        row(d["model"], d["images"], kind, *(f"{d[key]['ratio']['median']:.2f}" for key in ("product", inside)))
        for name, kind, inside in (
            ("hessian_linearized_cuda", "H200", "linearized_product"),
            ("hessian_linearized_cpu", "CPU", "linearized_product"),
            ("hessian_wide_resnet_cuda", "H200, earlier code", "kept_product"),
        )
        for d in (stored(name),)
    ]


def eigenvalues() -> list[str]:
    return [
        row(e["tool"], f"{e['tol']:.1e}", f"{e['seconds']:.1f}", f"{e['worst_relative_residual']:.0e}")
        for e in stored("hessian_cuda")["eigenvalues"]
    ]


def image_files() -> list[str]:
    lines = []
    for name, is_pose in (("image_files_cuda", False), ("image_files_pose_cuda", True)):
        for r in stored(name)["results"]:
            seconds = [f"{r['epoch_seconds'][where]['median']:.3f}" for where in ("host", "device")]
            ratio = "{median:.3f} [{q1:.3f}, {q3:.3f}]".format(**r["host_over_device"])
            compiled = [("no", "yes")[r["compile"]]] if is_pose else []
            lines.append(row(r["model"], *compiled, r["steps"], r["n"], *seconds, ratio))
    return lines


def augmentations() -> list[str]:
    (r,) = stored("augmentation_cuda")["results"]
    return [
        row(
            f"`{name}`",
            f"{r['alone_images_per_second'][name]['median']:.0f}",
            f"{r['epoch_seconds'][name]['median']:.3f}",
            "{median:.3f} [{q1:.3f}, {q3:.3f}]".format(**ratio),
            r["n"],
        )
        for name, ratio in r["over_none"].items()
    ]


def quantized() -> list[str]:
    results = stored("quantization_cuda")["results"]
    return [row(r["model"], r["n"], *(spread(r["over_float"][name]) for name in ("SGD", "BSAM"))) for r in results]


def many_runs() -> list[str]:
    results = stored("executors_cpu")
    return [
        row(name, results["runs"], len(r["rounds"]), *(f"{r[key]:.2f}" for key in ("start", "wall", "overhead")))
        for name, r in results["executors"].items()
    ]


TABLES = (
    step_times,
    method_costs,
    memory,
    epochs,
    transformer_epochs,
    whole_runs,
    products,
    eigenvalues,
    image_files,
    augmentations,
    quantized,
    many_runs,
)
