"""Load pretrained weights: all tensors of the backbone or none."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from dataclasses import asdict

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from bsam.common.errors import BsamError, BsamRuntimeError, BsamValueError
from bsam.common.timm_import import import_timm
from bsam.lab.models import build, weights
from bsam.lab.models.weights import check_model, load_weights, model_of_file

NAME = "timm:test_resnet"
HEAD = ("fc.weight", "fc.bias")


@pytest.fixture(scope="module")
def pretrained():
    state = build(NAME, classes=20, seed=1).state_dict()
    return {key: value + 1 if value.dim() else value + 7 for key, value in state.items()}  # unlike any new network


@pytest.fixture
def network():
    return build(NAME, classes=5, seed=0)


def state_of(network):
    return {key: value.clone() for key, value in network.state_dict().items()}


def write(path, tensors, metadata=None):
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata)
    return path


FORMS = {
    "plain": lambda state: state,
    "state_dict": lambda state: {"epoch": 3, "state_dict": state},
    "model": lambda state: {"model": state, "lr": [0.1]},
    "module": lambda state: {"state_dict": {f"module.{key}": value for key, value in state.items()}},
    "half": lambda state: {key: value.half() if value.is_floating_point() else value for key, value in state.items()},
    "uncounted": lambda state: {key: value for key, value in state.items() if "num_batches" not in key},
    "safetensors": None,
}


@pytest.mark.parametrize("form", FORMS)
def test_backbone_is_loaded_and_head_kept(form, network, pretrained, tmp_path):
    path, before = tmp_path / "weights", state_of(network)
    if FORMS[form] is None:
        write(path, pretrained, {"bsam_model": f"{NAME}.r160_in1k"})  # a tag does not matter
    else:
        torch.save(FORMS[form](pretrained), path)
    report = load_weights(network, NAME, path)
    after = network.state_dict()
    assert all(after[key].equal(before[key]) for key in HEAD)
    kept = [key for key in pretrained if key not in HEAD and (form != "uncounted" or "num_batches" not in key)]
    for key in kept:
        torch.testing.assert_close(after[key], pretrained[key], rtol=1e-3 if form == "half" else 0, atol=0)
    assert after["conv1.0.weight"].is_contiguous(memory_format=torch.channels_last)
    assert after["conv1.0.weight"].dtype == torch.float32
    width = pretrained["fc.weight"].shape[1]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert json.loads(json.dumps(asdict(report))) == {
        "source": "weights",
        "sha256": digest,
        "loaded": len(kept),
        "head_left_out": {"fc.weight": [20, width], "fc.bias": [20]},
    }
    assert all(word in str(report) for word in (str(len(kept)), digest[:12], f"fc.weight 20x{width}"))
    assert model_of_file(path) == (f"{NAME}.r160_in1k" if form == "safetensors" else None)


def test_head_is_kept_with_as_many_classes_in_the_file(pretrained, tmp_path):
    same = build(NAME, classes=20, seed=0)
    before = state_of(same)
    load_weights(same, NAME, write(tmp_path / "a.safetensors", pretrained))
    assert all(same.state_dict()[key].equal(before[key]) for key in HEAD)
    assert same.state_dict()["conv1.0.weight"].equal(pretrained["conv1.0.weight"])


def test_resnet50_of_an_unknown_kind_is_refused(tmp_path):
    path = write(tmp_path / "a.safetensors", {"fc.bias": torch.zeros(2)})
    for name in ("resnet50", "simcc_resnet50"):
        with pytest.raises(BsamValueError, match="model name"):
            check_model(path, name)
    check_model(path, "timm:resnet50")


def test_head_can_be_loaded(pretrained, tmp_path, network):
    path, whole = write(tmp_path / "a.safetensors", pretrained), build(NAME, classes=20, seed=0)
    assert not load_weights(whole, NAME, path, keep_head=True).head_left_out
    assert all(value.equal(pretrained[key]) for key, value in whole.state_dict().items())
    with pytest.raises(BsamValueError, match=r"fc\.weight"):
        load_weights(network, NAME, path, keep_head=True)


@pytest.mark.parametrize(
    ("change", "word", "metadata"),
    [
        (lambda s: s.pop("layer4.0.bn2.bias"), r"layer4\.0\.bn2\.bias", None),
        (lambda s: s.update(extra=torch.zeros(1)), "extra", None),
        (lambda s: s.update({"bn1.bias": torch.zeros(1)}), r"bn1\.bias", None),
        (lambda s: None, "resnet50", {"bsam_model": "resnet50"}),  # would fit, but is marked as another network
    ],
)
def test_weights_that_do_not_fit_are_not_loaded(change, word, metadata, network, pretrained, tmp_path):
    tensors, before = dict(pretrained), state_of(network)
    change(tensors)
    with pytest.raises(BsamValueError, match=word):
        load_weights(network, NAME, write(tmp_path / "a.safetensors", tensors, metadata))
    assert all(value.equal(before[key]) for key, value in network.state_dict().items())


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("content", ["code", "cut", "text", "header", "list", "names", "nothing", "folder"])
def test_other_files_are_refused(content, network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ("a.safetensors" if content == "header" else "a.pth")
    if content == "cut":
        torch.save({"a": torch.zeros(500)}, path)
        path.write_bytes(path.read_bytes()[:900])
    elif content == "folder":
        path.mkdir()
    elif content in ("list", "names"):
        torch.save([1, 2] if content == "list" else {1: torch.zeros(1)}, path)
    elif content != "nothing":
        path.write_bytes(pickle.dumps(Harmful()) if content == "code" else b"\x09\0\0\0\0\0\0\0hello")
    with pytest.raises(BsamError, match=path.name) as error:
        load_weights(network, NAME, path)
    assert "weights_only" not in str(error.value)  # torch advises to set it to False
    assert not (tmp_path / "harm").exists()


@pytest.fixture
def online(monkeypatch):
    """Let the hub of weights answer."""
    monkeypatch.setattr(weights, "connection_error", lambda: None)


@pytest.mark.usefixtures("online")
def test_downloads(network, pretrained, monkeypatch):
    timm = import_timm()
    downloaded = build(NAME, classes=20)
    downloaded.load_state_dict(pretrained)
    calls = []
    monkeypatch.setattr(timm, "create_model", lambda *args, **kwargs: calls.append((args, kwargs)) or downloaded)
    report = load_weights(network, NAME, "pretrained")
    assert calls == [(("test_resnet",), {"pretrained": True})]
    assert (report.source, report.sha256) == ("test_resnet.r160_in1k", None)
    assert network.state_dict()["bn1.bias"].equal(pretrained["bn1.bias"])


@pytest.mark.usefixtures("online")
def test_error_without_internet_says_what_to_download(network, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no route to host.\nAnd more")

    monkeypatch.setattr(import_timm(), "create_model", fail)
    with pytest.raises(BsamRuntimeError, match=r"no route to host.*timm/test_resnet\.r160_in1k .*--weights FILE"):
        load_weights(network, NAME, "pretrained")


def test_without_internet_the_hub_is_asked_once_and_its_cache_is_used(
    network, pretrained, monkeypatch, capfd, tmp_path
):
    """huggingface_hub itself asks twelve times, for a minute."""
    asked = []

    def no_route(address, *args, **kwargs):
        asked.append(address)
        raise OSError("no route to host")

    monkeypatch.setattr("socket.create_connection", no_route)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BsamRuntimeError, match=r"https://\S+ cannot be reached: no route to host.*--weights FILE"):
        load_weights(network, NAME, "pretrained")
    assert len(asked) == 1
    assert capfd.readouterr() == ("", "")
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    cached = tmp_path / "models--timm--test_resnet.r160_in1k"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    full = import_timm().create_model("test_resnet").state_dict() | {
        k: v for k, v in pretrained.items() if k not in HEAD
    }
    write(cached / "snapshots" / ("0" * 40) / "model.safetensors", full)
    load_weights(network, NAME, "pretrained")
    assert network.state_dict()["bn1.bias"].equal(pretrained["bn1.bias"])
