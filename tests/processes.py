"""Processes forked from a server that has already imported torch and scikit-learn, which takes seconds."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from bsam.lab.running.executors import PRELOAD

FORKS = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
CONTEXT: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
PRELOAD.extend(f"bsam.lab.cli.{name}" for name in ("compare", "demo", "flatness", "predict", "report", "train"))
PRELOAD.extend(["sklearn.datasets", "sklearn.model_selection", "torch._dynamo", "torch.utils.tensorboard"])
PRELOAD.extend(["bsam.lab.report.recipe_results", "PIL.Image", "plotly.graph_objects", "safetensors.torch"])
if FORKS:
    CONTEXT.set_forkserver_preload(PRELOAD)  # torch's optimizers import torch._dynamo


class Process:
    """A function call in another process, with the part of ``subprocess.Popen``'s interface that the tests use."""

    def __init__(self, function: Callable[..., object], *arguments: Any, **named: Any) -> None:
        self._process = CONTEXT.Process(target=function, args=arguments, kwargs=named)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:  # as benchmarks/kill_and_resume.py does
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = 100) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise TimeoutError("the process did not end")
        return self.returncode


class Script(Process):
    """``python script.py`` or ``python -m module`` with these arguments, in a new session.

    UserWarnings are errors. Both streams go to the file ``output``. Modules that the tests imported are not there.
    """

    def __init__(
        self, script: Path | str, *arguments: object, output: Path, env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(_run_script, script, list(map(str, arguments)), output, dict(env or {}))


class Command(Process):
    """``python -m bsam`` with these arguments, in a new session and process group, as in a terminal."""

    def __init__(self, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        ends = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
        words, environment = list(map(str, arguments)), {"COLUMNS": "120", **(env or {})}
        super().__init__(_run_command, words, [end for _, end in ends], cwd, environment)
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno())) for end, _ in ends)
        for end in (end for pair in ends for end in pair):
            end.close()

    def communicate(self, timeout: float = 100) -> tuple[str, str]:
        """Return the rest of both streams, which must fit into a pipe's buffer."""
        self.wait(timeout)
        with self.stdout, self.stderr:
            return self.stdout.read(), self.stderr.read()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is not None:
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.closing(self.stdout), contextlib.closing(self.stderr):
            self.wait()


def fork_ranks(function: Callable[[int, Path], object], folder: Path) -> None:
    """End this process after two forks of it, which share its imports, have called ``function(rank, folder)``."""
    ranks = [multiprocessing.get_context("fork").Process(target=function, args=(rank, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
    for process in ranks:
        process.kill()
    raise SystemExit(any(process.exitcode for process in ranks))


@contextlib.contextmanager
def group_of_two(rank: int, folder: Path) -> Iterator[None]:
    """Make this process one of two gloo ranks. Both leave together: neither destroys a group that the other uses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    yield
    gc.collect()  # free models in reference cycles before the group that they use
    dist.barrier()
    dist.destroy_process_group()


def _run_script(script: Path | str, arguments: list[str], output: Path, environment: dict[str, str]) -> None:
    os.setsid()
    with output.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    faulthandler.enable()
    gc.freeze()  # imported modules stay
    gc.set_threshold(20_000, 20, 50)
    warnings.simplefilter("error", UserWarning)
    os.environ |= environment
    sys.argv = [str(script), *arguments]
    if isinstance(script, Path):
        sys.path.insert(0, str(script.resolve().parent))
        runpy.run_path(str(script), run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def _run_command(
    arguments: list[str], streams: list[Connection], cwd: Path | None, environment: dict[str, str]
) -> None:
    os.setsid()
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=b, closefd=False) for n, b in ((1, -1), (2, 1)))
    os.environ |= environment
    if cwd is not None:
        os.chdir(cwd)
    sys.argv = ["bsam", *arguments]
    get_context = multiprocessing.get_context  # fork the workers as well
    multiprocessing.get_context = lambda method=None: get_context("fork")  # type: ignore[assignment]
    runpy.run_module("bsam", run_name="__main__", alter_sys=True)
