"""The task of finding joints: its numbers against loops, and data from files against data in memory."""

from __future__ import annotations

import copy
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bsam.lab.config import Run
from bsam.lab.data.persons import LSP, MPII, Persons, PoseData, load_persons, read_lspet
from bsam.lab.data.stick_figures import stick_figures
from bsam.lab.tasks.pose import Pose
from helpers import draw_persons
from pose_reference import bilinear, came_from, decoded, moved, share_found, simcc_loss

CPU = torch.device("cpu")
SIDE, CROP, K, SIGMA = 32, 44, 2.0, 3.0
SAME = {"task": "pose", "model": "simcc_resnet8", "data": "stick_figures", "batch": 8}
RUN = Run.of("base", base="adam", lr=5e-3, image_size=SIDE, simcc_sigma=SIGMA, **SAME)
GROUPS = {  # of LSP
    "head": [12, 13],
    "shoulder": [8, 9],
    "elbow": [7, 10],
    "wrist": [6, 11],
    "hip": [2, 3],
    "knee": [1, 4],
    "ankle": [0, 5],
}
NAMES = LSP.joints
SWAP = {"left": "right", "right": "left"}
OTHER_SIDE = [NAMES.index(" ".join(SWAP.get(word, word) for word in name.split())) for name in NAMES]
MEAN, STD = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])


def with_gaps(persons: Persons) -> Persons:
    """Some joints are not labelled, or lie outside of the input; one person has no torso, one no joint inside."""
    y = persons.y.clone()
    y[0, [4, 11, 13]] = 0
    y[1, 2] = 0  # a hip: the other diagonal tells the size
    y[5, [2, 8]] = 0  # a hip and the other shoulder: nobody knows the size
    y[2, 6, :2] = torch.tensor([2.0, 20.0])  # in the stored crop, left of the input
    y[2, 7, :2] = torch.tensor([20.0, 60.0])  # below the stored crop
    y[3, :, :2] += 50
    return replace(persons, y=y)


@pytest.fixture(scope="module")
def data() -> PoseData:
    drawn = stick_figures(48, side=SIDE)
    return replace(drawn, train=with_gaps(drawn.train), test=with_gaps(drawn.test))


def task_of(data: PoseData, **settings) -> Pose:
    return Pose(RUN.changed(**settings), CPU, data=data)


@pytest.fixture(scope="module")
def network(data) -> nn.Module:
    """Trained a little, so that some joints are found and others are not."""
    task = task_of(data)
    network = task.network()
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for epoch in range(5):
        task.begin_epoch(epoch)
        for batch in task.batches(torch.arange(48).view(6, 8)):
            optimizer.zero_grad()
            task.losses(network(batch[0]), batch[1]).mean().backward()
            optimizer.step()
    return network.eval()


def inputs_by_hand(persons: Persons) -> torch.Tensor:
    """The 32 x 32 pixels in the middle of crops of 44 x 44, normalised."""
    pixels = persons.x.numpy()[:, :, 6:38, 6:38].transpose(0, 2, 3, 1) / 255
    return torch.from_numpy(((pixels - MEAN) / STD).transpose(0, 3, 1, 2)).float()


def to_image(persons: Persons, places: np.ndarray) -> np.ndarray:
    """Pixels of the crops (n, J, 2) as pixels of the images."""
    moved = np.empty_like(places)
    for (a, b, c), (d, e, f), own, new in zip(*persons.to_image.numpy().transpose(1, 0, 2), places, moved, strict=True):
        new[:, 0], new[:, 1] = a * own[:, 0] + b * own[:, 1] + c, d * own[:, 0] + e * own[:, 1] + f
    return moved


def truth_in_image(persons: Persons) -> np.ndarray:
    y = persons.y.double().numpy()
    return np.concatenate([to_image(persons, y[:, :, :2]), y[:, :, 2:]], axis=2)


def lsp_scores(found: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    sizes = []
    for joints in truth:
        pairs = [pair for pair in ((9, 2), (8, 3)) if all(joints[joint, 2] for joint in pair)]
        sizes.append(math.dist(*(joints[joint, :2] for joint in pairs[0])) if pairs else 0)

    def of(joints):
        return share_found(found, truth, sizes, 0.2, joints)

    scores = {f"pck_{name}": np.mean([of([joint]) for joint in joints]) for name, joints in GROUPS.items()}
    return {"pck": of(list(range(14))), **scores}


def softmax(values: np.ndarray) -> np.ndarray:
    return np.exp(values) / np.exp(values).sum(axis=-1, keepdims=True)


def probabilities(network: nn.Module, x: torch.Tensor, flip: bool, k: int) -> np.ndarray:
    with torch.no_grad():
        found = softmax(network(x).double().numpy())
        mirrored = softmax(network(x.flip(-1)).double().numpy())
    if not flip:
        return found
    merged, bins = found.copy(), found.shape[-1]
    for joint, other_side in enumerate(OTHER_SIDE):
        other = mirrored[:, other_side]
        merged[:, joint, 1] += other[:, 1]
        for b in range(bins):
            merged[:, joint, 0, b] += other[:, 0, (bins - k - b) % bins]  # x becomes side - 1 - x, of k bins a pixel
    return merged / 2


class Double(nn.Module):
    """A network in float64, for inputs in float32; its bins are widened to ``k`` for each pixel."""

    def __init__(self, network: nn.Module, k: int) -> None:
        super().__init__()
        self.network, self.k = copy.deepcopy(network).double(), k

    def forward(self, x):
        logits = self.network(x.double()).flatten(1, 2)
        wide = nn.functional.interpolate(logits, size=SIDE * self.k, mode="linear", align_corners=True)
        return wide.unflatten(1, (-1, 2))


@pytest.mark.parametrize(("flip", "k"), [(False, 2), (True, 2), (True, 3)])
def test_evaluation_is_that_of_a_loop(data, network, flip, k):
    task, test, network = task_of(data, flip_test=flip, simcc_k=float(k)), data.test, Double(network, k)
    x = inputs_by_hand(test)
    p = probabilities(network, x, flip, k)
    places = np.array([[[decoded(axis, k) for axis in joint] for joint in one] for one in p]) + 6
    expected = {
        f"test_{name}": value for name, value in lsp_scores(to_image(test, places), truth_in_image(test)).items()
    }
    with torch.no_grad():
        logits = network(x).numpy()
    joints = test.y.double().numpy() - np.array([6, 6, 0])
    losses = [simcc_loss(one, own, k, SIGMA) for one, own in zip(logits, joints, strict=True)]
    assert losses[3] == 0
    assert task.evaluate(network) == pytest.approx({"test_loss": np.mean(losses), **expected}, rel=2e-6)
    assert 0.05 < expected["test_pck"] < 0.95
    assert len({*expected.values()}) > 4


def of_mpii(data: PoseData, heads: torch.Tensor | None) -> PoseData:
    def widened(persons):
        y = torch.cat([persons.y, persons.y[:, [12, 7]] + torch.tensor([1.0, 2.0, 0.0])], dim=1)
        return replace(persons, y=y, head_sizes=None if heads is None else heads[: len(persons)])

    return replace(data, train=widened(data.train), test=widened(data.test), skeleton=MPII)


def test_persons_of_mpii_are_measured_by_their_heads(data):
    heads = torch.linspace(5, 60, 48)
    mpii = of_mpii(data, heads)
    task = task_of(mpii)
    y, test = mpii.train.y.double().numpy(), mpii.test
    pose = [[place[flag > 0].mean() for place in (x, y)] for x, y, flag in y.transpose(1, 2, 0)]
    found, truth = to_image(test, np.array([pose] * len(test))), truth_in_image(test)

    def of(joints):
        return share_found(found, truth, heads[: len(test)].tolist(), 0.5, joints)

    scores = task.baseline()
    assert scores["pck"] == pytest.approx(of([joint for joint in range(16) if joint not in (6, 7)]))
    assert scores["pck_wrist"] == pytest.approx((of([10]) + of([15])) / 2)
    assert scores["pck_head"] == pytest.approx(of([9]))
    assert 0 < scores["pck"] < 1
    assert task.network()(torch.zeros(1, 3, SIDE, SIDE)).shape == (1, 16, 2, 64)


@pytest.mark.parametrize("augment", ["none", "scale-rotate", "scale-rotate-flip"])
def test_augmented_samples_and_their_losses_are_those_of_a_loop(data, augment):
    task = task_of(data, augment=augment, seed=3)
    task.begin_epoch(2)
    index = torch.tensor([5, 0, 2, 7, 1])
    x, y, found = task.batch(index)
    assert torch.equal(found, index)
    rows = task._augment.draws(48, 3, 2)[index].tolist()
    assert {row[2] for row in rows} == ({0.0, 1.0} if augment == "scale-rotate-flip" else {0.0})
    assert (len({row[0] for row in rows}) == 1) == (augment == "none")
    network = task.network().eval()
    with torch.no_grad():
        losses = task.losses(network(x), y)
        logits = network(x).double().numpy()
    for i, (person, row) in enumerate(zip(index.tolist(), rows, strict=True)):
        joints = data.train.y[person].double().numpy()
        if row[2]:
            joints = joints[OTHER_SIDE]
        places = np.array([(*moved(*joint[:2], row, CROP, SIDE), joint[2]) for joint in joints])
        assert float(losses[i]) == pytest.approx(simcc_loss(logits[i], places, K, SIGMA), rel=1e-4)
        for place in ((3, 4), (16, 20), (31, 0)):
            pixel = bilinear(data.train.x[person].double().numpy(), *came_from(*place, row, CROP, SIDE))
            expected = (pixel / 255 - MEAN) / STD
            np.testing.assert_allclose(x[i, :, place[1], place[0]].numpy(), expected, atol=1e-4)


def test_batches_are_single_batches_and_functions_of_seed_and_epoch(data):
    indices = torch.randperm(48, generator=torch.Generator().manual_seed(0)).view(6, 8)

    def images(seed, *epochs):
        task = task_of(data, seed=seed)
        for epoch in epochs:
            task.begin_epoch(epoch)
        batches = list(task.batches(indices))
        for batch, index in zip(batches, indices, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(batch, task.batch(index), strict=True))
        return torch.cat([batch[0] for batch in batches])

    first = images(1, 0)
    assert torch.equal(first, images(1))
    assert torch.equal(images(1, 4), images(1, 0, 3, 4))
    assert not torch.equal(first, images(1, 1))
    assert not torch.equal(first, images(2, 0))


def test_the_loss_of_flatness_is_the_mean_of_the_losses_of_plain_images(data, monkeypatch):
    monkeypatch.setattr("bsam.lab.tasks.pose.EVALUATION_BATCH", 20)
    task = task_of(data)
    network = task.network().eval()
    batches = task.examples()
    assert [len(x) for x, _ in batches] == [20, 20, 8]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    torch.testing.assert_close(x, inputs_by_hand(data.train), atol=1e-4, rtol=0)
    with torch.no_grad():
        logits = network(x)
        losses = task.losses(logits, y)
        assert float(task.loss(logits, y)) == pytest.approx(float(losses.mean()))
    joints = data.train.y.double().numpy() - np.array([6, 6, 0])
    expected = [simcc_loss(one, own, K, SIGMA) for one, own in zip(logits.double().numpy(), joints, strict=True)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-4)
    ((few, _),) = task.examples(5)
    assert torch.equal(few, x[[0, 9, 18, 27, 36]])
    assert sum(len(x) for x, _ in task.examples(1000)) == 48


def test_limits_take_evenly_spaced_persons(data, network):
    task = task_of(data, limit_train=10, limit_test=3)
    assert task.samples == 10
    ((x, _),) = task.examples()
    assert torch.equal(x, torch.cat([x for x, _ in task_of(data).examples()])[0:40:4])
    part = replace(data, test=data.test.part([0, 4, 8]))
    assert task.evaluate(network) == task_of(part).evaluate(network)
    assert task.notes()["data"]["images"] == {"train": 10, "test": 3}
    assert task_of(data, limit_train=48, limit_test=12).samples == 48


def test_predictions_are_in_pixels_of_the_inputs(data, network):
    found = task_of(data).predictions(network)
    rows = list(range(8))
    assert np.array_equal(found["pixels"], data.test.x.numpy()[rows, :, 6:38, 6:38].transpose(0, 2, 3, 1))
    assert found["pixels"].dtype == np.uint8
    joints = data.test.y[rows].numpy() - np.array([6, 6, 0])
    np.testing.assert_allclose(found["truth"][:, :, :2], joints[:, :, :2], atol=1e-4)
    inside = (joints[:, :, :2] >= -0.5).all(axis=2) & (joints[:, :, :2] <= 31.5).all(axis=2)
    assert np.array_equal(found["truth"][:, :, 2], joints[:, :, 2] * inside)
    p = probabilities(network, inputs_by_hand(data.test), flip=False, k=2)[rows]
    places = [[[decoded(axis, K) for axis in joint] for joint in one] for one in p]
    np.testing.assert_allclose(found["found"], places, atol=1e-3)
    flipped = task_of(data, flip_test=True).predictions(network)
    p = probabilities(network, inputs_by_hand(data.test), flip=True, k=2)[rows]
    places = [[[decoded(axis, K) for axis in joint] for joint in one] for one in p]
    np.testing.assert_allclose(flipped["found"], places, atol=1e-3)
    many = task_of(replace(data, test=data.train)).predictions(network)["pixels"]  # evenly spaced
    assert np.array_equal(many, data.train.x.numpy()[:48:6, :, 6:38, 6:38].transpose(0, 2, 3, 1))
    few = task_of(replace(data, test=data.test.part(slice(5)))).predictions(network)
    assert np.array_equal(few["pixels"], found["pixels"][:5])
    assert {name: len(part) for name, part in few.items()} == {"pixels": 5, "found": 5, "truth": 5}


def test_notes(data):
    task = task_of(data)
    notes = task.notes()
    split = f"{data.split}; 11 persons of known size are scored"
    assert notes["data"] == {"split": split, "images": {"train": 48, "test": 12}, "left_out": []}
    assert notes["baseline"] == {"title": "mean pose, no network", "scores": task.baseline()}
    assert [notes["pose"][name] for name in ("side", "k")] == [32, 2.0]
    assert notes["pose"]["skeleton"]["joints"] == LSP.joints
    np.testing.assert_allclose([notes["pose"]["mean"], notes["pose"]["std"]], [MEAN, STD])
    assert "weights" not in notes
    assert task.fingerprint() == data.digest != stick_figures(48, seed=1, side=SIDE).digest


def test_a_network_that_gives_no_numbers_gives_a_score_and_no_loss(data):
    network = task_of(data).network().eval()
    with torch.no_grad():
        network.head.x.weight.fill_(math.nan)
        network.head.y.weight.fill_(math.inf)
    for flip in (False, True):
        task = task_of(data, flip_test=flip)
        found = task.evaluate(network)
        assert math.isnan(found["test_loss"])
        assert all(0 <= value <= 1 for name, value in found.items() if name != "test_loss")
        assert np.isfinite(task.predictions(network)["found"]).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty persons in files; each test has a copy."""
    place = tmp_path_factory.mktemp("persons") / "lspet"
    return place, draw_persons(place)


@pytest.fixture
def lspet(folder, tmp_path):
    shutil.copytree(folder[0], tmp_path / "lspet")
    return tmp_path / "lspet"


FILES = replace(RUN, data="lspet")


def test_persons_from_files_are_streamed_and_give_the_same_numbers(lspet):
    """A network on cpu:0 has its data on another device, in the eyes of torch."""
    streamed = Pose(FILES, torch.device("cpu:0"), data_dir=lspet.parent)
    loaded, _ = load_persons(read_lspet(lspet), SIDE)
    sets = [replace(part, x=part.x.clone(), images=()) for part in (loaded.train, loaded.test)]
    own = Pose(FILES, CPU, data=replace(loaded, train=sets[0], test=sets[1]))
    assert (streamed._host, streamed._host == streamed.device, own._host == own.device) == (CPU, False, True)
    assert (streamed.samples, len(streamed._test), streamed.classes) == (18, 2, 14)
    network = own.network().eval()
    assert streamed.evaluate(network) == own.evaluate(network)
    assert streamed.baseline() == own.baseline()
    for task in (streamed, own):
        task.begin_epoch(3)
    indices = torch.arange(18).flip(0).view(3, 6)
    for ours, theirs in zip(streamed.batches(indices), own.batches(indices), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for ours, theirs in zip(streamed.examples(7), own.examples(7), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for name, found in own.predictions(network).items():
        assert np.array_equal(streamed.predictions(network)[name], found)
    assert streamed.notes()["data"]["split"] == "90/10 of the images, seed 0; 2 persons of known size are scored"
    assert streamed.initialise(network) == ["The initial weights are random; to load pretrained ones, use --weights."]
    assert own.initialise(network) == []
