"""The machine: where runs are trained, its devices, the processes of a run, and what it supports."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ... import __version__
from ...common.checks import check_count, check_number
from ...common.errors import BsamRuntimeError, BsamValueError

T = TypeVar("T")

CHECKPOINT_EVERY = 60.0  # seconds: writing takes as long as a third of a short epoch
NO_LIMIT = timedelta(days=365)  # NCCL ends a wait after ten minutes, gloo after thirty
LONGEST_SLEEP = 0.1  # seconds between two looks at whether all processes have arrived
# The warning continues with the name of the fallback (BLAS gemm, or baddbmm) and more than 20 lines of a C++ stack.
BF16_WARNING = "mkldnn_matmul failed, switching to"
MPS_CONTROL = "nvidia-cuda-mps-control"


@dataclass(frozen=True)
class Machine:
    """Where and how runs are trained; nothing of it changes their results, up to rounding.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; ``"auto"`` or None takes a GPU if there is one.
        data_dir: the folder with the data and with files of weights, if they are read from files.
        cache_dir: the folder for decoded image files; None uses ``.bsam-cache`` next to the images.
        checkpoint_every: the minimum time between two checkpoints of a run, in seconds; 0 writes one after every epoch.
            Checkpoints are written only at the end of an epoch, and always after the last one; ``bsam`` also writes one
            in the middle of an epoch when it receives SIGTERM or SIGUSR1.
        download: whether to download CIFAR or Fashion-MNIST into ``data_dir`` first, if they are not there yet.
        jobs: of many runs, the number to train at a time on this machine; None chooses it from the device.
        ray: trains many runs as Ray tasks. ``HOST:PORT`` of the head node, or ``"auto"`` for the cluster running on
            this machine. An empty string uses ``RAY_ADDRESS``; if that is not set either, it starts a cluster on this
            machine, which listens only on the loopback address and has a token that only this process and its children
            know.
        gpus_per_run: with ``ray``, the number of GPUs per run, possibly a fraction; None means one if the cluster has
            any.

    Example:
        >>> Machine("cpu", data_dir="data").folders
        {'data_dir': PosixPath('data')}
    """

    device: str | None = None
    _: KW_ONLY
    data_dir: str | Path | None = None
    cache_dir: str | Path | None = None
    checkpoint_every: float = CHECKPOINT_EVERY
    download: bool = False
    jobs: int | None = None
    ray: str | None = None
    gpus_per_run: float | None = None

    def __post_init__(self) -> None:
        for name in ("data_dir", "cache_dir"):
            folder = getattr(self, name)
            object.__setattr__(self, name, None if folder is None else Path(folder))
        check_number("checkpoint_every", self.checkpoint_every, low=0)
        if self.jobs is not None:
            check_count("jobs", self.jobs)
        if self.ray is None:
            check_device(self.device)
            if self.gpus_per_run is not None:
                raise BsamValueError(
                    "gpus_per_run (--gpus-per-run) needs ray (--ray). Without Ray, runs share GPUs if jobs (--jobs) "
                    "exceeds the number of GPUs"
                )
            return
        if self.jobs is not None:
            raise BsamValueError("jobs (--jobs) starts processes here, ray (--ray) Ray tasks: use one of them")
        if self.device not in (None, "auto", "cpu", "cuda"):
            raise BsamValueError(
                f"with Ray, device must be auto, cpu or cuda, got {self.device!r}: Ray chooses the GPU"
            )
        share = self.gpus_per_run
        if share is not None and check_number("gpus_per_run", share, 0) > 1 and share % 1:
            raise BsamValueError(f"gpus_per_run must be between 0 and 1, or a whole number; got {share!r}")

    @property
    def folders(self) -> dict[str, Path]:
        """The folders that are given, by name."""
        given = {"data_dir": self.data_dir, "cache_dir": self.cache_dir}
        return {name: Path(folder) for name, folder in given.items() if folder is not None}


# ---- devices


def check_device(name: str | None) -> torch.device | None:
    """Return the device with this name, whether or not this machine has it; None for ``"auto"`` and None."""
    if name in (None, "auto"):
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise BsamValueError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    return device


def pick_device(name: str | None = None) -> torch.device:
    """Return the device with this name; ``"auto"`` and None take a GPU if there is one."""
    device = check_device(name)
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BsamRuntimeError(f"device is {name}, but torch sees {torch.cuda.device_count()} GPU(s): choose cpu")
    return device


def devices_of(device: str | None) -> list[str]:
    """Return all GPUs for ``"cuda"`` without an index, otherwise the device of :func:`pick_device`."""
    picked = pick_device(device)
    if picked.type == "cpu" or picked.index is not None:
        return [str(picked)]
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a separate CUDA stream; does nothing on a CPU.

    To capture steps in a CUDA graph, the network must be built on that stream, too. cuDNN's benchmark mode is on: all
    batches of a run have the same shape, so searching for the best kernels pays off.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    before = torch.backends.cudnn.benchmark
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        torch.backends.cudnn.benchmark = True
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.backends.cudnn.benchmark = before
        torch.cuda.current_stream(device).wait_stream(stream)


# ---- the processes of a run: a single one, or those launched with torchrun


@dataclass(frozen=True)
class DistributedContext:
    """This process's device and rank, and the number of processes. Its methods are called only if there are several.

    Values other than gradients are exchanged through the CPU, in a group of processes that wait without a time limit:
    one of them may be downloading data, or measuring the trained network.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files and measures the network."""
        return self.rank == 0

    @property
    def is_main_of_machine(self) -> bool:
        """Whether this process is the first one on its machine."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the network, wrapped to average gradients over the processes."""
        return DistributedDataParallel(network, device_ids=[self.device] if self.device.type == "cuda" else None)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the processes."""
        dist.all_reduce(value)
        return value / self.size

    def broadcast(self, value: T) -> T:
        """Return the first process's value on all processes."""
        self.barrier()
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        self.barrier()
        values: list[Any] = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def copy_buffers(self, network: nn.Module) -> None:
        """Copy the first process's buffers, such as the statistics of batch norm, to all processes."""
        for buffer in network.buffers():
            dist.broadcast(buffer, src=0)

    def barrier(self) -> None:
        """Wait for all processes, without a time limit. Signals are handled meanwhile."""
        work = dist.barrier(self.group, async_op=True)
        pause = 1e-3
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_SLEEP)
        work.wait()  # raises if a process has ended


@dataclass
class Vote:
    """Let all processes act at the same step on a number that one of them has received."""

    context: DistributedContext
    _pending: tuple[Any, Tensor] | None = None

    def __call__(self, number: int) -> int:
        """Give this process's number, and return the largest number that the processes gave in the previous call."""
        largest = self.result()
        given = torch.tensor(number)
        self._pending = dist.all_reduce(given, dist.ReduceOp.MAX, self.context.group, async_op=True), given
        return largest

    def result(self) -> int:
        """Return the largest number of the last call."""
        if self._pending is None:
            return 0
        work, largest = self._pending
        work.wait()
        self._pending = None
        return int(largest)


@contextlib.contextmanager
def distributed_context(device: str | None = None) -> Iterator[DistributedContext]:
    """Provide this process's device and rank. If the block succeeds, the processes wait for each other on exit.

    Args:
        device: as for :func:`pick_device`. With several processes, each takes the GPU of its local rank.
    """
    torch_device = pick_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield DistributedContext(torch_device)
        return
    if torch_device.type == "cuda":
        torch_device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(torch_device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch_device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)  # not earlier: the next run in this process needs the group again
    group = _group_without_limit(dist.group.WORLD)
    context = DistributedContext(torch_device, dist.get_rank(), dist.get_world_size(), group)
    yield context
    context.barrier()  # otherwise a process could exit and close connections that another one still uses


@functools.cache
def _group_without_limit(world: Any) -> Any:
    """Return a group of all processes that exchanges values through the CPU; a single one for each world."""
    return dist.new_group(backend="gloo", timeout=NO_LIMIT)


# ---- what the machine supports


def is_bf16_emulated(device: torch.device) -> bool:
    """Return whether the device is a CPU without bf16 instructions, where bf16 is many times slower than fp32."""
    if device.type != "cpu":
        return False
    return not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextlib.contextmanager
def emulated_bf16() -> Iterator[None]:
    """Silence torch's warning that oneDNN cannot multiply in bf16.

    On aarch64, torch tries oneDNN anyway, warns, and disables oneDNN for the whole process, even for fp32. The setting
    is restored on exit.
    """
    before = torch.backends.mkldnn.enabled
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=BF16_WARNING)
            yield
    finally:
        torch.backends.mkldnn.enabled = before


@functools.cache
def why_compile_fails(device: torch.device) -> str | None:
    """Return why ``torch.compile`` fails on a device, or None if it works; tried once, on a small layer."""

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).relu().sum()

    ones = functools.partial(torch.ones, 2, 2, device=device)
    try:
        torch.compile(layer)(ones(), ones(requires_grad=True)).backward()
    except (RuntimeError, OSError) as error:  # torch._dynamo's errors are RuntimeErrors, its cache raises OSErrors
        inner = getattr(error, "inner_exception", error)
        return str(inner).strip().partition("\n")[0] or type(inner).__name__
    return None


# ---- what is noted of the machine


@functools.cache
def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed. Looking for it takes milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment_info(device: torch.device | None = None) -> dict[str, Any]:
    """Return versions, machine and date as plain values; with a device, also its description."""
    on_device: dict[str, Any] = {}
    if device is not None and device.type == "cuda":
        on_device["device"] = torch.cuda.get_device_name(device)
        on_device["cuda"] = torch.version.cuda
        on_device["cudnn"] = torch.backends.cudnn.version()
    elif device is not None:
        on_device["device"] = device.type
        on_device["threads"] = torch.get_num_threads()
    return {
        "bsam": __version__,
        "python": platform.python_version(),
        **{package: version_of(package) for package in ("torch", "numpy", "scikit-learn", "timm", "pillow")},
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        **on_device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# ---- NVIDIA MPS, with which several processes use a GPU at the same time instead of taking turns


def is_mps_installed() -> bool:
    """Return whether NVIDIA's control program is on the PATH; MPS may still fail to start."""
    return shutil.which(MPS_CONTROL) is not None


@contextlib.contextmanager
def nvidia_mps(on_message: Callable[[str], None]) -> Iterator[Mapping[str, str] | None]:
    """Use the running MPS daemon or start one for this block, and provide the variables with which processes find it.

    If neither works, ``on_message`` gets the reason, and the variables are None.
    """
    if _control("get_server_list", {}) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="bsam-mps-") as folder:  # socket paths must be short
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            problem = _control("", variables, "-d")
            if problem is not None:
                on_message(f"NVIDIA MPS is off ({problem}): runs on one GPU take turns, which saves little time.")
            elif re.fullmatch(r"[\d, ]+", os.environ.get("CUDA_VISIBLE_DEVICES", "")):  # the daemon counts from 0
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(torch.cuda.device_count())))
            yield variables if problem is None else None
        finally:
            _control("quit", variables)


def _control(command: str, variables: Mapping[str, str], *flags: str) -> str | None:
    """Start the daemon or send it a command, and return the error message, or None on success."""
    call = [MPS_CONTROL, *flags]
    environment = {**os.environ, **variables}
    try:
        subprocess.run(
            call, input=f"{command}\n", env=environment, capture_output=True, text=True, timeout=60, check=True
        )
    except subprocess.CalledProcessError as error:
        return " ".join((error.stdout + error.stderr).split()) or str(error)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None
