"""``bsam train``: one run, kept in a folder."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import BsamError, BsamRuntimeError
from ..report.epochs import ConsoleLogger, epoch_numbers
from ..training.config import Run
from ..training.files import fits, read_json
from ..training.folder import ANEW, NETWORK, last_metrics, read_run, read_weights
from ..training.lock import LOCK
from ..training.loop import fit
from ..training.result import LossSurface
from ..training.team import team
from .downloads import download_to
from .run_flags import add_run_flags, run_of
from .signals import terminable


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "train",
        help="train one network, by any method, into a folder that can be gone on from",
        description="Train one network. The folder gets config.json (the settings), metrics.jsonl (a line per epoch), tensorboard/, environment.json, "
        "checkpoints and, at the end, model.safetensors. Interrupted, by Ctrl-C, SIGTERM or worse, the same command "
        "goes on after the last finished epoch, and "
        "ends as it would have ended. Started by torchrun, the processes share each batch. In what follows, None is a "
        "flag that is not given.",
    )
    add_run_flags(command)
    command.add_argument(
        "--data-dir", type=Path, help="folder with the files of the data set; digits needs none", metavar="FOLDER"
    )
    command.add_argument(
        "--download",
        action="store_true",
        help="get the data set from its authors into --data-dir first, unless it is there",
    )
    command.add_argument(
        "--out", type=Path, help="folder of the run (default: runs/METHOD-ARGUMENTS-MODEL-DATA-sSEED)", metavar="FOLDER"
    )
    command.add_argument(
        "--device",
        default="auto",
        help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one (default: auto)",
        metavar="NAME",
    )
    command.set_defaults(run=_train, kept="epochs")


def _train(arguments: argparse.Namespace) -> None:
    run = run_of(arguments)
    arguments.out = arguments.out or Path("runs") / default_name(run)
    folder, device = arguments.out, None if arguments.device == "auto" else arguments.device
    with terminable(), team(device) as processes:
        say = _say if processes.writes else _say_nothing
        if is_finished(folder, run, say):
            say(f"The run in {folder} is finished.")
        else:
            if arguments.download:
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    download_to(run.data, arguments.data_dir)
                processes.wait()
            narrator = ConsoleLogger(run, folder, say)
            fit(
                run,
                folder,
                data_dir=arguments.data_dir,
                device=device,
                at_start=narrator.start,
                each_epoch=narrator.epoch,
                tell=say,
            )
        if processes.writes:
            _conclude(run, folder)


def default_name(run: Run) -> str:
    """Of a run's folder, unless it is given.

    Example:
        >>> default_name(Run("bsam", {"passes": 2}, seed=3))
        'bsam-passes2-digits_net-digits-s3'
    """
    own = (re.sub(r"[^\w.]+", "_", f"{name}{value}") for name, value in run.arguments.items())
    return "-".join([run.method, *own, run.model, run.data, f"s{run.seed}"])


def is_finished(folder: Path, run: Run, say: Callable[[str], None]) -> bool:
    """Whether a folder holds exactly this run, with nothing left to do; damaged results, which are, are named."""
    if not (folder / NETWORK).exists():
        return False
    if read_run(folder).settings() != json.loads(json.dumps(run.settings())):
        return False
    try:
        last_metrics(folder)
        read_weights(folder)
        _top_eigenvalue(folder)
    except BsamError as error:
        say(f"{error}. Going on with the run.")
        return False
    return True


def _top_eigenvalue(folder: Path) -> float | None:
    """What ``curvature.json`` has, if it is there; one that is damaged is refused."""
    file = folder / "curvature.json"
    if not file.exists():
        return None
    found = read_json(file, dict, ANEW)
    if not fits({"relief": None, **found}, {"top_eigenvalue": float | None, "relief": LossSurface | None}):
        raise BsamRuntimeError(f"{file} is damaged: it does not hold an eigenvalue and a landscape; {ANEW}")
    return found["top_eigenvalue"]


def _conclude(run: Run, folder: Path) -> None:
    _say(f"After epoch {run.epochs}: {'  '.join(epoch_numbers(run, last_metrics(folder)))}")
    if (top := _top_eigenvalue(folder)) is not None:
        _say(f"Largest eigenvalue of the Hessian: {top:.4g}")
    files = (file for file in folder.iterdir() if file.name != LOCK and file.suffix != ".draft")
    names = sorted(file.name + "/" * file.is_dir() for file in files)
    _say(f"Written to {folder}: {', '.join(names)}")


def _say(line: str) -> None:
    print(line, flush=True)


def _say_nothing(line: str) -> None:
    """The processes that torchrun started beside the first one are silent."""
