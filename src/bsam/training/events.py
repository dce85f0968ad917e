"""What TensorBoard shows of a run: its settings, the numbers of each epoch, pictures."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..tasks import TASKS


class Events:
    """Write TensorBoard's events of a run; older ones in the folder are removed first.

    Args:
        folder: of the events.
        settings: of the run. They become hyperparameters, and the task's measure the metric that they are compared by.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer, self._epoch = SummaryWriter(folder), 0
        plain = {name: value for name, value in settings.items() if name != "arguments"} | settings["arguments"]
        measure = TASKS[settings["task"]].measure.metric(settings["eval_split"]) if settings["task"] in TASKS else ""
        shown = {
            # protobuf takes no surrogates, which stand for bytes of a path that are no text
            name: value if isinstance(value, (bool, int, float)) else str(value).encode("utf-8", "replace").decode()
            for name, value in plain.items()
            if value is not None
        }
        # not add_hparams: it would write them to a second folder, as if they were another run
        *start, self._end = hparams(shown, {measure: 0.0} if measure else {})
        for summary in start:
            self._writer._get_file_writer().add_summary(summary)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add an epoch's numbers; the step is the epoch."""
        self._epoch = metrics["epoch"]
        for name, value in metrics.items():
            if name != "epoch" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, self._epoch)
        self._writer.flush()

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Add the files that are PNG pictures, and that the run is finished."""
        for name, content in files.items():
            if name.endswith(".png"):
                self._writer.add_image(Path(name).stem, _pixels(content), self._epoch, dataformats="HWC")
        self._writer._get_file_writer().add_summary(self._end)
        self._writer.flush()


def _pixels(png: bytes) -> Any:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
