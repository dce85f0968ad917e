"""The confusion matrix and the worst mistakes, against scikit-learn and a loop over the samples."""

import pytest
import torch
from sklearn.metrics import confusion_matrix as sklearn_confusion

from bsam.lab.config import Run
from bsam.lab.tasks.classification import MISTAKES, Classification, class_predictions

CPU = torch.device("cpu")


def test_the_matrix_is_that_of_scikit_learn_also_without_samples_of_some_class():
    draws = torch.Generator().manual_seed(0)
    truth, found = (torch.randint(0, 6, (200,), generator=draws) for _ in range(2))
    logits = torch.eye(8)[found]
    ours = class_predictions(torch.nn.Identity(), [(logits, truth)], 8)["confusion"]
    assert ours.tolist() == sklearn_confusion(truth, found, labels=range(8)).tolist()
    assert ours.tolist() != ours.T.tolist()  # rows and columns can be told apart


@pytest.mark.parametrize("size", [1, 7, 200])
def test_the_mistakes_are_those_with_most_confidence_for_any_batch_size(size):
    draws = torch.Generator().manual_seed(1)
    logits, truth = torch.randn(200, 5, generator=draws), torch.randint(0, 5, (200,), generator=draws)
    kept = class_predictions(torch.nn.Identity(), zip(logits.split(size), truth.split(size), strict=True), 5)
    mistakes = []
    for row, label in zip(logits.tolist(), truth.tolist(), strict=True):
        largest = max(row)
        if row.index(largest) != label:
            share = 1 / sum(torch.tensor(row).sub(largest).exp().tolist())
            mistakes.append((share, label, row.index(largest), row))
    mistakes.sort(reverse=True)
    assert len(mistakes) > MISTAKES
    shares, labels, found, inputs = zip(*mistakes[:MISTAKES], strict=True)
    assert kept["confidence"].tolist() == pytest.approx(shares)
    assert (kept["truth"].tolist(), kept["found"].tolist()) == ([*labels], [*found])
    assert kept["inputs"].tolist() == [*inputs]
    assert kept["confusion"].tolist() == sklearn_confusion(truth, logits.argmax(1)).tolist()


def test_without_mistakes_there_are_no_pixels():
    logits = torch.eye(3)
    kept = class_predictions(torch.nn.Identity(), [(logits, torch.arange(3))], 3)
    assert kept["confusion"].equal(torch.eye(3, dtype=torch.int64))
    assert [len(kept[name]) for name in ("inputs", "truth", "found", "confidence")] == [0, 0, 0, 0]


def test_a_task_counts_its_evaluation_set_and_keeps_the_images_as_they_are_stored():
    task = Classification(Run("sgd", limit_test=50), CPU)
    network = task.network().eval()
    kept = task.predictions(network)
    assert kept["class_names"].tolist() == [*"0123456789"]
    (x, y), *_ = task.eval_examples()
    found = network(x).argmax(1)
    assert kept["confusion"].tolist() == sklearn_confusion(y, found, labels=range(10)).tolist()
    assert kept["confusion"].trace() / 50 == task.evaluate(network)["test_accuracy"]
    stored = x[(network(x).softmax(1).max(1).values * (found != y)).argmax()]
    shown = torch.from_numpy(kept["pixels"][0]).float().permute(2, 0, 1)
    assert kept["pixels"].shape == (MISTAKES, 8, 8, 1)
    assert torch.corrcoef(torch.stack([stored.flatten(), shown.flatten()]))[0, 1] > 0.9999
