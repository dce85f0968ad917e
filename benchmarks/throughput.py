"""Seconds per epoch and images per second in training, with the methods interleaved in one run.

The timed epochs are those of `bsam train` (augmentation on the device, schedule, all steps) without evaluation and
checkpoints. The images are noise in the shape of CIFAR, already on the device; this does not change the time of a step.
Slow networks get shorter epochs (--steps); their seconds per epoch are those of a step times the steps of a whole one.
The first two epochs of each case, which compile, capture and warm up, are not timed; the penalties of SAF and MESA
begin in the second. The others are mid-schedule, since AE-SAM takes fewer passes early in training than late. Methods
that cannot be captured run eagerly, as in `bsam train`.

    python benchmarks/throughput.py    # on CUDA: ResNet-18, WideResNet-28-10, PyramidNet-110 in bf16
    python benchmarks/throughput.py --models resnet18 --compile
    python benchmarks/throughput.py --models resnet18 --compile --methods all --rounds 3
    python benchmarks/throughput.py --models vit-tiny --base adamw --batch 512 --compile
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import machine
from bsam.lab.config import BASE, Run, method_title
from bsam.lab.data.arrays import Dataset, Examples
from bsam.lab.models import MODELS
from bsam.lab.recipes import transformer_recipe
from bsam.lab.tasks.classification import Classification
from bsam.lab.training.graphs import CapturedSteps
from bsam.lab.training.machine import DistributedContext, side_stream
from bsam.lab.training.trainer import Trainer
from bsam.methods import METHODS
from step_time import spread

IMAGES, BATCH = 50_000, 128  # CIFAR's training images, and the paper's batch size
BASES = {  # base optimizers, with their settings in recipes
    "sgd": {},
    "adamw": {**transformer_recipe.OPTIMIZER, "warmup": 1},
}
CASES = {
    "SGD": Run("sgd", data="cifar10"),
    "SAM": Run("sam", data="cifar10"),
    "BSAM2": Run("bsam", {"passes": 2}, data="cifar10"),
    "BSAM3": Run("bsam", data="cifar10"),
    "BSAM3 in turn": Run("bsam", {"side_by_side": False}, data="cifar10"),  # not on two streams
}
DEFAULT = tuple(CASES)
# the losses of SAF and MESA are complete from the second epoch on
EARLY = {"saf": {"start_epoch": 0, "epochs_back": 1}, "mesa": {"start_epoch": 0}}
CASES["SAM ascent 0.25"] = Run("sam", {"ascent": 0.25}, data="cifar10")
CASES |= {
    method.__name__: Run(name, EARLY.get(name, {}), data="cifar10")
    for name, method in METHODS.items()
    if name not in ("sam", "bsam")
}
# Their passes have batches of different sizes. torch.compile shares its code, which is slower for batches of any size,
# with all networks of the process, so they are not timed among the others.
SIZES_DIFFER = ("SAM ascent 0.25", "ESAM", "KSAM")
STEPS = {
    "cuda": {"resnet18": 390, "wide_resnet28_10": 60, "pyramidnet110": 60},  # with --models, also others
    "cpu": {"resnet8": 4},
}  # steps per epoch, without --steps


def noise(samples: int) -> Dataset:
    """Return random images in the shape of CIFAR-10."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples, 3, 32, 32), dtype=torch.uint8, generator=generator)
    examples = Examples(x, torch.randint(0, 10, (samples,), generator=generator))
    return Dataset("noise", 10, examples, None, examples.some(min(samples, 10_000)), (0.5,) * 3, (0.25,) * 3)


def measure(
    model: str, run: Run, steps: int, rounds: int, device: torch.device, methods: Sequence[str] = DEFAULT
) -> dict[str, Any]:
    """Time these cases on one network, with the base optimizer and the batch size of ``run``."""
    base = method_title(run)
    cases = {base if CASES[name].method == BASE else name: CASES[name] for name in methods}
    data, trainings = noise(steps * run.batch), {}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    with side_stream(device):
        for name, case in cases.items():
            timed = replace(
                case,
                model=model,
                batch=run.batch,
                epochs=rounds + 3,  # two before and one after those that are timed
                precision=run.precision,
                compile=run.compile,
                capture=run.capture,
                **{"base": run.base, **BASES[run.base]},
            )
            trainings[name] = Trainer(timed, Classification(timed, device, data=data), DistributedContext(device))
        for number in range(rounds + 2):
            for name, training in trainings.items():
                epoch = training.train_epoch(number)
                if number > 1:
                    seconds[name].append(epoch["seconds"] / steps)
                print(f"  {model} {name} epoch {number}: {epoch['seconds']:.2f} s", file=sys.stderr, flush=True)
    steps_per_epoch = IMAGES // run.batch
    return {
        "model": model,
        "parameters": sum(p.numel() for p in trainings[base].network.parameters()),
        "cases": {name: {"method": case.method, "arguments": case.arguments} for name, case in cases.items()},
        "base": run.base,
        "batch": run.batch,
        "precision": run.precision,
        "compile": trainings[base].compiled,
        "captured": {name: isinstance(training.take_step, CapturedSteps) for name, training in trainings.items()},
        "steps_timed": steps,
        "n": rounds,
        "epoch_seconds": {name: spread([steps_per_epoch * s for s in values]) for name, values in seconds.items()},
        "images_per_second": {name: run.batch / statistics.median(values) for name, values in seconds.items()},
        "over_base": {
            name: spread([a / b for a, b in zip(values, seconds[base], strict=True)])
            for name, values in seconds.items()
        },
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def table(result: dict[str, Any]) -> str:
    """Format a result as a table."""
    lines = [
        "{model}: {parameters:,} parameters, {base}, batch {batch}, {precision}, compile {compile}, ".format(**result)
        + "{steps_timed} steps per epoch, n = {n}".format(**result)
    ]
    heading = f"s per epoch of {IMAGES // result['batch']} steps"
    lines.append(f"  {'':<17}{heading:<28}{'images/s':>10}   over {result['base']}")
    for name, s in result["epoch_seconds"].items():
        epoch = f"{s['median']:.3f} [{s['q1']:.3f}, {s['q3']:.3f}]"
        lines.append(
            f"  {name:<17}{epoch:<28}{result['images_per_second'][name]:>10.0f}   "
            f"{result['over_base'][name]['median']:.3f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_arguments(parser, "throughput")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=[name for name, entry in MODELS.items() if entry.backbone is None],
        metavar="MODEL",
        help=f"default: {', '.join(STEPS['cuda'])} on CUDA, resnet8 on the CPU",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=[*CASES, "all"],
        default=list(DEFAULT),
        metavar="METHOD",
        help=f"some of: {', '.join(CASES)}; or all (default: {', '.join(DEFAULT)}); the first is always timed",
    )
    parser.add_argument("--base", choices=[*BASES], default="sgd", help="the base optimizer (default: sgd)")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"samples per step (default: {BATCH})")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: bf16 on CUDA, fp32 on the CPU")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--plain", action="store_true", help="use no CUDA graphs")
    parser.add_argument("--rounds", type=int, default=5, help="timed epochs per case (default 5)")
    parser.add_argument("--steps", type=int, help="steps per epoch (default: depends on the model)")
    args = parser.parse_args(arguments)
    device = machine.pick_device(parser, args.device)
    precision = args.precision or ("bf16" if device.type == "cuda" else "fp32")
    given = {"base": args.base, "batch": args.batch, "precision": precision, "compile": args.compile}
    run = Run("base", **given, capture=not args.plain)
    methods = list(CASES) if "all" in args.methods else list(dict.fromkeys(["SGD", *args.methods]))
    parts = [[name for name in methods if name not in SIZES_DIFFER]]
    if len(parts[0]) < len(methods):
        parts.append(["SGD", *(name for name in methods if name in SIZES_DIFFER)])
    results = []
    for model in args.models or STEPS[device.type]:
        steps = args.steps or STEPS[device.type].get(model, 60)
        for names in parts:
            results.append(measure(model, run, steps, args.rounds, device, names))
            print(table(results[-1]) + "\n", flush=True)
            torch._dynamo.reset()
    content = {"benchmark": "throughput", **machine.description(device), "results": results}
    print(f"written to {machine.write(content, args.out, 'throughput')}", file=sys.stderr)


if __name__ == "__main__":
    main()
