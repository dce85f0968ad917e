"""Skeletons: which lines and dots are drawn, in which colours; and the figure of a recipe, from run directories."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from bsam.lab.data.pose.joints import LSP, MPII, Skeleton
from bsam.lab.recipes import RECIPES
from bsam.lab.report.figures import prediction_pictures
from bsam.lab.report.recipe_results import FIGURES
from bsam.lab.training.config import Run
from bsam.lab.training.run_dir import RunState
from pose_runs import SETTINGS, SIDE, write_predictions

RIGHT, LEFT, MIDDLE, DARK = "#e69f00", "#56b4e9", "#ffffff", "#202020"
SKELETON = Skeleton(("head", "right hand", "left hand", "neck"), ((1, 2),), ((0, 3), (3, 1), (3, 2), (1, 2)))
RECIPE = RECIPES["label-noise"]  # the figure does not depend on it


def lines_of(ax):
    """The lines of the outline and of the skeleton, each as its ends, its colour and its width."""
    return [
        [
            (line.tolist(), to_hex(colour), width)
            for line, colour, width in zip(
                collection.get_segments(),
                np.resize(collection.get_colors(), (len(collection.get_segments()), 4)),
                np.resize(collection.get_linewidths(), len(collection.get_segments())),
                strict=True,
            )
        ]
        for collection in ax.collections[:2]
    ]


def dots_of(ax):
    dots = ax.collections[2]
    return [(place.tolist(), to_hex(c)) for place, c in zip(dots.get_offsets(), dots.get_facecolors(), strict=True)]


def drawn_on(joints, skeleton=SKELETON, **options):
    ax = Figure().add_subplot()
    prediction_pictures.show_picture(ax, np.zeros((30, 40, 3), np.uint8))
    prediction_pictures.draw_skeleton(ax, np.array(joints, dtype=float), skeleton, **options)
    return ax


JOINTS = [[20, 3], [5, 20], [35, 21], [20, 9]]


def test_each_side_has_a_colour_over_a_wider_dark_outline():
    ax = drawn_on(JOINTS, width=2)
    outline, lines = lines_of(ax)
    ends = [[JOINTS[one], JOINTS[other]] for one, other in SKELETON.edges]
    assert [line[:2] for line in lines] == list(zip(ends, [MIDDLE, RIGHT, LEFT, MIDDLE], strict=True))
    assert [line[:2] for line in outline] == [(end, DARK) for end in ends]
    assert {width for *_, width in lines} == {2}
    assert min(width for *_, width in outline) >= 3
    assert dots_of(ax) == list(zip(JOINTS, [MIDDLE, RIGHT, LEFT, MIDDLE], strict=True))
    assert {to_hex(colour) for colour in ax.collections[2].get_edgecolors()} == {DARK}
    below, above, dots = (collection.get_zorder() for collection in ax.collections)
    assert below <= above < dots


def test_joints_that_are_not_labelled_or_not_finite_are_not_drawn():
    for ax in (
        drawn_on(JOINTS, labelled=np.array([True, False, True, True])),
        drawn_on([JOINTS[0], [np.nan, 20], *JOINTS[2:]]),
        drawn_on([JOINTS[0], [5, np.inf], *JOINTS[2:]], labelled=np.ones(4, bool)),
    ):
        outline, lines = lines_of(ax)
        assert [line[0] for line in lines] == [line[0] for line in outline] == [JOINTS[0::3], JOINTS[3:1:-1]]
        assert [place for place, _ in dots_of(ax)] == [JOINTS[0], *JOINTS[2:]]
    assert lines_of(drawn_on(JOINTS, labelled=np.zeros(4, bool))) == [[], []]


@pytest.mark.parametrize("skeleton", [LSP, MPII])
def test_the_sides_of_real_skeletons(skeleton):
    ax = drawn_on(np.random.default_rng(0).uniform(0, 30, (len(skeleton.joints), 2)), skeleton)
    colours = [line[1] for line in lines_of(ax)[1]]
    assert colours.count(RIGHT) == colours.count(LEFT) == 6
    for (one, other), colour in zip(skeleton.edges, colours, strict=True):
        names = skeleton.joints[one] + skeleton.joints[other]
        assert colour == {(True, False): RIGHT, (False, True): LEFT}.get(("right" in names, "left" in names), MIDDLE)


def test_the_picture_keeps_its_limits_and_its_pixels():
    ax = drawn_on([[-20, 3], [5, 90], [35, 21], [20, 9]])
    assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, 39.5), (29.5, -0.5))  # y points down
    other = Figure().add_subplot()
    prediction_pictures.show_picture(other, np.zeros((15, 20, 3), np.uint8), (-0.5, -0.5, 39.5, 29.5))
    assert (other.get_xlim(), other.get_ylim()) == ((-0.5, 39.5), (29.5, -0.5))


@pytest.fixture
def state(tmp_path):
    """Write what the figure reads of a run; returns its state."""

    def make(name, method="sgd", arguments=None, persons=3, pck=0.5, seed=0, finished=True, side=SIDE, **settings):
        run = Run(method, arguments or {}, **{**SETTINGS, "seed": seed, "image_size": side, **settings})
        folder = tmp_path / name
        folder.mkdir()
        write_predictions(folder, persons, side)
        return RunState(run, folder, ({"epoch": 1, "test_pck": pck},), finished)

    return make


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, as matplotlib holds them."""
    saved = []
    monkeypatch.setattr(prediction_pictures, "save", lambda drawn, path: saved.append((drawn, path)))
    return saved


def test_a_row_of_labels_and_a_row_per_method_of_the_first_seed(state, figures, tmp_path):
    states = [
        state("sgd", pck=0.25, seed=3),
        state("sam", "sam", pck=0.5, seed=3),
        state("bsam", "bsam", {"passes": 2}, pck=0.755, seed=3),
        state("other seed", seed=4),
        state("unfinished", "asam", seed=3, finished=False),
    ]
    kept_nothing = state("kept nothing", "gsam", seed=3)
    (kept_nothing.path / "predictions.npz").unlink()
    FIGURES["skeletons"](RECIPE, [*states, kept_nothing], tmp_path / "skeletons.png")
    ((drawn, path),) = figures
    assert path == tmp_path / "skeletons.png"
    (part,) = drawn.subfigs
    assert part.get_suptitle() == "SimCC, ResNet-8 on Stick figures, seed 3"
    axes = np.array(part.axes).reshape(4, 3)
    titles = ["label", "SGD\nPCK 25.0 %", "SAM\nPCK 50.0 %", "BSAM (2 passes)\nPCK 75.5 %"]
    assert [ax.get_ylabel() for ax in axes[:, 0]] == titles
    with np.load(states[0].path / "predictions.npz") as stored:
        truth = stored["truth"]
    for row, each in zip(axes, [states[0], *states[:3]], strict=True):
        with np.load(each.path / "predictions.npz") as stored:
            joints = truth if row[0] is axes[0, 0] else stored["found"]
            for person, ax in enumerate(row):
                (image,) = ax.get_images()
                assert np.array_equal(image.get_array(), stored["pixels"][person])
                shown = joints[person, truth[person, :, 2] > 0] if joints is truth else joints[person]
                assert np.array_equal([place for place, _ in dots_of(ax)], shown[:, :2].astype(float))
    assert [len(dots_of(ax)) for ax in axes[0]] == [14, 13, 14]
    (legend,) = part.legends
    assert [text.get_text() for text in legend.get_texts()] == ["person's right", "person's left"]
    assert [to_hex(line.get_color()) for line in legend.get_lines()] == [RIGHT, LEFT]


def test_eight_persons_at_most_and_other_data_in_a_part_of_its_own(state, figures, tmp_path):
    states = [state("a", persons=10), state("b", data="lspet", persons=2, side=16), state("c", "sam", persons=10)]
    prediction_pictures.draw_skeletons(RECIPE, states, tmp_path / "skeletons.png")
    first, second = figures[0][0].subfigs
    assert second.get_suptitle() == "SimCC, ResNet-8 on LSP Extended, seed 0"
    assert np.array([ax.get_visible() for ax in first.axes]).reshape(3, 8).all()
    shown = np.array([ax.get_visible() for ax in second.axes]).reshape(2, 8)
    assert shown[:, :2].all()
    assert not shown[:, 2:].any()
