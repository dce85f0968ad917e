"""Loading pretrained weights: all tensors of the backbone or none."""

from __future__ import annotations

import hashlib
import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from bsam.common.errors import BsamError
from bsam.models import build
from bsam.models.timm_import import import_timm
from bsam.models.weight_files import model_of_file
from bsam.models.weight_loading import check_model, load_weights

NAME = "timm:test_resnet"
HEAD = ("fc.weight", "fc.bias")


@pytest.fixture(scope="module")
def pretrained():
    state = build(NAME, classes=20, seed=1).state_dict()
    return {key: value + 1 if value.dim() else value + 7 for key, value in state.items()}  # batch norm too is unusual


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
def test_the_backbone_is_loaded_and_the_head_stays(form, network, pretrained, tmp_path):
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
    assert json.loads(json.dumps(report.to_json())) == {
        "source": "weights",
        "sha256": digest,
        "loaded": len(kept),
        "head_left_out": {"fc.weight": [20, width], "fc.bias": [20]},
    }
    left = [f"fc.weight 20x{width}", "fc.bias 20"]
    left = sorted(left) if form == "safetensors" else left  # as such files are
    said = f"Loaded {len(kept)} tensors of weights (SHA-256 {digest[:12]}...); its classifier was left out"
    assert str(report) == f"{said} ({', '.join(left)})."
    assert model_of_file(path) == (f"{NAME}.r160_in1k" if form == "safetensors" else None)


def test_the_head_stays_also_where_the_file_has_as_many_classes(pretrained, tmp_path):
    same = build(NAME, classes=20, seed=0)
    before = state_of(same)
    load_weights(same, NAME, write(tmp_path / "a.safetensors", pretrained))
    assert all(same.state_dict()[key].equal(before[key]) for key in HEAD)
    assert same.state_dict()["conv1.0.weight"].equal(pretrained["conv1.0.weight"])


def test_a_resnet50_of_an_unknown_kind_is_refused(tmp_path):
    path = write(tmp_path / "a.safetensors", {"fc.bias": torch.zeros(2)})
    for name in ("resnet50", "simcc_resnet50"):
        with pytest.raises(BsamError, match=r"has no model name; .*: give a file of tools"):
            check_model(path, name)
    check_model(path, "timm:resnet50")


def test_the_head_can_be_kept(pretrained, tmp_path, network):
    path, whole = write(tmp_path / "a.safetensors", pretrained), build(NAME, classes=20, seed=0)
    assert str(load_weights(whole, NAME, path, keep_head=True)).endswith("; nothing was left out.")
    assert all(value.equal(pretrained[key]) for key, value in whole.state_dict().items())
    with pytest.raises(BsamError, match=r"2 of another shape \(fc.weight \(20, "):
        load_weights(network, NAME, path, keep_head=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("layer4.0.bn2.bias"), r"1 missing \(layer4.0.bn2.bias\)"),
        (lambda s: s.update(extra=torch.zeros(1)), r"1 unexpected \(extra\)"),
        (lambda s: s.update({"bn1.bias": torch.zeros(1)}), r"1 of another shape \(bn1.bias \(1,\) in place of \("),
        (lambda s: [s.pop(key) for key in list(s)[:-9]], r"\d+ missing \(\S+, \S+, \S+\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_loaded(change, words, network, pretrained, tmp_path):
    tensors, before = dict(pretrained), state_of(network)
    change(tensors)
    with pytest.raises(BsamError, match=f"a.safetensors does not fit {NAME}, nothing was loaded.*{words}"):
        load_weights(network, NAME, write(tmp_path / "a.safetensors", tensors))
    assert all(value.equal(before[key]) for key, value in network.state_dict().items())


def test_a_file_for_another_network_is_refused_though_it_would_fit(network, pretrained, tmp_path):
    path = write(tmp_path / "a.safetensors", pretrained, {"bsam_model": "resnet50"})
    with pytest.raises(BsamError, match=r"a.safetensors holds weights of resnet50, not of .*--model resnet50"):
        load_weights(network, NAME, path)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("content", ["code", "cut", "text", "header", "list", "names", "nothing", "folder"])
def test_what_is_no_file_of_weights_is_refused(content, network, tmp_path, monkeypatch):
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
    words = {"list": "holds no weights", "names": "holds no weights", "nothing": "no file", "folder": "no file"}
    with pytest.raises(BsamError, match=words.get(content, "cannot be read as a file of weights")) as caught:
        load_weights(network, NAME, path)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "harm").exists()


def test_what_timm_downloads(network, pretrained, monkeypatch):
    timm = import_timm()
    made = build(NAME, classes=20)
    made.load_state_dict(pretrained)
    asked = []
    monkeypatch.setattr(timm, "create_model", lambda *args, **named: asked.append((args, named)) or made)
    report = load_weights(network, NAME, "pretrained")
    assert asked == [(("test_resnet",), {"pretrained": True})]
    assert (report.source, report.sha256) == ("test_resnet.r160_in1k", None)
    assert network.state_dict()["bn1.bias"].equal(pretrained["bn1.bias"])


def test_without_internet_the_error_says_what_to_download(network, monkeypatch):
    def fail(*args, **named):
        raise OSError("no route to host.\nAnd more")

    monkeypatch.setattr(import_timm(), "create_model", fail)
    words = (
        r"\(no route to host\). No internet\? Download model.safetensors of timm/test_resnet.r160_in1k "
        r".* --weights FILE, "
        r"or convert .*tools/convert_weights.py"
    )
    with pytest.raises(BsamError, match=words):
        load_weights(network, NAME, "pretrained")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet50", "no download of pretrained weights for resnet50"),
        ("timm:resnet10", "no network"),
        ("timm:coatnet_0_224", "has no pretrained weights"),
    ],
)
def test_networks_without_a_download(name, words, network):
    with pytest.raises(BsamError, match=words):
        load_weights(network, name, "pretrained")
