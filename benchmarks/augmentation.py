"""Images per second of each augmentation alone, and seconds per epoch of a training with it.

Images are noise, mapped from a file as those of `bsam train` are. A timed epoch has all steps with the base optimizer
only, whose short steps leave the least time for augmentation; evaluation and checkpoints are left out. The epochs of
one network alternate between the augmentations; the first epoch of each, which captures or warms up, is not timed.

    python benchmarks/augmentation.py                        # on CUDA: ResNet-50, images of 224 pixels; a minute
    python benchmarks/augmentation.py --device cpu --size 32 --batch 16 --steps 2 --rounds 1
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine
from bsam.lab.config import FINE_TUNING, Run
from bsam.lab.data.arrays import Dataset, Examples
from bsam.lab.data.images import Resize
from bsam.lab.tasks.classification import Classification
from bsam.lab.training.machine import DistributedContext, side_stream
from bsam.lab.training.trainer import Trainer
from step_time import spread

RESIZED = "resized-crop-flip"
AUGMENTATIONS = ("none", "crop-flip", RESIZED, "timm:aa=rand-m9-mstd0.5-inc1")
CLASSES = 10


def noise(folder: Path, n: int, size: int) -> dict[int, Dataset]:
    """Return data sets with training images of the network's input size, and of the size for random crops, by side."""
    random = np.random.default_rng(0)
    data = {}
    labels = torch.arange(n) % CLASSES
    for side in (size, Resize(size, crop=0.875).for_random_crops.size):
        path = folder / f"{side}.npy"
        np.save(path, random.integers(0, 256, (n, side, side, 3), np.uint8))
        images = torch.from_numpy(np.load(path, mmap_mode="c")).permute(0, 3, 1, 2)
        test = Examples(images[:CLASSES, :, :size, :size], labels[:CLASSES])
        data[side] = Dataset("noise", CLASSES, Examples(images, labels), None, test, (0.5,), (0.25,), digest="noise")
    return data


def measure(run: Run, datasets: dict[int, Dataset], rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the numbers of each augmentation, and the ratios to training without one."""
    small, large = datasets[min(datasets)], datasets[max(datasets)]
    alone: dict[str, list[float]] = {name: [] for name in AUGMENTATIONS}
    seconds: dict[str, list[float]] = {name: [] for name in AUGMENTATIONS}
    with side_stream(device):
        tasks = {
            name: Classification(replace(run, augment=name), device, data=large if name == RESIZED else small)
            for name in AUGMENTATIONS
        }
        training = Trainer(run, tasks["none"], DistributedContext(device))
        for number in range(rounds + 1):
            for name, task in tasks.items():
                training.task = task
                epoch = training.train_epoch(number)["seconds"]
                rate = images_per_second(training, run.batch)
                if number:
                    seconds[name].append(epoch)
                    alone[name].append(rate)
                print(f"  {name} epoch {number}: {epoch:.3f} s, alone {rate:.0f} images/s", file=sys.stderr, flush=True)
    ratios = {
        name: [one / other for one, other in zip(values, seconds["none"], strict=True)]
        for name, values in seconds.items()
    }
    return {
        "model": run.model,
        "batch": run.batch,
        "precision": run.precision,
        "captured": training.captured,
        "steps": training.steps,
        "n": rounds,
        "alone_images_per_second": {name: spread(values) for name, values in alone.items()},
        "epoch_seconds": {name: spread(values) for name, values in seconds.items()},
        "over_none": {name: spread(values) for name, values in ratios.items()},
    }


def images_per_second(training: Trainer, batch: int) -> float:
    """Return the images per second of one epoch of batches that nothing is trained on."""
    indices = torch.arange(training.steps * batch, device=training.task.device).view(training.steps, batch)
    start = time.perf_counter()
    for x, *_ in training.task.batches(indices):
        last = x
    if last.device.type == "cuda":
        torch.cuda.synchronize()
    return indices.numel() / (time.perf_counter() - start)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_arguments(parser, "augmentation")
    parser.add_argument("--model", help="default: resnet50 on CUDA, otherwise resnet8")
    parser.add_argument("--size", type=int, help="side of the inputs (default: 224 on CUDA, otherwise 64)")
    parser.add_argument("--batch", type=int, default=128, help="samples per step (default 128)")
    parser.add_argument("--steps", type=int, default=16, help="steps per epoch (default 16)")
    parser.add_argument("--rounds", type=int, default=4, help="timed epochs per augmentation (default 4)")
    args = parser.parse_args(arguments)
    device = machine.pick_device(parser, args.device)
    on_gpu = device.type == "cuda"
    settings = {**FINE_TUNING.values, "batch": args.batch, "epochs": args.rounds + 1}
    run = Run.of(
        "base",
        model=args.model or ("resnet50" if on_gpu else "resnet8"),
        image_size=args.size or (224 if on_gpu else 64),
        precision="bf16" if on_gpu else "fp32",
        **settings,
    )
    with tempfile.TemporaryDirectory() as folder:
        datasets = noise(Path(folder), args.steps * args.batch, run.image_size or 0)
        result = measure(run, datasets, args.rounds, device)
    for name in AUGMENTATIONS:
        ratio = result["over_none"][name]
        print(
            f"{name}: alone {result['alone_images_per_second'][name]['median']:.0f} images/s; an epoch of "
            f"{result['steps']} steps {result['epoch_seconds'][name]['median']:.3f} s, {ratio['median']:.3f} "
            f"[{ratio['q1']:.3f}, {ratio['q3']:.3f}] times that without augmentation, n = {args.rounds}",
            flush=True,
        )
    content = {"benchmark": "augmentation", **machine.description(device), "results": [result]}
    print(f"written to {machine.write(content, args.out, 'augmentation')}", file=sys.stderr)


if __name__ == "__main__":
    main()
