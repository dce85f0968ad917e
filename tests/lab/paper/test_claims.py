"""The paper's claims: at its radii, at matched radii and at tuned ones; scores and largest eigenvalues."""

import math

import numpy as np
import pandas as pd
import pytest

from bsam.lab.analysis.runs_table import COLUMNS
from bsam.lab.analysis.sentences import comparison, evidence, seeds_sentence, sentence
from bsam.lab.analysis.significance import compare_rows
from bsam.lab.config import Run
from bsam.lab.paper import MATCHED_RADII, PAPER_RADII, TUNED_RADII, join, paper_claims
from bsam.lab.recipes.plan import describe
from bsam.lab.recipes.variants import arguments_on, variants

NOISE = np.array([0.0, 0.1, -0.1, 0.05])


def runs_of(**scores):
    """Runs of the paper's experiment with ResNet-18 on CIFAR-10; a name ending in ``_tuned`` is tuned."""
    rows = []
    for number, (name, score) in enumerate(scores.items()):
        variant = variants()[name.removesuffix("_tuned").replace("_", "-")]
        for seed, noise in enumerate(np.roll(NOISE, number)):
            run = Run(variant.method, arguments_on(variant, "cifar10"), model="resnet18", data="cifar10", seed=seed)
            about = describe(run, tuned=True, row=f"{variant.title}, tuned") if "_tuned" in name else describe(run)
            known = {key: value for key, value in about.items() if key in COLUMNS and value is not None}
            numbers = {"score": score + noise, "top_eigenvalue": 100 - score + 2 * noise, "eigenvalue_samples": 256}
            more = {"seed": seed, "method": run.method, "settings": run.settings(), "unit": "test accuracy in %"}
            rows.append({**COLUMNS, **known, **numbers, **more})
    return join(pd.DataFrame(rows))


def outcomes(claims):
    scores = claims[~claims["claim"].str.contains("λmax")]
    return {(row.at, row.claim, row.row, row.against): row.outcome for row in scores.itertuples()}


def test_orders_of_the_table_at_the_papers_radii():
    found = outcomes(paper_claims(runs_of(sgd=95.0, sam=96.0, bsam=95.5)))
    assert found[PAPER_RADII, "SAM better than SGD", "SAM", "SGD"] == "confirmed"
    assert found[PAPER_RADII, "BSAM better than SAM", "BSAM (Algorithm 1)", "SAM"] == "contradicted"
    (missing,) = [key for key in found if key[0] == MATCHED_RADII]
    assert found[missing] == "open"


def test_matched_radii_are_corrected_for_each_other():
    claims = paper_claims(runs_of(sgd=95.0, sam=96.0, bsam=97.0, sam_sum=96.5, sam_follow=97.5))
    found = outcomes(claims)
    assert found[MATCHED_RADII, "BSAM better than SAM", "BSAM (Algorithm 1)", "SAM (sum)"] == "confirmed"
    assert found[MATCHED_RADII, "BSAM better than SAM", "BSAM (Algorithm 1)", "SAM (follow)"] == "contradicted"
    matched = claims[(claims["at"] == MATCHED_RADII) & claims["claim"].str.startswith("BSAM better")]
    assert set(matched["tests"]) == {2}
    assert matched["difference"].tolist() == pytest.approx([0.5, -0.5], abs=0.1)
    assert (matched["low"] < matched["difference"]).all()
    assert (matched["difference"] < matched["high"]).all()


def test_a_divergence_is_that_of_its_row():
    runs = runs_of(sgd=95.0, sam=96.0, bsam=97.0, sam_sum=96.5)
    runs.loc[(runs["row"] == "SAM (sum)") & (runs["seed"] == 0), ["state", "score"]] = ["diverged", math.nan]
    claims = paper_claims(runs)
    (matched,) = claims[(claims["at"] == MATCHED_RADII) & ~claims["claim"].str.contains("λmax")].to_dict("records")
    assert "BSAM (Algorithm 1) diverged" not in evidence(matched)
    assert matched["shared"] == 3


def test_tuned_rows_are_compared_with_tuned_rows():
    scores = {"sgd": 95.0, "sam": 96.0, "bsam": 97.0, "sam_tuned": 97.0, "bsam_tuned": 96.0}
    found = outcomes(paper_claims(runs_of(**scores)))
    assert found[TUNED_RADII, "BSAM better than SAM", "BSAM (Algorithm 1), tuned", "SAM, tuned"] == "contradicted"
    assert found[TUNED_RADII, "SAM better than SGD", "SAM, tuned", "SGD"] == "confirmed"


def test_a_smaller_eigenvalue_confirms_that_bsam_is_flatter():
    claims = paper_claims(runs_of(sgd=95.0, sam=96.0, bsam=97.0))
    flat = claims[claims["claim"].str.contains("λmax") & (claims["at"] == PAPER_RADII)]
    assert set(flat["row"]) == {"SGD", "SAM"}
    assert set(flat["outcome"]) == {"confirmed"}
    steep = paper_claims(runs_of(sgd=95.0, sam=96.0, bsam=94.0))
    assert set(steep[steep["claim"].str.contains("λmax")]["outcome"]) == {"contradicted"}


def test_only_networks_that_were_measured_on_equally_many_samples_are_compared():
    runs = runs_of(sgd=95.0, sam=96.0, bsam=97.0)
    runs.loc[runs["row"] == "SAM", "eigenvalue_samples"] = 1000
    (flat,) = paper_claims(runs).loc[lambda claims: claims["claim"].str.contains("λmax")].to_dict("records")
    assert (flat["row"], flat["shared"]) == ("SGD", 4)
    assert flat["claim"].endswith("256 training samples)")
    runs.loc[(runs["variant"] == "bsam") & (runs["seed"] > 0), "eigenvalue_samples"] = 1000
    (flat,) = paper_claims(runs).loc[lambda claims: claims["claim"].str.contains("λmax")].to_dict("records")
    assert (flat["row"], flat["shared"]) == ("SAM", 3)
    assert flat["claim"].endswith("1,000 training samples)")


def test_other_protocols_have_no_claims():
    runs = runs_of(sgd=95.0, sam=96.0, bsam=97.0)
    assert paper_claims(runs.assign(claimed=math.nan)).empty


def test_sentences_state_the_numbers():
    runs = runs_of(sgd=95.0, sam=96.0, bsam=95.0)
    table = compare_rows(runs)
    rows = {row["row"]: row for row in table.to_dict("records")}
    text = evidence(rows["SAM"])
    for number in (f"{rows['SAM']['mean']:.2f}", f"{rows['SAM']['difference']:+.2f}", f"{rows['SAM']['low']:+.2f}"):
        assert number in text
    result = comparison(runs, table)
    assert result.baseline == "SGD"
    assert str(result).startswith("SAM is better than SGD")
    assert all(name in str(result) for name in ("BSAM (Algorithm 1)", "3 passes", f"{rows['SGD']['mean']:.2f}"))
    level = sentence(rows["BSAM (Algorithm 1)"])
    assert rows["BSAM (Algorithm 1)"]["verdict"] in level
    assert "better" not in level
    (pair,) = result.pairs.to_dict("records")
    assert (pair["row"], pair["against"], pair["verdict"]) == ("BSAM (Algorithm 1)", "SAM", "worse")
    assert pair["p_holm"] == pair["p"]  # the only pair without the baseline
    assert f"{pair['difference']:+.2f}" in str(result).partition("BSAM (Algorithm 1) is worse than SAM")[2]
    level = runs_of(sgd=90.0, sam=95.0, bsam=95.01)
    assert "No difference shown between SAM and BSAM (Algorithm 1)" in str(comparison(level, compare_rows(level)))
    few = compare_rows(runs[runs["seed"] < 2]).to_dict("records")[1]
    assert "1 more seed" in seeds_sentence(few)
    assert few["row"] in sentence(few)
