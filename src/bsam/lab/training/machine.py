"""Where runs are trained: the device, the folders, and how many runs at a time."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from ...common.checks import check_count, check_number
from ...common.errors import BsamValueError
from .environment import check_device

CHECKPOINT_EVERY = 60.0  # seconds: writing takes as long as a third of a short epoch


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
