"""Seconds per epoch with images read from the cache on the host, compared with images on the device.

The time to build and to open the cache is measured too. A timed epoch is that of `bsam train` (reading, augmentation,
all steps) without evaluation and checkpoints, with the base optimizer only, whose short steps leave the least time for
reading. The two trainings alternate. Their first epochs, which compile, capture and warm up, are not timed.

    python benchmarks/image_files.py --data-dir data/pets    # on CUDA: ResNet-50 and EfficientNet-Lite0
    python benchmarks/image_files.py --data lspet --data-dir data/lspet --models simcc_resnet50 --batch 64
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import machine
from bsam.lab.config import FINE_TUNING, Run
from bsam.lab.data import dataset_entry
from bsam.lab.data.arrays import Dataset
from bsam.lab.data.images import Resize, load_images
from bsam.lab.data.persons import PoseData, load_persons
from bsam.lab.models import input_config, model_entry
from bsam.lab.tasks import Task
from bsam.lab.tasks.classification import Classification
from bsam.lab.tasks.pose import Pose
from bsam.lab.training.machine import DistributedContext, side_stream
from bsam.lab.training.trainer import Trainer
from step_time import spread

MODELS = {"cuda": ["resnet50", "timm:tf_efficientnet_lite0"], "cpu": ["timm:test_resnet"]}


def loaded(run: Run, folder: Path, cache: Path) -> tuple[float, Dataset | PoseData]:
    """Return the seconds to decode the data or to open its cache, and the data."""
    start, entry, data = time.perf_counter(), dataset_entry(run.data), None
    if entry.task == "pose":
        data, _ = load_persons(entry.person_files(folder), model_entry(run.model).images, cache_dir=cache)
    else:
        config = input_config(run.model)
        assert config is not None, f"{run.model} has no image size"
        resize = Resize(config.size, config.crop, config.interpolation)
        files = entry.image_files(folder)
        data, _ = load_images(files, resize, mean=config.mean, std=config.std, cache_dir=cache, skip_corrupt=True)
    return time.perf_counter() - start, data


def task_of(run: Run, data: Dataset | PoseData, device: torch.device, from_host: bool) -> Task:
    """Return the task with its images in the mapped file on the host, or on the device."""
    if isinstance(data, PoseData):
        # persons without file names are moved to the device
        data = data if from_host else replace(data, train=replace(data.train, images=()))
        return Pose(run, device, data=data)
    return Classification(run, device, data=data if from_host else replace(data, digest=None))


def measure(run: Run, data: Dataset | PoseData, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the seconds per epoch with images on the host and on the device."""
    seconds: dict[str, list[float]] = {"host": [], "device": []}
    with side_stream(device):
        trainings = {
            name: Trainer(run, task_of(run, data, device, from_host=name == "host"), DistributedContext(device))
            for name in seconds
        }
        for number in range(rounds + 1):
            for name, training in trainings.items():
                epoch = training.train_epoch(number)
                if number:
                    seconds[name].append(epoch["seconds"])
                print(f"  {run.model} {name} epoch {number}: {epoch['seconds']:.3f} s", file=sys.stderr, flush=True)
    ratios = [a / b for a, b in zip(seconds["host"], seconds["device"], strict=True)]
    return {
        "model": run.model,
        "batch": run.batch,
        "precision": run.precision,
        "compile": trainings["host"].compiled,
        "captured": trainings["host"].captured,
        "steps": trainings["host"].steps,
        "n": rounds,
        "epoch_seconds": {name: spread(values) for name, values in seconds.items()},
        "host_over_device": spread(ratios),
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_arguments(parser, "image_files")
    parser.add_argument("--data", default="oxford_pet", help="a name from `bsam list data`, or folder:PATH")
    parser.add_argument("--data-dir", type=Path, help="folder with the data files")
    parser.add_argument(
        "--models", nargs="+", metavar="MODEL", help="default on CUDA: ResNet-50 and EfficientNet-Lite0"
    )
    parser.add_argument("--batch", type=int, default=128, help="samples per step (default 128)")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--rounds", type=int, default=5, help="timed epochs per case (default 5)")
    args = parser.parse_args(arguments)
    device = machine.pick_device(parser, args.device)
    results = []
    for model in args.models or MODELS[device.type]:
        task = dataset_entry(args.data).task
        usual = {} if task == "pose" else FINE_TUNING.values
        run = Run.of("base", task=task, model=model, data=args.data, compile=args.compile, **usual)
        precision = "bf16" if device.type == "cuda" else "fp32"
        run = replace(run, batch=args.batch, epochs=args.rounds + 1, precision=precision)
        with tempfile.TemporaryDirectory() as cache:
            build, _ = loaded(run, args.data_dir, Path(cache))
            opened, data = loaded(run, args.data_dir, Path(cache))
            result = measure(run, data, args.rounds, device)
        parts = [data.train, data.test, *([data.validation] if isinstance(data, Dataset) else [])]
        images = sum(len(part) for part in parts if part is not None)
        results.append({**result, "images": images, "build_seconds": build, "open_seconds": opened})
        host, on_device = (result["epoch_seconds"][name]["median"] for name in ("host", "device"))
        ratio = result["host_over_device"]
        print(
            f"{model}, batch {args.batch}, {result['steps']} steps per epoch, n = {args.rounds}: "
            f"from the host {host:.3f} s, on the device {on_device:.3f} s, ratio {ratio['median']:.3f} "
            f"[{ratio['q1']:.3f}, {ratio['q3']:.3f}]\n"
            f"  cache of {images} images: built in {build:.1f} s, opened in {opened:.1f} s",
            flush=True,
        )
    content = {"benchmark": "image_files", **machine.description(device), "results": results}
    print(f"written to {machine.write(content, args.out, 'image_files')}", file=sys.stderr)


if __name__ == "__main__":
    main()
