"""The joints that data sets of persons label."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Skeleton:
    """The joints of a data set.

    Args:
        joints: names of the joints.
        pairs: indices of left and right joints, which a mirrored image exchanges.
        edges: indices of joints that a drawing connects.

    Example:
        >>> Skeleton(("head", "right hand", "left hand"), ((1, 2),), ((0, 1), (0, 2))).mirrored
        (0, 2, 1)
    """

    joints: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def mirrored(self) -> tuple[int, ...]:
        """For each joint of a mirrored person, the index that it had before."""
        order = list(range(len(self.joints)))
        for left, right in self.pairs:
            order[left], order[right] = right, left
        return tuple(order)


def _skeleton(names: str, edges: str) -> Skeleton:
    joints = tuple(name.strip() for name in names.split(","))
    sides = [(name, name.replace("right", "left")) for name in joints if name.startswith("right")]
    lines = [line.split("-") for line in edges.split()]
    return Skeleton(
        joints,
        tuple((joints.index(right), joints.index(left)) for right, left in sides),
        tuple((int(start), int(end)) for start, end in lines),
    )


LSP = _skeleton(
    "right ankle, right knee, right hip, left hip, left knee, left ankle, right wrist, right elbow, right shoulder, "
    "left shoulder, left elbow, left wrist, neck, head top",
    "0-1 1-2 2-3 3-4 4-5 6-7 7-8 8-12 9-12 9-10 10-11 2-8 3-9 12-13",
)
MPII = _skeleton(
    "right ankle, right knee, right hip, left hip, left knee, left ankle, pelvis, thorax, upper neck, head top, "
    "right wrist, right elbow, right shoulder, left shoulder, left elbow, left wrist",
    "0-1 1-2 2-6 6-3 3-4 4-5 6-7 7-8 8-9 10-11 11-12 12-7 7-13 13-14 14-15",
)
