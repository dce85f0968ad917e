"""Count image files with the same content that make a score meaningless: in two sets, or in two classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

CLASSES = "classes"


def find_duplicates(sets: Mapping[str, Sequence[tuple[str, int]]]) -> dict[str, int]:
    """Count the images of a set whose content is also in another set, and the images whose content has two classes.

    Args:
        sets: the digest of the content and the class of each image, by set.

    Returns:
        The numbers that are not 0: of the images of the second set by both sets, such as ``train and test``, and of the
        images in two classes as ``classes``.

    Example:
        >>> find_duplicates(
        ...     {"train": [("a", 0), ("b", 1), ("b", 1)], "test": [("a", 0), ("a", 1)]}
        ... )
        {'train and test': 2, 'classes': 3}
    """
    found = {}
    for first, second in combinations(sets, 2):
        contents = {digest for digest, _ in sets[first]}
        found[f"{first} and {second}"] = sum(digest in contents for digest, _ in sets[second])
    pairs = [pair for part in sets.values() for pair in part]
    classes: dict[str, set[int]] = {}
    for digest, label in pairs:
        classes.setdefault(digest, set()).add(label)
    found[CLASSES] = sum(len(classes[digest]) > 1 for digest, _ in pairs)
    return {name: number for name, number in found.items() if number}


def duplicate_warnings(duplicates: Mapping[str, int]) -> list[str]:
    """Return a sentence for each number of :func:`find_duplicates`.

    Example:
        >>> duplicate_warnings({"classes": 3})
        ['3 images are in more than one class, as files with the same content: correct their classes.']
    """
    sentences = []
    for name, number in duplicates.items():
        images, verb = ("image", "is") if number == 1 else ("images", "are")
        if name == CLASSES:
            sentences.append(
                f"{number:,} {images} {verb} in more than one class, as files with the same content: correct their "
                "classes."
            )
        else:
            first, _, second = name.partition(" and ")
            sentences.append(
                f"{number:,} {images} of the {second} set {verb} also in the {first} set, as files with the same "
                "content, which raises the score: remove them from one of the sets."
            )
    return sentences
