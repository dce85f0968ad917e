"""Files with packed codes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bsam.common.errors import BsamValueError
from bsam.models import build
from bsam.quantization import calibrate, convert, load_quantized, quantize, save_quantized
from bsam.quantization.int_files import pack, unpack


@pytest.mark.parametrize("shape", [(1,), (16,), (3, 5), (2, 3, 3, 3)])
def test_packing_round_trips(shape):
    n = torch.Size(shape).numel()
    codes = (torch.arange(n) % 16 - 8).to(torch.int8).view(shape)
    packed = pack(codes)
    assert packed.dtype == torch.uint8
    flat = [*codes.flatten().tolist(), 0]
    assert packed.tolist() == [(flat[i] & 15) | ((flat[i + 1] & 15) << 4) for i in range(0, n, 2)]
    assert torch.equal(unpack(packed, shape), codes)


def converted(name="resnet8", bits=4, **settings):
    torch.manual_seed(0)
    model = quantize(build(name, seed=0), bits, bits, **settings)
    calibrate(model, torch.randn(2, 3, 8, 8))
    return convert(model)


@pytest.mark.parametrize(
    ("bits", "settings"), [(4, {}), (2, {"fold_batch_norm": True}), (8, {"scheme": "minmax"}), (5, {})]
)
def test_a_file_gives_the_same_network(tmp_path, bits, settings):
    model, path = converted(bits=bits, **settings), tmp_path / "net.safetensors"
    assert save_quantized(model, path) == path.stat().st_size
    other = build("resnet8", seed=1)
    before = {name: t.clone() for name, t in other.state_dict().items()}
    loaded = load_quantized(str(path), other)
    x = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())
    stored = load_file(path)["stages.0.0.conv1.weight"]
    assert stored.dtype == (torch.uint8 if bits <= 4 else torch.int8)
    assert stored.numel() == 16 * 16 * 9 // (2 if bits <= 4 else 1)


def test_a_resnet18_of_4_bits_takes_less_than_014_of_the_float_one(tmp_path):
    model = build("resnet18", seed=0)
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, tmp_path / "float.safetensors")
    quantized = quantize(model)
    calibrate(quantized, torch.randn(1, 3, 8, 8))
    size = save_quantized(convert(quantized), tmp_path / "net.safetensors")
    assert 0.12 < size / (tmp_path / "float.safetensors").stat().st_size < 0.128


def test_a_shared_layer_and_a_layer_alone(tmp_path):
    conv = nn.Conv2d(2, 2, 1)
    for model in (nn.Sequential(conv, nn.ReLU(), conv), conv):
        quantized = quantize(model)
        calibrate(quantized, torch.randn(4, 2, 3, 3))
        ready = convert(quantized)
        save_quantized(ready, tmp_path / "net.safetensors")
        loaded, x = load_quantized(tmp_path / "net.safetensors", model), torch.randn(4, 2, 3, 3)
        assert torch.equal(loaded(x), ready(x))


def test_what_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "net.safetensors"
    with pytest.raises(BsamValueError, match=r"there is no file .*net\.safetensors"):
        load_quantized(path, build("resnet8"))
    for model in (build("resnet8"), quantize(build("resnet8"))):
        with pytest.raises(BsamValueError, match="ResNet has no integer weights: call bsam"):
            save_quantized(model, path)
    save_quantized(converted(), path)
    for other in (build("resnet20"), build("wide_resnet10_1"), build("resnet8", classes=11), converted()):
        with pytest.raises(BsamValueError, match=r"net\.safetensors does not fit .*: pass the float network that"):
            load_quantized(path, other)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BsamValueError, match=r"net\.safetensors cannot be read by safetensors"):
        load_quantized(path, build("resnet8"))
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(BsamValueError, match="holds no network of bsam"):
        load_quantized(path, build("resnet8"))
