"""Batches of all kinds: later passes get them as they were, and tensors that are changed are noticed."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bsam
from bsam.integrations.batch import check_unchanged, containers_copied, tensor_versions

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: object
    y: object = None


@dataclass(slots=True)
class Slotted:
    x: object
    parent: object = None


class Store(MutableMapping):
    """Its values are made when they are asked for."""

    def __init__(self, content):
        self.content = dict(content)

    def __getitem__(self, key):
        return Record(self.content[key])

    def __setitem__(self, key, value):
        self.content[key] = value.x

    def __delitem__(self, key):
        del self.content[key]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


class Graph:
    """As a graph of torch_geometric: a copy has a store of its own."""

    def __init__(self, **content):
        self.__dict__["store"] = Store(content)

    def __setattr__(self, name, value):
        self.store.content[name] = value

    def __copy__(self):
        return Graph(**self.store.content)


class Lists(dict):
    pass


class Images(list):
    pass


class Guarded:
    """Reads an attribute by a property of its name, which cannot be set."""

    def __init__(self, x):
        vars(self)["x"] = x

    @property
    def x(self):
        return vars(self)["x"]


class Kind(Enum):
    A = ([1], 2)


class Loading:
    def __iter__(self):
        return self

    def __next__(self):
        return 1


def ones():
    return torch.ones(2)


@pytest.mark.parametrize(
    ("batch", "change", "x_of"),
    [
        (lambda: {"x": ones()}, lambda b: b.pop("x"), lambda b: b["x"]),
        (lambda: [ones()], lambda b: b.clear(), lambda b: b[0]),
        (lambda: Record(ones()), lambda b: setattr(b, "x", 0), lambda b: b.x),
        (lambda: [{"a": Record(ones())}], lambda b: setattr(b[0]["a"], "x", 0), lambda b: b[0]["a"].x),
        (lambda: Pair({"q": ones()}, 1), lambda b: b.x.clear(), lambda b: b.x["q"]),
        (lambda: UserDict(a={"x": ones()}), lambda b: b["a"].pop("x"), lambda b: b["a"]["x"]),
        (lambda: Slotted(ones()), lambda b: setattr(b, "x", 0), lambda b: b.x),
        (lambda: Record({"q": ones()}), lambda b: b.x.clear(), lambda b: b.x["q"]),
        (lambda: Record(Slotted([ones()])), lambda b: b.x.x.clear(), lambda b: b.x.x[0]),
        (lambda: Record(Store({"q": ones(), "p": ones()})), lambda b: b.x.clear(), lambda b: b.x["p"].x),
        (lambda: Images([ones()]), lambda b: b.clear(), lambda b: b[0]),
        (lambda: Images([[ones()]]), lambda b: b[0].clear(), lambda b: b[0][0]),
        (lambda: Guarded([ones()]), lambda b: b.x.clear(), lambda b: b.x[0]),
        (lambda: Lists(q=[ones()]), lambda b: b["q"].clear(), lambda b: b["q"][0]),
        (lambda: [Graph(x=0), Graph(x=ones())], lambda b: setattr(b[1], "x", 0), lambda b: b[1].store["x"].x),
    ],
)
def test_containers_are_copied_and_tensors_are_not(batch, change, x_of):
    given = batch()
    x = x_of(given)
    copied, _ = containers_copied((given, {}))
    change(given)
    assert x_of(copied) is x
    versions = tensor_versions((copied, {}))
    check_unchanged(versions, "training_step")
    x.mul_(0.5)
    with pytest.raises(bsam.BsamError, match="training_step changes a tensor of its batch in place"):
        check_unchanged(versions, "training_step")


def test_what_carries_no_batch_is_left_alone():
    network, loader = torch.nn.Linear(1, 1), Loading()
    with torch.inference_mode():
        inference = torch.ones(1)
    values = Kind.A.value
    given = ([network, loader, "text", None, print, Record, Kind.A], inference)
    copied = containers_copied(given)
    assert all(a is b for a, b in zip(copied[0], given[0], strict=True))
    assert Kind.A.value is values
    assert tensor_versions(given) == []


def test_objects_that_refer_to_each_other_and_arrays():
    given = Record(np.ones(2))
    given.y = Slotted(ones(), parent=given)
    copied = containers_copied([given])[0]
    given.x *= 0.5
    given.y.x = 0
    assert copied.y.parent is copied
    assert copied.x.tolist() == [1, 1]
    assert copied.y.x.tolist() == [1, 1]
    assert len(tensor_versions([copied])) == 1


def test_copies_of_many_objects_are_not_mixed_up():
    """An object that lived only in a copy may have the address of one before it."""
    copied = containers_copied([Graph(x=i) for i in range(50)])
    assert [graph.store.content["x"] for graph in copied] == list(range(50))


def test_attributes_that_hold_no_data_are_the_same_in_every_pass():
    """A network may look up its head by such an object; a module, and a data set, are not for copying."""
    given = Record(Loading, [task := Guarded(0), torch])
    given.y.append(given.y[0])
    copied = containers_copied(given)
    assert copied is not given
    assert copied.y is not given.y
    assert copied.y[0] is copied.y[2] is task
    assert copied.y[1] is torch


def test_an_attribute_that_is_new_in_one_pass_is_new_in_the_next():
    given = SimpleNamespace()
    copied = containers_copied([given])[0]
    given.h = 1
    assert not vars(copied)
