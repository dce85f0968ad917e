"""Duration of a whole training run divided by that of its training epochs.

A run of `bsam train` also evaluates the network and writes metrics after every epoch, and writes a checkpoint every
60 s and at the end. The images are noise in the shape of CIFAR-10, with 10,000 test images. The start-up, up to the end
of the first epoch, builds, compiles and captures; the duration of 200 epochs counts it once. That duration is computed
from the measured parts unless --epochs is 200. Importing this script is not counted.

    python benchmarks/whole_run.py                  # on CUDA: SGD, ResNet-18, bf16, compiled, captured
    python benchmarks/whole_run.py --epochs 200     # no extrapolation
    python benchmarks/whole_run.py --method bsam    # a method with its default arguments
    python benchmarks/whole_run.py --evaluation     # also the time of an evaluation, by batch size, eager and compiled
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import machine
from bsam.lab.config import Run
from bsam.lab.models import MODELS
from bsam.lab.tasks import TASKS
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Machine, RunCallbacks, fit
from bsam.lab.training.machine import CHECKPOINT_EVERY, side_stream
from bsam.lab.training.run_dir import RunWriter
from bsam.lab.training.trainer import Trainer, as_trained
from bsam.methods import METHODS
from step_time import spread
from throughput import BATCH, noise

LONG = 200  # epochs of the paper
STEPS = {"cuda": 390, "cpu": 4}
SIZES = (250, 500, 1000, 2500, 5000, 10_000)  # batches of --evaluation
REPEATS = 5  # evaluations per batch size


class Clock:
    """Seconds of each evaluation and each write of a run, with the moments when epochs end."""

    def __init__(self) -> None:
        self.evaluation: list[float] = []
        self.saves: list[tuple[float, bool]] = []  # seconds, and whether a checkpoint was written
        self.ends: list[float] = []
        self.trainer: Trainer | None = None

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Time the methods of all runs in the block."""
        evaluate, save = Trainer.evaluate, RunWriter.save

        @functools.wraps(evaluate)
        def timed_evaluate(trainer: Trainer) -> dict[str, float]:
            begin = time.perf_counter()
            metrics = evaluate(trainer)  # waits for the device
            self.evaluation.append(time.perf_counter() - begin)
            self.trainer = trainer
            return metrics

        @functools.wraps(save)
        def timed_save(out: RunWriter, *given: Any, **named: Any) -> None:
            before, begin = out.checkpoint, time.perf_counter()
            save(out, *given, **named)
            self.saves.append((time.perf_counter() - begin, out.checkpoint != before))

        Trainer.evaluate, RunWriter.save = timed_evaluate, timed_save  # type: ignore[method-assign]
        try:
            yield
        finally:
            Trainer.evaluate, RunWriter.save = evaluate, save  # type: ignore[method-assign]


def measure(run: Run, steps: int, folder: Path, device: torch.device, every: float, evaluation: bool) -> dict[str, Any]:
    """Train a run, and return where its time goes."""
    data, clock = noise(steps * BATCH), Clock()

    class Noise(Classification):
        def __init__(self, run: Any, device: torch.device) -> None:
            super().__init__(run, device, data=data)

    def on_epoch(done: int, metrics: Any) -> None:
        clock.ends.append(time.perf_counter())
        print(f"  epoch {done}: {metrics['seconds']:.2f} s", file=sys.stderr, flush=True)

    callbacks = RunCallbacks(on_epoch=on_epoch)
    with clock.timing(), patch.dict(TASKS, classification=Noise):
        begin = time.perf_counter()
        result = fit(run, folder, Machine(device.type, checkpoint_every=every), callbacks=callbacks)
        end = time.perf_counter()
    trainer = clock.trainer
    assert trainer is not None
    training = [epoch.metrics["seconds"] for epoch in result.epochs]
    steady = {"whole": clock.ends[-1] - clock.ends[0], "training": sum(training[1:])}
    steady |= {"evaluation": sum(clock.evaluation[1:]), "saving": sum(seconds for seconds, _ in clock.saves[1:])}
    steady["other"] = 2 * steady["whole"] - sum(steady.values())
    metrics = [seconds for seconds, with_checkpoint in clock.saves if not with_checkpoint]
    checkpoints = [seconds for seconds, with_checkpoint in clock.saves if with_checkpoint]
    measured = {
        "model": run.model,
        "method": run.method,
        "batch": BATCH,
        "steps": steps,
        "precision": run.precision,
        "compile": trainer.compiled,
        "captured": trainer.captured,
        "eval_samples": trainer.task.eval_samples,  # type: ignore[attr-defined]
        "checkpoint_every": every,
        "n": run.epochs,
        "start_seconds": clock.ends[0] - begin,
        "first_epoch_seconds": training[0],
        "first_evaluation_seconds": clock.evaluation[0],
        "end_seconds": end - clock.ends[-1],
        "training_seconds": spread(training[1:]),
        "evaluation_seconds": spread(clock.evaluation[1:]),
        "metrics_seconds": spread(metrics) if metrics else None,
        "checkpoint_seconds": spread(checkpoints),
        "after_the_first_epoch": steady,
        "checkpoints": len(checkpoints),
        "ratio": (end - begin) / sum(training),
        "ratio_without_start": steady["whole"] / steady["training"],
    }
    measured["ratio_of_200_epochs"] = long_ratio(measured)
    if evaluation:
        measured["evaluations"] = evaluations(trainer, device)
    return measured


def long_ratio(measured: dict[str, Any]) -> float:
    """Return the duration of a run of 200 epochs divided by its training epochs, start-up included."""
    if measured["n"] == LONG:
        return float(measured["ratio"])
    after, metrics = measured["after_the_first_epoch"], measured["metrics_seconds"]
    epochs, per_metrics = measured["n"] - 1, 0.0 if metrics is None else metrics["median"]
    per_epoch = (after["training"] + after["evaluation"] + after["other"]) / epochs + per_metrics
    whole = measured["start_seconds"] + (LONG - 1) * per_epoch + measured["end_seconds"]
    every = measured["checkpoint_every"]
    checkpoints = LONG if not every else min(LONG, 1 + whole // every)  # the last epoch has one
    whole += checkpoints * (measured["checkpoint_seconds"]["median"] - per_metrics)
    return whole / (measured["first_epoch_seconds"] + (LONG - 1) * after["training"] / epochs)


def evaluations(trainer: Trainer, device: torch.device) -> list[dict[str, Any]]:
    """Time the evaluation of the trained network, by batch size; compiled with the default batch size only."""
    task, rows = trainer.task, []
    assert isinstance(task, Classification)
    default = task._eval_batch_size
    networks = {"eager": trainer.network}
    if trainer.compiled:
        networks["compiled"] = torch.compile(trainer.network, dynamic=False)  # type: ignore[assignment]
    with side_stream(device):
        for way, network in networks.items():
            for size in SIZES if way == "eager" else (default,):
                task._eval_batch_size, seconds = size, []
                for _ in range(REPEATS + 1):
                    begin = time.perf_counter()
                    with as_trained(trainer.run, device):
                        task.evaluate(network.eval())
                    seconds.append(time.perf_counter() - begin)
                row = {"way": way, "batch": size, "first": seconds[0], "seconds": statistics.median(seconds[1:])}
                rows.append(row)
    task._eval_batch_size = default
    return rows


def table(result: dict[str, Any]) -> str:
    """Format the result."""
    after, epochs = result["after_the_first_epoch"], result["n"] - 1
    lines = [
        "{model}, {method}: {n} epochs of {steps} steps, batch {batch}, {precision}, ".format(**result)
        + "compile {compile}, captured {captured}, {eval_samples} test images".format(**result),
        f"  start-up, up to the end of the first epoch  {result['start_seconds']:8.2f} s "
        f"(training {result['first_epoch_seconds']:.2f}, evaluation {result['first_evaluation_seconds']:.2f})",
    ]
    for name in ("training", "evaluation", "saving", "other", "whole"):
        seconds, share = after[name], after[name] / after["training"]
        lines.append(
            f"  epochs after it: {name:<27}{seconds:8.2f} s, {seconds / epochs:.4f} per epoch, {share:.3f} of training"
        )
    checkpoint, metrics = result["checkpoint_seconds"]["median"], result["metrics_seconds"]
    lines += [
        f"  end, after the last epoch                   {result['end_seconds']:8.2f} s",
        f"  writing a checkpoint and metrics            {checkpoint:8.3f} s, {result['checkpoints']} times, at least "
        f"{result['checkpoint_every']:g} s apart",
        *([] if metrics is None else [f"  writing metrics only                        {metrics['median']:8.3f} s"]),
        f"  whole / training, this run                  {result['ratio']:8.3f}",
        f"  whole / training, without start-up and end  {result['ratio_without_start']:8.3f}",
        f"  whole / training, {LONG} epochs                {result['ratio_of_200_epochs']:8.3f}"
        + (" (extrapolated)" if result["n"] != LONG else ""),
    ]
    for row in result.get("evaluations", ()):
        lines.append("  evaluation, {way}, batch {batch}: {seconds:.4f} s, the first {first:.2f} s".format(**row))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_arguments(parser, "whole_run")
    models = [name for name, entry in MODELS.items() if entry.backbone is None]
    parser.add_argument(
        "--model", choices=models, metavar="MODEL", help="default: resnet18 on CUDA, resnet8 on the CPU"
    )
    parser.add_argument("--method", choices=["sgd", *METHODS], default="sgd", metavar="METHOD", help="default: sgd")
    parser.add_argument("--epochs", type=int, default=20, help="number of epochs, at least 2 (default 20)")
    parser.add_argument("--steps", type=int, help="steps per epoch (default: 390 on CUDA, 4 on the CPU)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: bf16 on CUDA, fp32 on the CPU")
    parser.add_argument("--plain", action="store_true", help="use neither torch.compile nor CUDA graphs")
    parser.add_argument(
        "--checkpoint-every",
        type=float,
        default=CHECKPOINT_EVERY,
        help=f"as for bsam train (default {CHECKPOINT_EVERY:g})",
    )
    parser.add_argument("--evaluation", action="store_true", help="also time evaluations with other batch sizes")
    parser.add_argument(
        "--folder", type=Path, help="where to make a temporary folder for the run: the disk matters (default: /tmp)"
    )
    args = parser.parse_args(arguments)
    if args.epochs < 2:
        parser.error("--epochs must be at least 2: the first epoch is the start-up")
    device = machine.pick_device(parser, args.device)
    on_cuda = device.type == "cuda"
    run = Run(
        args.method,
        model=args.model or ("resnet18" if on_cuda else "resnet8"),
        data="cifar10",
        batch=BATCH,
        epochs=args.epochs,
        precision=args.precision or ("bf16" if on_cuda else "fp32"),
        compile=on_cuda and not args.plain,
        capture=not args.plain,
    )
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        steps = args.steps or STEPS[device.type]
        result = measure(run, steps, Path(folder) / "run", device, args.checkpoint_every, args.evaluation)
    print(table(result))
    content = {"benchmark": "whole_run", **machine.description(device), "result": result}
    print(f"written to {machine.write(content, args.out, 'whole_run')}", file=sys.stderr)


if __name__ == "__main__":
    main()
