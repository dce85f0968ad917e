"""Pixels become the inputs of the run's network, in torch and in an ONNX file; the metadata says how."""

import json

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from bsam.lab.data import Dataset
from bsam.lab.quantization import export_onnx, run_onnx
from bsam.lab.tasks.classification import Classification
from bsam.lab.tasks.classifier_files import Preprocessing, example, metadata
from bsam.lab.training import Run

pytestmark = pytest.mark.usefixtures("operators_once")
CPU = torch.device("cpu")


def task_of(images, **settings):
    data = (images, np.arange(len(images)) % 3)
    made = Dataset.from_arrays(train=data, test=data, class_names=("cat", "dog", "owl"))
    return Classification(Run.of("sgd", **{"model": "resnet8", **settings}), CPU, data=made)


@pytest.fixture(scope="module")
def bytes_task():
    return task_of(np.random.default_rng(0).integers(0, 256, (12, 3, 8, 8), np.uint8), image_size=20)


def test_bytes_become_the_inputs_bit_for_bit_and_in_a_file(bytes_task, tmp_path):
    stored = torch.cat([x for x, _ in bytes_task.eval_images()])
    inputs = torch.cat([x for x, _ in bytes_task.eval_examples()])
    module, x = Preprocessing(bytes_task), example(bytes_task)
    assert (x.shape, x.dtype, inputs.shape) == ((1, 3, 8, 8), torch.uint8, (12, 3, 20, 20))
    assert torch.equal(module(stored), inputs)
    export_onnx(module, tmp_path / "net.onnx", x)
    assert torch.allclose(run_onnx(tmp_path / "net.onnx", stored), inputs, atol=1e-5)


@pytest.mark.parametrize("model", ["resnet8", "timm:test_efficientnet"])  # bilinear and bicubic
def test_larger_images_are_reduced_with_antialiasing_in_training_evaluation_and_the_file(tmp_path, model):
    """Stripes whose mean is 0.25 were sampled between the white ones."""
    stripes = np.zeros((12, 3, 64, 64), np.uint8)
    stripes[..., ::4] = 255
    task = task_of(stripes, model=model, image_size=16, augment="none")
    stored = torch.cat([x for x, _ in task.eval_images()])
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (task.inputs.mean, task.inputs.std))
    module = Preprocessing(task)
    export_onnx(module, tmp_path / "net.onnx", example(task))
    trained, *_ = task.batch(torch.arange(4))
    ((evaluated, _),) = task.eval_examples(4)
    for inputs in (trained, evaluated, module(stored), run_onnx(tmp_path / "net.onnx", stored)):
        assert inputs.shape[1:] == (3, 16, 16)
        pixels = (inputs * std + mean)[..., 2:-2]
        torch.testing.assert_close(pixels, torch.full_like(pixels, 0.25), atol=2e-3, rtol=0)
    assert torch.equal(module(stored), torch.cat([x for x, _ in task.eval_examples()]))
    torch.testing.assert_close(run_onnx(tmp_path / "net.onnx", stored), module(stored), atol=1e-5, rtol=0)


def test_metadata_of_bytes(bytes_task):
    about, pixels = metadata(bytes_task, in_file=True), bytes_task.eval_images()
    stored = torch.cat([x for x, _ in pixels]).double()
    assert json.loads(about["mean"]) == pytest.approx(stored.mean((0, 2, 3)).tolist())
    assert json.loads(about["std"]) == pytest.approx(stored.std((0, 2, 3), correction=0).tolist())
    assert about["input"] == "uint8 (n, 3, 8, 8), RGB pixels from 0 to 255; the file standardises them"
    assert about["preprocessing"] == "in the file: (pixels - mean) / std, resized to 20 x 20"
    assert json.loads(about["decoding"]) == {"shorter_side": 8, "centre_crop": 8, "interpolation": "bilinear"}
    assert json.loads(about["class_names"]) == ["cat", "dog", "owl"]
    outside = metadata(bytes_task, in_file=False)
    assert (outside["input"].partition(",")[0], outside["input_size"]) == ("float32 (n", "[3, 20, 20]")


def test_arrays_of_floating_point_numbers():
    task = task_of(np.random.default_rng(0).normal(5, 2, (12, 2, 8, 8)))
    ((stored, _),), ((inputs, _),) = task.eval_images(), task.eval_examples()
    assert example(task).dtype == torch.float32
    assert torch.equal(Preprocessing(task)(stored), inputs)
    about = metadata(task, in_file=True)
    assert json.loads(about["input_range"]) == [float(stored.min()), float(stored.max())]
    assert "decoding" not in about
    assert "RGB" not in about["input"]


def test_digits_become_the_inputs_bit_for_bit():
    """The data set holds standardised images; the pixels are those of scikit-learn."""
    task = Classification(Run("sgd"), CPU)
    inputs = torch.cat([x for x, _ in task.eval_examples()])
    raw = torch.tensor(load_digits().images, dtype=torch.float32)[:, None]
    module = Preprocessing(task)
    assert {x.numpy().tobytes() for x in inputs} <= {x.numpy().tobytes() for x in module(raw)}
    assert torch.allclose(task.pixels.restore(module(raw)), raw, atol=1e-5)
    assert (task.pixel_range(), float(raw.min()), float(raw.max())) == ((0.0, 16.0), 0.0, 16.0)
