"""Seconds per training step of a quantized network relative to the float network, interleaved in one run.

Epochs of `bsam train` are timed, as in throughput.py; quantized networks have 4 bits and learned scales. The first
epoch of each case, which compiles, captures and warms up, is not timed.

    python benchmarks/quantization.py    # on CUDA: ResNet-18 and MobileNetV1 in bf16, with torch.compile
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

import machine
from bsam.lab.config import Run
from bsam.lab.models import MODELS
from bsam.lab.tasks.classification import Classification
from bsam.lab.training.machine import DistributedContext, side_stream
from bsam.lab.training.trainer import Trainer
from step_time import spread
from throughput import BATCH, noise

METHODS = {"SGD": "sgd", "BSAM": "bsam"}
DEFAULT = {"cuda": ("resnet18", "mobilenet_v1"), "cpu": ("resnet8",)}


def measure(model: str, methods: list[str], steps: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the seconds per step of each method with the float and the quantized network, and their ratios."""
    on_gpu = device.type == "cuda"
    common: dict[str, Any] = {"precision": "bf16" if on_gpu else "fp32", "compile": on_gpu}
    common |= {"model": model, "data": "cifar10", "batch": BATCH, "epochs": rounds + 1}
    data, trainings = noise(steps * BATCH), {}
    with side_stream(device):
        for name in methods:
            for kind, bits in (("float", None), ("W4A4", 4)):
                run = Run.of(METHODS[name], weight_bits=bits, **common)
                task = Classification(run, device, data=data)
                trainings[name, kind] = Trainer(run, task, DistributedContext(device))
        seconds: dict[tuple[str, str], list[float]] = {case: [] for case in trainings}
        for number in range(rounds + 1):
            for case, training in trainings.items():
                elapsed = training.train_epoch(number)["seconds"]
                if number:
                    seconds[case].append(elapsed / steps)
                print(f"  {model} {' '.join(case)} epoch {number}: {elapsed:.2f} s", file=sys.stderr, flush=True)
    pairs = {name: zip(seconds[name, "W4A4"], seconds[name, "float"], strict=True) for name in methods}
    return {
        "model": model,
        **{name: common[name] for name in ("batch", "precision", "compile")},
        "captured": on_gpu,
        "steps_timed": steps,
        "n": rounds,
        "step_seconds": {" ".join(case): spread(values) for case, values in seconds.items()},
        "over_float": {name: spread([a / b for a, b in pair]) for name, pair in pairs.items()},
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_arguments(parser, "quantization")
    names = [name for name, entry in MODELS.items() if entry.backbone is None]
    text = f"default: {' and '.join(DEFAULT['cuda'])} on CUDA, resnet8 on the CPU"
    parser.add_argument("--models", nargs="+", choices=names, metavar="MODEL", help=text)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=5, help="timed epochs per case (default 5)")
    parser.add_argument("--steps", type=int, default=100, help="steps per epoch (default 100)")
    args = parser.parse_args(arguments)
    device = machine.pick_device(parser, args.device)
    results = []
    for model in args.models or DEFAULT[device.type]:
        results.append(result := measure(model, args.methods, args.steps, args.rounds, device))
        for name, ratio in result["over_float"].items():
            print(f"{model} {name}: {ratio['median']:.3f} [{ratio['q1']:.3f}, {ratio['q3']:.3f}] times the float step")
        torch._dynamo.reset()
    content = {"benchmark": "quantization", **machine.description(device), "results": results}
    print(f"written to {machine.write(content, args.out, 'quantization')}", file=sys.stderr)


if __name__ == "__main__":
    main()
