import pytest

from bsam.lab.recipes import paper
from bsam.lab.recipes.paper import Published, PublishedTable

COUNTS = {
    "CLASSIFICATION": 54,
    "RHO_MIN_STUDY": 10,
    "LABEL_NOISE": 24,
    "TRANSFER": (2 + 4) * 5 * 3,  # the paper's networks, and those whose weights can be converted
    "POSE": 3 * 8,
    "QUANTIZATION": 2 * 4,
}


@pytest.mark.parametrize(
    ("table", "place", "mean", "std"),
    [
        (paper.CLASSIFICATION, ("resnet18", "cifar100", "asam"), 81.68, 0.12),
        (paper.CLASSIFICATION, ("wide_resnet28_10", "cifar100", "bsam"), 85.51, 0.14),
        (paper.CLASSIFICATION, ("pyramidnet110", "cifar10", "sgd"), 97.1, 0.08),
        (paper.CLASSIFICATION, ("pyramidnet110", "cifar100", "looksam"), 83.76, 0.45),
        (paper.RHO_MIN_STUDY, ("cifar10", 0.25), 96.18, 0.09),
        (paper.RHO_MIN_STUDY, ("cifar100", 0.05), 81.65, 0.04),
        (paper.LABEL_NOISE, ("cifar10", "bsam", 0.8, "all"), 78.27, None),
        (paper.LABEL_NOISE, ("cifar100", "sgd", 0.6, "all"), 31.46, None),
    ],
)
def test_numbers_as_printed(table, place, mean, std):
    assert table.numbers[place] == Published(mean, std, table.numbers[place].note)


def test_the_tables_are_complete():
    assert {name: len(getattr(paper, name).numbers) for name in COUNTS} == COUNTS


def test_the_study_and_the_classification_table_agree_where_they_share_a_run():
    for data, rho_min in (("cifar10", 0.05), ("cifar100", 0.1)):
        assert paper.RHO_MIN_STUDY.numbers[data, rho_min] == paper.CLASSIFICATION.numbers["resnet18", data, "bsam"]


def test_numbers_from_elsewhere_have_a_note():
    notes = {(model, method): cell.note for (model, _, method), cell in paper.CLASSIFICATION.numbers.items()}
    longer = {place for place, note in notes.items() if "300 epochs" in note}
    assert longer == {("pyramidnet110", method) for method in ("asam", "fisher_sam", "friendly_sam")}
    taken = {"asam", "fisher_sam", "friendly_sam", "esam", "saf"}
    assert {method for (_, method), note in notes.items() if note} == taken


def test_a_number_is_found_by_its_keys():
    table = PublishedTable(("data", "method"), {("digits", "sam"): Published(97.0)})
    assert table.number({"data": "digits", "method": "sam", "seed": 3}) == Published(97.0)
    assert table.number({"data": "digits", "method": "sgd"}) is None
    with pytest.raises(ValueError, match="method"):
        table.number({"data": "digits"})
