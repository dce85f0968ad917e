"""Compare the training of two source trees, bit for bit.

Trains every recipe at the scale smoke, and every method for two epochs on digits, with both trees on the CPU. Compares
all numbers of metrics.jsonl and probe.jsonl except times, and all tensors of the trained networks. Exits with 1 if
anything differs.

Run: python tools/compare_training.py OLD NEW [--work FOLDER] [--only NAME ...]

OLD and NEW are checkouts. Runs are stored in --work under a digest of their tree's sources: an interrupted comparison
continues, and a tree is trained again only if its sources have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIST = "import bsam, json; from bsam.lab.recipes import RECIPES; print(json.dumps([[*RECIPES], [*bsam.METHODS]]))"
TRAIN = (
    "import json, sys; from bsam.__main__ import main; sys.exit(max(main(line) for line in json.loads(sys.argv[1])))"
)
VARIANTS = {  # settings that take another path through a method
    "base-adamw": "--method base --base adamw --lr 0.001",
    "aesam-reuse": "--method aesam --set alpha=0.2",
    "bsam-2": "--method bsam --set passes=2",
    "bsam-adamw": "--method bsam --base adamw --lr 0.001",
    "bsam-adaptive": "--method bsam --set adaptive=true rho_max=0.5 rho_min=0.4",
    "bsam-floor": "--method bsam --set rho_max=0.1 rho_min=0.1 rho_min_floor=0.02",
    "bsam-probe": "--method bsam --probe 5",
    "bsam-released": "--method bsam --set start_from_min=true",
    "g-rst": "--method rst --set gamma=2.0",
    "gam-paper": "--method gam --set form=paper",
    "gsam-floor": "--method gsam --set rho=0.1 rho_floor=0.02",
    "ksam-16": "--method ksam --set k=16",
    "mesa-1": "--method mesa --set start_epoch=1",
    "saf-1": "--method saf --set start_epoch=1 epochs_back=1",
    "sam-floor": "--method sam --set rho=0.1 rho_floor=0.02",
}
DIGITS = "--data digits --epochs 2 --limit-train 512 --limit-test 256 --batch 64 --label-noise 0.2 --device cpu"


def main() -> int:
    """Train, compare and print one line per run; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--work", type=Path, default=Path("runs/compare"), metavar="FOLDER")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="recipes, or `methods`: all methods on digits (default: all)",
    )
    arguments = parser.parse_args()
    trees = [arguments.old.resolve(), arguments.new.resolve()]
    digests = [digest_of(tree) for tree in trees]
    if digests[0] == digests[1]:
        parser.error(f"{trees[0]} and {trees[1]} have the same sources")
    names = subprocess.run([sys.executable, "-c", LIST], env=environment(trees[1]), capture_output=True, check=True)
    recipes, methods = json.loads(names.stdout)
    differing = compared = 0
    for name in arguments.only or ["methods", *recipes]:
        start = time.monotonic()
        folders = [arguments.work.resolve() / digest / name for digest in digests]
        problems = train(trees, folders, name, methods)
        for run in sorted(runs_in(folders[0]) | runs_in(folders[1])):
            differences = differences_of(*(folder / run for folder in folders))
            compared += 1
            differing += bool(differences)
            print(f"{'DIFFERS' if differences else 'same   '} {name}/{run} {'; '.join(differences)}".rstrip())
        differing += bool(problems)
        print(*problems, f"{name}: {time.monotonic() - start:.0f} s", sep="\n", flush=True)
    print(f"{compared} runs compared, {differing} differ or failed")
    return 1 if differing or not compared else 0


def train(trees: list[Path], folders: list[Path], name: str, methods: list[str]) -> list[str]:
    """Train with both trees at once; return the error messages."""
    processes = []
    for tree, folder in zip(trees, folders, strict=True):
        if name == "methods":
            runs = {**{method: f"--method {method}" for method in ["sgd", *methods]}, **VARIANTS}
            lines = [["train", *f"{flags} {DIGITS}".split(), "--out", f"{folder / run}"] for run, flags in runs.items()]
        else:
            scale = [] if name == "demo" else ["--scale", "smoke"]  # the demo has a single scale
            lines = [["run", name, *scale, "--seeds", "1", "--jobs", "1", "--device", "cpu", "--out", str(folder)]]
        folder.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".log").open("w") as log:
            command = [sys.executable, "-c", TRAIN, json.dumps(lines)]
            processes.append(subprocess.Popen(command, env=environment(tree), stdout=log, stderr=log))
    problems = []
    for tree, folder, process in zip(trees, folders, processes, strict=True):
        if process.wait():
            lines = folder.with_suffix(".log").read_text().splitlines()
            errors = [line for line in lines if line.startswith("bsam: ")] or lines[-5:]
            problems += [f"FAILED  {name}: {tree} ended with {process.returncode}", *errors]
    return problems


def environment(tree: Path) -> dict[str, str]:
    """Return environment variables: import bsam from a tree, and use one thread on the CPU."""
    return {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def digest_of(tree: Path) -> str:
    """Return a digest of a tree's sources."""
    sha = hashlib.sha256()
    for file in sorted((tree / "src").rglob("*.py")):
        sha.update(str(file.relative_to(tree)).encode() + b"\0" + file.read_bytes() + b"\0")
    return sha.hexdigest()[:16]


def runs_in(folder: Path) -> set[str]:
    """Return the run directories below a folder."""
    return {str(file.parent.relative_to(folder)) for file in folder.rglob("metrics.jsonl")}


def differences_of(old: Path, new: Path) -> list[str]:
    """Return the names of numbers and tensors that differ between two runs, or that only one of them has."""
    differences = []
    old_values, new_values = values_of(old), values_of(new)
    for name in sorted(old_values.keys() | new_values.keys()):
        a, b = (values.get(name, "missing") for values in (old_values, new_values))
        if a != b:
            both = f" {a} {b}" if len(str(a)) + len(str(b)) < 60 else ""
            differences.append(name + both)
    if not any(name.startswith("network ") for name in old_values) and not (old / "diverged.json").exists():
        differences.append("no trained network")
    return differences


def values_of(run: Path) -> dict[str, Any]:
    """Return the numbers of every epoch, and type, shape and bytes of every tensor, by name."""
    values: dict[str, Any] = {}
    for file in (run / "metrics.jsonl", run / "probe.jsonl"):
        rows = file.read_text().splitlines() if file.exists() else []
        for i, row in enumerate(map(json.loads, rows)):
            values |= {f"{file.stem} {i} {key}": repr(value) for key, value in row.items() if "seconds" not in key}
    for file in run.glob("*.safetensors"):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                values[f"network {name}"] = entry["dtype"], entry["shape"], content[start + first : start + end]
    return values


if __name__ == "__main__":
    sys.exit(main())
