"""Export the network of a run to a file, and compare the file's network with the run's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.checks import check_count
from ...common.errors import BsamValueError
from ...common.extras import require_package
from ..common.files import draft_of
from ..common.printing import say
from ..config import Run
from ..quantization.int_files import check_place
from ..tasks import Score, Task, named_task, task_class
from ..tasks.exported import Comparison
from ..training.machine import pick_device
from ..training.run_dir import NETWORK, RunDir, check_all_used, check_named
from ..training.trainer import as_trained

PACKAGES = {".onnx": ("onnx", "onnxscript", "onnxruntime"), ".safetensors": ()}  # besides those for training


@dataclass(frozen=True)
class ExportedNetwork:
    """A file that :func:`export_run` wrote.

    Args:
        path: path of the file.
        size: size in bytes.
        float_size: size of the float32 weights of the float network, in bytes.
        comparison: the run's network and the network of the file, on samples that the run is evaluated on.
        score: the score of the comparison.
        split: the split of these samples.
        metadata: the entries that the file's metadata has: task, input, its range and size, mean, std, class names ...
        precision: precision in which the run was trained, and in which its network is compared: fp32, bf16 or fp16. The
            network of the file computes in fp32.
    """

    path: Path
    size: int
    float_size: int
    comparison: Comparison
    score: Score
    split: str
    metadata: Mapping[str, str]
    precision: str


def export_run(
    folder: str | Path,
    out: str | Path,
    images: int | None = None,
    device: str = "auto",
    *,
    data: str | Callable[..., Any] | None = None,
    model: str | Callable[..., nn.Module] | None = None,
    task: str | type[Task] | None = None,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_message: Callable[[str], None] = say,
) -> ExportedNetwork:
    """Write the network of a run to a file, and compare the network of the file with that of the run.

    The network of an ONNX file takes samples as they are in the data set and makes its inputs itself: a classifier
    takes uint8 from 0 to 255 for images, or float32 if the data set has floating-point numbers, and standardises them;
    a pose network takes the pixels of the square around a person's box. The network of a safetensors file takes
    standardised pixels. The metadata of both describes the input and the output.

    Args:
        folder: directory of a finished run.
        out: the file. Its suffix determines the format: ``.onnx`` (:func:`~bsam.lab.quantization.export_onnx`), or, for
            a run with ``weight_bits``, ``.safetensors`` (:func:`~bsam.lab.quantization.save_quantized`). An existing
            file is overwritten only if the export succeeds.
        images: number of evaluation samples to compare the networks on; None: all.
        device: device of the run's network; the network of an ONNX file runs on the CPU.
        data, model: the data set and the network of the run; needed only if they are functions of yours, or
            ``MODULE:FUNCTION``, which runs code of that module.
        task: the task of the run; needed only if it is a class of yours, which runs code of its module.
        data_dir, cache_dir: folders of the data, if it is read from files, and of decoded images.
        progress: called with the numbers of finished images and of all images.
        on_message: called with messages for the user.
    """
    out = Path(out)
    suffix = out.suffix.lower()
    if suffix not in PACKAGES:
        raise BsamValueError(f"the file must end in {' or '.join(PACKAGES)}, got {out}")
    for package in PACKAGES[suffix]:
        require_package(package, "onnx")
    if images is not None:
        check_count("images", images)
    check_place(out)
    run_dir = RunDir(folder)
    run = run_dir.finished_run()
    named = None if task is None else named_task(task)
    given: list[Any] = [[] if name is None else [name] for name in (data, model, named)]
    check_named(run, run_dir.path, *given)
    check_all_used({run_dir.path: run}, *given)
    kind: Any = task_class(run.task.name)
    if suffix == ".safetensors" and not kind.is_quantized(run):
        raise BsamValueError(
            f"the run in {folder} has no quantized network, and its weights are in {run_dir.path / NETWORK}: export it "
            "to .onnx, or give a run trained with --weight-bits"
        )
    folders = {"data_dir": data_dir, "cache_dir": cache_dir}
    work = kind(run, pick_device(device), **folders)
    if images is not None and images < work.eval_samples:
        work = kind(replace(run, limit_test=images), work.device, **folders)
    network = run_dir.load_into(work.network()).eval()
    if (warning := run_dir.stale_code(run)) is not None:
        on_message(warning)
    with draft_of(out) as draft:
        try:
            about = work.export(network, draft, suffix)
        except BsamValueError as error:
            raise BsamValueError(f"{error}. The weights of this network are in {run_dir.path / NETWORK}") from error
        size = draft.stat().st_size
        comparison = work.compare(in_precision(run, network, work.device), draft, suffix, progress)
    weights = work.float_network().state_dict().values()
    float_size = sum(4 * tensor.numel() for tensor in weights if tensor.is_floating_point())
    return ExportedNetwork(out, size, float_size, comparison, kind.score, run.eval_split, about, run.precision)


def in_precision(run: Run, network: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that calls a network in the precision of its training."""

    def call(x: Tensor) -> Tensor:
        with as_trained(run, device):
            outputs: Tensor = network(x)
            return outputs

    return call
