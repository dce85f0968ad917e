"""Joints in image files: those of the task's evaluation, and those of the network on crops that are made by hand."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from bsam.lab.config import Run
from bsam.lab.data.persons import LSP
from bsam.lab.data.stick_figures import stick_figures
from bsam.lab.inference import predict
from bsam.lab.models import build
from bsam.lab.tasks.pose import Pose
from bsam.lab.tasks.pose_outputs import decode
from bsam.lab.training.run_dir import RunDir
from pose_runs import SIDE, train_pose

MIRRORED = list(LSP.mirrored)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_pose(tmp_path_factory.mktemp("pose") / "run")


@pytest.fixture(scope="module")
def network(run):
    found = build("simcc_resnet8", 14, 3, side=SIDE, k=2.0).eval()
    found.load_state_dict(load_file(run / "model.safetensors"))
    return found


def found_in(run, image, **options):
    """The joints in one image, on the CPU."""
    (found,) = predict(run, image, device="cpu", **options)
    return found


def save(pixels, path, **options):
    Image.fromarray(pixels).save(path, **options)
    return path


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def by_hand(network, run, pixels):
    """The joints that the network finds in its input, bytes (32, 32, 3)."""
    note = json.loads((run / "pose.json").read_text())
    x = (torch.from_numpy(pixels.copy()) / 255 - torch.tensor(note["mean"])) / torch.tensor(note["std"])
    with torch.no_grad():
        return decode(network(x.permute(2, 0, 1)[None]))[0].double().numpy()


@pytest.mark.parametrize(("flip_test", "precision"), [(False, "fp32"), (True, "fp32"), (False, "bf16")])
def test_joints_are_those_of_the_evaluation(run, flip_test, precision, tmp_path, monkeypatch):
    """The stored crops are parts of larger images of noise, from which the boxes cut exactly them."""
    data, seen = stick_figures(16, seed=4, side=SIDE), []
    settings = Run.of(**{**RunDir(run).run().settings(), "flip_test": flip_test})
    run = shutil.copytree(run, tmp_path / "run")
    (run / "config.json").write_text(json.dumps({**settings.settings(), "flip_test": False, "precision": precision}))
    task = Pose(settings, torch.device("cpu"), data=data)
    monkeypatch.setattr(Pose, "_scores", lambda _, joints: seen.append(joints.numpy()) or {})
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):  # as in training
        task.evaluate(RunDir(run).load_into(task.network()).eval())
    ((evaluated,), persons) = seen, data.test
    assert len(evaluated) == 4
    for number, (x, to_image) in enumerate(zip(persons.x, persons.to_image.numpy(), strict=True)):
        left, top = 3 + 5 * number, 9 - number
        pixels = noise(60, 80)
        pixels[top : top + 44, left : left + 44] = x.permute(1, 2, 0).numpy()
        half = 44 / 1.375 / 1.25 / 2  # of the box; its centre is that of the crop, between two pixels
        box = (left + 21.5 - half, top + 21.5 - half, left + 21.5 + half, top + 21.5 + half)
        found = found_in(run, save(pixels, tmp_path / "a.png"), box=box, flip_test=flip_test)
        crop = (evaluated[number] - to_image[:, 2]) @ np.linalg.inv(to_image[:, :2]).T
        np.testing.assert_allclose(found.joints, crop + np.array([left, top]), rtol=0, atol=1e-3)
        assert (found.box, found.skeleton) == (pytest.approx(box), LSP)


@pytest.mark.parametrize(("width", "height"), [(128, 100), (70, 128)])
def test_without_a_box_the_whole_image_is_the_box(run, network, width, height, tmp_path):
    """Its longer side is 25.6 pixels of the input, 32 / 1.25: a fifth; and 220 of its own are 44 pixels of the crop."""
    pixels = noise(height, width)
    left, top = (220 - width) // 2, (220 - height) // 2
    around = np.zeros((220, 220, 3), np.uint8)
    around[top : top + height, left : left + width] = pixels
    crop = np.asarray(Image.fromarray(around).resize((44, 44), Image.Resampling.BILINEAR))
    places = by_hand(network, run, crop[6:38, 6:38])
    found = found_in(run, save(pixels, tmp_path / "a.png"))
    expected = (places + 6.5) * 5 - 0.5 - (left, top)  # the centre of the first pixel is (0, 0)
    np.testing.assert_allclose(found.joints, expected, rtol=0, atol=1e-3)
    assert found.box == (-0.5, -0.5, width - 0.5, height - 0.5)
    assert np.array_equal(found.pixels, pixels)
    assert np.ptp(expected, axis=0).min() > 5  # they are not all at one place


def test_a_box_may_reach_beyond_the_image(run, network, tmp_path):
    pixels = noise(30, 40)
    around = np.zeros((88, 88, 3), np.uint8)  # 44 pixels of the crop, doubled
    around[40:70, 30:70] = pixels
    crop = np.asarray(Image.fromarray(around).resize((44, 44), Image.Resampling.BILINEAR))
    half = 88 / 1.375 / 1.25 / 2
    box = (43.5 - 30 - half, 43.5 - 40 - half, 43.5 - 30 + half, 43.5 - 40 + half)
    expected = (by_hand(network, run, crop[6:38, 6:38]) + 6.5) * 2 - 0.5 - (30, 40)
    path = save(pixels, tmp_path / "a.png")
    np.testing.assert_allclose(found_in(run, path, box=box).joints, expected, rtol=0, atol=1e-3)
    narrow = (box[0] + 5, box[1], box[2] - 5, box[3])  # the longer side counts
    np.testing.assert_allclose(found_in(run, path, box=narrow).joints, expected, rtol=0, atol=1e-3)


def test_coordinates_are_those_of_the_upright_image(run, tmp_path):
    exif, pixels = Image.Exif(), noise(50, 70)
    exif[0x0112] = 6  # to be shown turned to the right
    turned = found_in(run, save(pixels, tmp_path / "a.png", exif=exif), box=(5, 6, 40, 60))
    upright = found_in(run, save(np.rot90(pixels, -1), tmp_path / "b.png"), box=(5, 6, 40, 60))
    assert np.array_equal(turned.joints, upright.joints)
    assert turned.pixels.shape == (70, 50, 3)


def test_many_images_keep_their_order(run, tmp_path):
    paths = [save(noise(20 + n, 30, seed=n), tmp_path / f"{n}.png") for n in range(5)]
    found = predict(run, iter(paths), device="cpu")
    assert [each.path for each in found] == paths
    for each in found:
        np.testing.assert_allclose(each.joints, found_in(run, each.path).joints, atol=1e-3)
        assert each.pixels.shape[0] == 20 + paths.index(each.path)


def test_the_flip_test_is_that_of_the_run_unless_another_is_given(run, tmp_path):
    """With it, a mirrored image has mirrored joints."""
    shutil.copytree(run, tmp_path / "flipped")
    settings = {**json.loads((run / "config.json").read_text()), "flip_test": True}
    (tmp_path / "flipped/config.json").write_text(json.dumps(settings))
    pixels = noise(64, 64)
    path, mirrored = save(pixels, tmp_path / "a.png"), save(pixels[:, ::-1], tmp_path / "b.png")
    plain, flipped = (found_in(run, path, flip_test=flag).joints for flag in (False, True))
    assert np.abs(plain - flipped).max() > 1
    assert np.array_equal(found_in(run, path).joints, plain)
    assert np.array_equal(found_in(tmp_path / "flipped", path).joints, flipped)
    assert np.array_equal(found_in(tmp_path / "flipped", path, flip_test=False).joints, plain)
    other = found_in(run, mirrored, flip_test=True).joints[MIRRORED]
    inside = np.abs(flipped[:, 0] - 31.5) < 35  # no bin of the others has a counterpart
    assert inside.sum() >= 7
    np.testing.assert_allclose(63 - other[inside, 0], flipped[inside, 0], atol=1e-2)
    np.testing.assert_allclose(other[inside, 1], flipped[inside, 1], atol=1e-2)
