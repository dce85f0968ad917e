"""``bsam train``: train one network in a run directory."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...common.errors import BsamError, BsamValueError
from ..recipes.columns import measured_on
from ..recipes.run_settings import check_start
from ..report.classes import class_report
from ..report.epochs import ConsoleLogger, epoch_numbers
from ..report.outcome import failure
from ..running.downloads import download_to
from ..running.signals import terminable
from ..training.config import Run
from ..training.distributed import distributed_context
from ..training.files import LOCK
from ..training.loop import fit
from ..training.run_dir import RunDir, run_dir_name
from .run_flags import CACHE_HELP, DEVICE_HELP, add_checkpoint_flag, add_run_flags, run_of


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "train",
        help="train one network with any method; an interrupted run continues",
        description="Train one network. Writes config.json (the settings), metrics.jsonl (one line per epoch), "
        "environment.json, checkpoint.pt, tensorboard/ if TensorBoard is installed and, at the end, model.safetensors. "
        "Classification adds classes.md (the accuracy of each class) and, with matplotlib, confusion.png and "
        "mistakes.png. If the run is interrupted (Ctrl-C, SIGTERM, a crash), the same command continues from the last "
        "checkpoint, with the result of an uninterrupted run. With torchrun, the processes share each batch.",
    )
    groups = add_run_flags(command)
    groups["Data"].add_argument(
        "--data-dir", type=Path, help="folder with the files of the data set (and of --weights)", metavar="FOLDER"
    )
    groups["Data"].add_argument("--cache-dir", type=Path, help=CACHE_HELP, metavar="FOLDER")
    groups["Data"].add_argument(
        "--download",
        action="store_true",
        help="first download CIFAR or Fashion-MNIST into --data-dir, if it is not there yet",
    )
    name = "MODEL-DATA-METHOD-ARGUMENTS-seedSEED-DIGEST"
    groups["Output"].add_argument(
        "--out", type=Path, help=f"folder of the run (default: runs/{name})", metavar="FOLDER"
    )
    groups["Precision and speed"].add_argument("--device", default="auto", help=DEVICE_HELP, metavar="NAME")
    add_checkpoint_flag(groups["Output"])
    command.set_defaults(run=_train, saved_items="epochs", needs={"rich": "train", "safetensors": "train"})


def _train(arguments: argparse.Namespace) -> None:
    run = run_of(arguments)
    folder = arguments.out or Path("runs") / run_dir_name(run)
    arguments.out = folder
    with terminable(), distributed_context(arguments.device) as context:
        say = _say if context.is_main else lambda line: None  # only the first process of torchrun prints
        _check_epochs(run, RunDir(folder))
        state = RunDir(folder).state(run)
        if state.finished:
            say(f"The run in {folder} is finished.")
        else:
            if not RunDir(folder).has_checkpoint():
                check_start(run, arguments.data_dir)
            if arguments.download:
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    download_to(run.data, arguments.data_dir)
                context.barrier()
            logger = ConsoleLogger(run, folder, say)
            fit(
                run,
                folder,
                data_dir=arguments.data_dir,
                cache_dir=arguments.cache_dir,
                device=arguments.device,
                checkpoint_every=arguments.checkpoint_every,
                at_start=logger.start,
                on_epoch=logger.epoch,
                report=class_report,
                on_message=say,
            )
        if context.is_main:
            _summarize(run, RunDir(folder))


def _check_epochs(run: Run, run_dir: RunDir) -> None:
    """Raise if the directory holds the same run, finished after fewer epochs: its schedule has ended."""
    try:
        finished = run_dir.finished_run()
    except BsamError:
        return  # empty, or unfinished
    if finished.epochs < run.epochs and replace(finished, epochs=run.epochs) == run and run.weight_bits is None:
        flags = ""
        if run.weights is not None:  # with --init, these defaults differ
            flags = f" --lr {run.lr:g} --weight-decay {run.weight_decay:g} --label-smoothing {run.label_smoothing:g}"
        raise BsamValueError(
            f"the run in {run_dir.path} is finished (epochs: {finished.epochs}). To continue from its weights with a "
            f"new schedule, use --init {run_dir.path} --epochs {run.epochs - finished.epochs}{flags} and another --out"
            + (", without --weights" if flags else "")
        )


def _summarize(run: Run, run_dir: RunDir) -> None:
    _say(f"After epoch {run.epochs}: {'  '.join(epoch_numbers(run, run_dir.last_metrics()))}")
    if (top := run_dir.top_eigenvalue()) is not None:
        _say(f"Largest eigenvalue of the Hessian ({measured_on(run.settings())}): {top:.4g}")
    files = (file for file in run_dir.path.iterdir() if file.name != LOCK and file.suffix != ".draft")
    names = sorted(f"{file.name}/" if file.is_dir() else file.name for file in files)
    _say(f"Written to {run_dir.path}: {', '.join(names)}")
    if (sentence := failure(run, run_dir)) is not None:
        _say(sentence)


def _say(line: str) -> None:
    print(line, flush=True)
