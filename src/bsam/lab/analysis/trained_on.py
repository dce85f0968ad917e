"""Tell runs apart whose settings read alike, but which were trained on other data or started from other networks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.printing import group_by
from ..config import Run
from ..data import DATASETS, FOLDER
from ..recipes.plan import experiment_title

END_OF_NAME = re.compile(r"seed\d+-[0-9a-f]{8}/?$")  # of the directory of a planned run
DIGEST_DIGITS = 8  # of a digest that is shown


def separate_experiments(rows: Sequence[dict[str, Any]]) -> None:
    """Extend the titles of experiments whose runs were trained on other data, or started from other networks.

    A title has only the name of a folder, and runs are compared and averaged by their titles. The data is known by
    its digest. Networks are the same if they were trained with the same settings except the seed, unless runs with
    the same seed start from several of them. Where no digest was stored, the path decides. Titles that a plan chose
    remain.

    Args:
        rows: runs as dictionaries, with the columns of :func:`bsam.lab.analysis.runs_table.read_runs`.
    """
    for title, group in group_by(rows, lambda row: row["experiment"]).items():
        titled = [row for row in group if _has_path(row["settings"]) and title == _title_of(row)]
        data = _data_keys(titled)
        networks = _network_keys(titled, data)
        _extend(titled, data, "data", [_folder(row["settings"]["data"]) for row in titled])
        _extend(titled, networks, "initial network", [row["settings"]["init"] or "" for row in titled])


def _has_path(settings: Mapping[str, Any] | None) -> bool:
    return settings is not None and (settings["data"] not in DATASETS or settings["init"] is not None)


def _title_of(row: Mapping[str, Any]) -> str:
    return experiment_title(Run.of(**row["settings"]))


def _folder(data: str) -> str:
    return data.removeprefix(FOLDER)


def _data_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a text for each run that is equal for equal data. A data set of ours is known by its name."""
    names = [row["settings"]["data"] for row in rows]
    digests = [
        # the digest of arrays depends on the samples that are held out, and so on the seed
        _digest(row, "data") if name.startswith(FOLDER) or row["settings"]["eval_split"] != "holdout" else None
        for row, name in zip(rows, names, strict=True)
    ]
    keys = _with_known(names, digests)
    return ["" if name in DATASETS else key for name, key in zip(names, keys, strict=True)]


def _network_keys(rows: Sequence[Mapping[str, Any]], data: Sequence[str]) -> list[tuple[str, str]]:
    """Return a pair for each run that is equal for equal initial networks, or for those of different seeds."""
    paths = [row["settings"]["init"] or "" for row in rows]
    ways = _with_known([END_OF_NAME.sub("", path) for path in paths], [_digest(row, "training") for row in rows])
    networks = _with_known(paths, [_digest(row, "network") for row in rows])
    keys = [(way, "") for way in ways]
    for numbers in group_by(range(len(rows)), lambda number: (data[number], ways[number])).values():
        seeds = {rows[number]["seed"] for number in numbers}
        starts = {(rows[number]["seed"], networks[number]) for number in numbers}
        if len(starts) > len(seeds):  # a seed has several initial networks
            for number in numbers:
                keys[number] = ways[number], networks[number]
    return keys


def _digest(row: Mapping[str, Any], name: str) -> str | None:
    """Return a digest that ``identity.json`` has; None if there is none, as in older versions."""
    digests = row["identity"]
    if isinstance(digests, Mapping) and name != "data":
        digests = digests.get("init")
    digest = digests.get(name) if isinstance(digests, Mapping) else None
    return digest if isinstance(digest, str) else None


def _with_known(places: Sequence[str], digests: Sequence[str | None]) -> list[str]:
    """Return the digests; where there is none, the only one known of the same place, or else the place."""
    known: dict[str, set[str]] = {place: set() for place in places}
    for place, digest in zip(places, digests, strict=True):
        if digest is not None:
            known[place].add(digest)
    keys = []
    for place, digest in zip(places, digests, strict=True):
        only = next(iter(known[place])) if len(known[place]) == 1 else place
        keys.append(digest or only or place)
    return keys


def _extend(rows: Sequence[dict[str, Any]], keys: Sequence[Any], words: str, paths: Sequence[str]) -> None:
    """Add to the titles of runs the part of the path in which their keys differ, if there are several keys."""
    path_of = dict(zip(reversed(keys), reversed(paths), strict=True))  # the first path of each key
    if len(path_of) < 2:
        return
    names = shortest_ends(list(path_of.values()))
    labels = {}
    for key, name in zip(path_of, names, strict=True):
        digest = next(part for part in reversed([key] if isinstance(key, str) else key) if part)
        labels[key] = name if names.count(name) == 1 else f"{name} ({digest[:DIGEST_DIGITS]})"
    for row, key in zip(rows, keys, strict=True):
        row["experiment"] += f", {words} {labels[key]}"


def shortest_ends(paths: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths that differ, or the whole paths if some are equal.

    Example:
        >>> shortest_ends(["/a/photos", "/b/photos"]), shortest_ends(["runs/sgd", "sam"])
        (['a/photos', 'b/photos'], ['sgd', 'sam'])
    """
    parts = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        ends = [str(Path(*each[-count:])) for each in parts]
        if len(set(ends)) == len(ends):
            return ends
    return list(paths)
