"""TensorBoard events of a run: settings, metrics and images."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..tasks import TASKS


class Events:
    """Write the TensorBoard events of a run, after removing older ones from the folder.

    Args:
        folder: the folder for the events.
        settings: the settings of the run, shown as hyperparameters with the task's measure as their metric.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer, self._epoch = SummaryWriter(folder), 0
        nested = ("arguments", "base_arguments")
        flat = {name: value for name, value in settings.items() if name not in nested}
        flat |= {**settings["base_arguments"], **settings["arguments"]}
        measure = TASKS[settings["task"]].measure.metric(settings["eval_split"]) if settings["task"] in TASKS else ""
        shown = {
            # protobuf rejects surrogates, which stand for undecodable bytes of a path
            name: value if isinstance(value, (bool, int, float)) else str(value).encode("utf-8", "replace").decode()
            for name, value in flat.items()
            if value is not None
        }
        # add_hparams would write them to a second folder, which TensorBoard shows as another run
        *start, self._end = hparams(shown, {measure: 0.0} if measure else {})
        for summary in start:
            self._writer._get_file_writer().add_summary(summary)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of an epoch, with the epoch as the step."""
        self._epoch = metrics["epoch"]
        for name, value in metrics.items():
            if name != "epoch" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, self._epoch)
        self._writer.flush()

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Add the PNG files, and mark the run as finished."""
        for name, content in files.items():
            if name.endswith(".png"):
                self._writer.add_image(Path(name).stem, _pixels(content), self._epoch, dataformats="HWC")
        self._writer._get_file_writer().add_summary(self._end)
        self._writer.flush()


def _pixels(png: bytes) -> Any:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
