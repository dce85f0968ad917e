import pytest

from bsam.recipes.paper import TABLES, published


@pytest.mark.parametrize(
    ("table", "place", "mean", "std"),
    [
        ("classification", {"model": "resnet18", "data": "cifar100", "method": "asam"}, 81.68, 0.12),
        ("classification", {"model": "wide_resnet28_10", "data": "cifar100", "method": "bsam"}, 85.51, 0.14),
        ("classification", {"model": "pyramidnet110", "data": "cifar10", "method": "sgd"}, 97.1, 0.08),
        ("classification", {"model": "pyramidnet110", "data": "cifar100", "method": "looksam"}, 83.76, 0.45),
        ("rho_min_study", {"data": "cifar10", "rho_min": 0.25}, 96.18, 0.09),
        ("rho_min_study", {"data": "cifar100", "rho_min": 0.05}, 81.65, 0.04),
        ("label_noise", {"data": "cifar10", "method": "bsam", "label_noise": 0.8}, 78.27, None),
        ("label_noise", {"data": "cifar100", "method": "sgd", "label_noise": 0.6}, 31.46, None),
    ],
)
def test_numbers_as_printed(table, place, mean, std):
    found = published(table, **place)
    assert (found.mean, found.std) == (mean, std)


def test_every_cell_of_the_six_tables():
    assert {name: len(cells) for name, cells in TABLES.items()} == {
        "classification": 54,
        "rho_min_study": 10,
        "label_noise": 24,
        "transfer": (2 + 4) * 5 * 3,  # the paper's networks, and those whose weights can be converted
        "pose": 3 * 8,
        "quantization": 2 * 4,
    }


def test_the_study_and_the_classification_table_agree_where_they_are_one_run():
    for data, rho_min in (("cifar10", 0.05), ("cifar100", 0.1)):
        assert published("rho_min_study", data=data, rho_min=rho_min) == published(
            "classification", model="resnet18", data=data, method="bsam"
        )


def test_what_the_authors_did_not_run_is_said():
    notes = {(model, method): cell.note for (model, _, method), cell in TABLES["classification"].items()}
    longer = {place for place, note in notes.items() if "300 epochs" in note}
    assert longer == {("pyramidnet110", method) for method in ("asam", "fisher_sam", "friendly_sam")}
    assert {method for (_, method), note in notes.items() if note} == {
        "asam",
        "fisher_sam",
        "friendly_sam",
        "esam",
        "saf",
    }


def test_what_the_paper_does_not_have():
    assert published("classification", model="resnet18", data="cifar10", method="msam") is None
