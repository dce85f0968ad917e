"""The claims of the paper as a grid: none is lost, and a cell has the sign of its column."""

import pandas as pd
import pytest

from bsam.lab.paper import join, paper_claims
from bsam.lab.report.page.claims_grid import ORDER, claims_grid
from page_runs import claim_runs, table


@pytest.fixture(scope="module")
def runs():
    return join(claim_runs())


@pytest.fixture(scope="module")
def grid(runs):
    return claims_grid(runs, dict.fromkeys(runs["experiment"], "place"))


def cells(table):
    titles = [column.title for column in table.columns]
    return [dict(zip(titles, row, strict=True)) for row in table.rows]


def test_each_claim_has_a_cell_with_its_numbers(runs, grid):
    claims = paper_claims(runs)
    shown = [cell for row in grid[0].rows for cell in row if cell.more]
    assert len(shown) == len(claims) > 10
    found = sorted(round(abs(cell.value), 6) for cell in shown if cell.value is not None)
    assert found == sorted(round(gap, 6) for gap in claims["difference"].abs().dropna())
    said = [f"{claim.claim}, {claim.at}: " for claim in claims.itertuples()]
    assert sorted(said) == sorted(cell.more.partition(": ")[0] + ": " for cell in shown)
    decided = [claim.outcome for claim in claims.itertuples() if claim.outcome != "open"]
    assert sorted(decided) == sorted(cell.marks[0][2:] for cell in shown if cell.marks[0][0] in "✓✗")


def test_signs_are_those_of_the_columns(runs, grid):
    row = cells(grid[0])[0]
    means = (
        runs[runs["experiment"] == runs["experiment"].iloc[0]].groupby("variant")[["score", "top_eigenvalue"]].mean()
    )
    score, top = means["score"], means["top_eigenvalue"]
    same, total = f"{ORDER[3]}", f"{ORDER[4]}"
    assert row[ORDER[0]].value == pytest.approx(score["sam"] - score["sgd"])
    assert row[same].value == pytest.approx(score["bsam"] - score["sam"])
    assert row[total].value == pytest.approx(score["bsam"] - score["sam-sum"])
    assert row[ORDER[5]].value == pytest.approx(score["bsam"] - score["sam-follow"])
    assert row[f"λmax: {ORDER[2]}"].value == pytest.approx(top["bsam"] - top["sgd"])
    assert row[f"λmax: {same}"].value == pytest.approx(top["bsam"] - top["sam"])
    assert row[same].text.startswith("-")
    assert f": {row[same].text} points" in row[same].more, "cell and sentence have one sign"
    assert row[same].more.index("BSAM (Algorithm 1) 95") < row[same].more.index(", SAM 96")
    assert f": {row[f'λmax: {same}'].text} [95 %" in row[f"λmax: {same}"].more


def test_a_claim_of_the_other_order_is_turned(runs):
    """In the paper, SAM is then better than BSAM: the difference of the column stays BSAM's minus SAM's."""
    turned = runs.assign(claimed=runs["claimed"].where(runs["variant"] != "bsam", 50.0))
    row = cells(claims_grid(turned, {})[0])[0]
    cell, before = row[ORDER[3]], cells(claims_grid(runs, {})[0])[0][ORDER[3]]
    assert cell.more.startswith("SAM better than BSAM")
    assert (cell.text, cell.value) == (before.text, before.value)
    assert (before.marks, cell.marks) == (("✗ contradicted",), ("✓ confirmed",))
    published = 50.0 - runs.loc[runs["variant"] == "sam", "claimed"].iloc[0]
    assert f"Published: {published:+.2f}." in cell.more


def test_cells_say_why_a_claim_is_open(runs, grid):
    first, second = cells(grid[0])
    assert first[ORDER[0]].marks == ("✓ confirmed",)
    assert first[ORDER[5]].marks == ("undecided",)
    assert second[ORDER[0]].marks == ("1 seed",)
    assert second[ORDER[4]].marks == ("not run",)
    assert (second[ORDER[4]].text, second[ORDER[5]].more) == (None, "")
    failed = runs.assign(failure=runs["variant"].map({"sam": "no better than chance"}).fillna(""))
    assert cells(claims_grid(failed, {})[0])[0][ORDER[0]].marks == ("did not learn",)


def test_the_sentence_counts_them(runs, grid):
    claims = paper_claims(runs)
    counts = claims["outcome"].value_counts()
    assert counts.to_dict() == {"confirmed": 1, "contradicted": 1, "open": len(claims) - 2}
    assert grid[1].startswith(
        f"Of {len(claims)} claims, 1 is confirmed, 1 is contradicted and {counts['open']} are open"
    )
    assert grid[0].rows[0][0].link == "#place"


def test_runs_without_claims_have_no_grid():
    assert claims_grid(table([{"experiment": "E", "row": "SGD", "score": 1.0}]), {}) is None
    assert claims_grid(pd.DataFrame(columns=["settings", "experiment"]), {}) is None
