from __future__ import annotations

import os
import pickle
import struct
import tracemalloc

import numpy as np
import pytest

import bsam
from bsam.data import pickled
from bsam.data.pickled import read_pickle

ARRAY = np.random.default_rng(0).integers(0, 256, (3, 5), np.uint8)
CONTENT = ARRAY.tobytes()


class Calls:
    """Pickled, it asks for a call."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def short(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode("latin-1")


def python2(dtype="u1", content=CONTENT, shape=b"M\x03\x00M\x05\x00", by_columns=b"\x89") -> bytes:
    """A dictionary with an array as cPickle of Python 2 wrote it: strings of bytes, and globals of the old numpy."""
    return b"".join([
        b"\x80\x02}q\x00(", short("labels"), b"]q\x06(K\x03M\x10\x27e", short("data"),
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85", short("b"), b"\x87Rq\x03",
        b"(K\x01(", shape, b"tcnumpy\ndtype\nq\x04", short(dtype), b"K\x00K\x01\x87Rq\x05",
        b"(K\x03", short("|"), b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
        by_columns, b"T", struct.pack("<i", len(content)), content, b"tbu.",
    ])  # fmt: skip


@pytest.mark.parametrize("order", ["C", "F"])
def test_reads_what_python_2_wrote(order):
    content = python2(content=ARRAY.tobytes(order=order), by_columns=b"\x88" if order == "F" else b"\x89")
    ours, theirs = read_pickle(content), pickle.loads(content, encoding="latin1")  # written by this file
    assert ours["labels"] == theirs["labels"] == [3, 10_000]
    np.testing.assert_array_equal(ours["data"], ARRAY)
    np.testing.assert_array_equal(theirs["data"], ARRAY)
    assert ours["data"].dtype == np.uint8


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", ["data", b"data"])
def test_reads_what_python_3_writes(protocol, order, name):
    content = {
        name: np.asarray(ARRAY, order=order),
        b"batch_label": b"\xfftesting",
        "labels": [0, 255, 256, 70_000, -1, 2**62],
        "filenames": ["é.png"] * 300,
    }
    found = read_pickle(pickle.dumps(content, protocol))
    np.testing.assert_array_equal(found.pop("data"), ARRAY)
    assert found == {"batch_label": b"\xfftesting", "labels": content["labels"], "filenames": content["filenames"]}


HARM = {
    "system": lambda trap: Calls(os.system, f"touch {trap}"),
    "open": lambda trap: Calls(open, str(trap), "w"),
    "eval": lambda trap: Calls(eval, f"open({str(trap)!r}, 'w')"),
    "getattr": lambda trap: Calls(getattr, Calls(__import__, "os"), "mkdir"),
    "nested": lambda trap: [{"deep": [Calls(os.mkdir, str(trap))]}],
    "memmap": lambda trap: Calls(np.memmap, str(trap), "uint8", "w+", 0, (3,)),
    "argument of numpy": lambda trap: Calls(np.dtype, Calls(os.mkdir, str(trap))),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("harm", HARM)
def test_nothing_is_executed(harm, protocol, tmp_path):
    for content in ({"data": HARM[harm](tmp_path / "trap")}, HARM[harm](tmp_path / "trap")):
        with pytest.raises(bsam.BsamError, match="not a pickle of numbers, text and arrays of bytes: it asks for "):
            read_pickle(pickle.dumps(content, protocol))
        assert not (tmp_path / "trap").exists()


def test_the_standard_unpickler_would_execute_it(tmp_path):
    pickle.loads(pickle.dumps(HARM["nested"](tmp_path / "trap")))  # written by this file
    assert (tmp_path / "trap").exists()


OTHER_ARRAYS = [
    np.array([1, None], object),
    ARRAY.astype(np.int64),
    ARRAY.astype("S1"),
    ARRAY.astype(float),
    np.zeros(2, [("a", "u1")]),
    ARRAY > 3,
]


@pytest.mark.parametrize("array", OTHER_ARRAYS, ids=lambda array: str(array.dtype))
def test_arrays_of_other_types_are_refused(array):
    for protocol in (2, 4):
        with pytest.raises(bsam.BsamError, match=r"instead of bytes \(uint8\)"):
            read_pickle(pickle.dumps({"data": array}, protocol))


HEAD = b"\x80\x02}(" + short("data")
HUGE, NEGATIVE = b"J\xff\xff\xff\x7f", b"J\xfd\xff\xff\xff"
CRAFTED = {
    "a huge shape": python2(shape=2 * HUGE),
    "a negative shape": python2(shape=2 * NEGATIVE),
    "no shape": python2(shape=b""),
    "a longer content": python2(content=CONTENT + b"x"),
    "a shorter content": python2(content=CONTENT[:-1]),
    "objects": python2(dtype="O8"),
    "a dtype of many tuples": HEAD + b"cnumpy\ndtype\n)" + b"\x85" * 100_000 + b"\x85Ru.",
    "an odd escape": HEAD + b"S'\\d'\ncos\nsystem\nu.",
    "an array that takes another for its type": python2().replace(b"q\x05", b"q\x050h\x03"),
    "a codec that compresses": HEAD + b"c_codecs\nencode\n" + short("a" * 9) + short("zlib_codec") + b"\x86Ru.",
    "text outside of latin1": HEAD + b"c_codecs\nencode\nX\x03\x00\x00\x00\xe2\x82\xacX\x06\x00\x00\x00latin1\x86Ru.",
    "a call of a number": HEAD + b"K\x01K\x01\x85Ru.",
    "a state for a global": HEAD + b"cnumpy\nndarray\n}" + short("__setstate__") + b"K\x01sbu.",
    "items of a number": b"\x80\x02K\x01K\x02K\x03s.",
    "a key that is a tuple": b"\x80\x02})\x85K\x01s.",
    "a persistent id": HEAD + short("x") + b"Qu.",
    "an extension": HEAD + b"\x82\x01u.",
    "an instance": HEAD + b"(ios\nsystem\nu.",
    "a global by parts": b"\x80\x04}\x8c\x04data\x8c\x02os\x8c\x06system\x93s.",
    "a string that is not there": HEAD + b"T\xff\xff\xff\x7fabcu.",
    "a byte array that is not there": b"\x80\x05}\x8c\x04data\x96\xff\xff\xff\xff\xff\xff\xff\x7fabcs.",
    "a memo that is not there": HEAD + b"j\xff\xff\xff\x7fu.",
    "a number of many digits": HEAD + b"I" + b"9" * 100_000 + b"\nu.",
    "nothing": b"",
    "an unknown instruction": b"\x80\x02\xff.",
    "a list": b"\x80\x02].",
    "more after the end": python2() + b"x",
}  # fmt: skip


def text(content: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(content)) + content


LATIN1 = b"c_codecs\nencode\nq\x00" + text(b"a" * 10**6) + b"q\x01" + text(b"latin1") + b"q\x02"
LAUGHS = b"]q\x00" + b"".join(b"](" + b"h\x00" * 50 + b"eq\x00" for _ in range(60))  # 50 ** 60 items, if written out
DEEP = b")" + b"\x85" * 200_000  # a tuple in a tuple in ...: Python has no stack for its hash
MANY, KEYS = "it has more than 10,000 instructions", "it holds a dictionary with keys that are not text"
SMALL = {
    "marks": (b"(" * 11_000, MANY),
    "tuples": (b")" + b"\x85" * 11_000, MANY),
    "numbers": (b"]" + b"K\x01a" * 6_000, MANY),
    "a deep key": (b"}" + DEEP + b"K\x01s", KEYS),
    "deep keys": (b"}(" + DEEP + b"K\x01u", KEYS),
    "a deep dictionary": (b"(" + DEEP + b"K\x01d", KEYS),
    "a deep set": (b"\x8f(" + DEEP + b"\x90", ""),
    "a deep frozen set": (b"(" + DEEP + b"\x91", ""),
    "a dtype of nests": (LAUGHS + b"cnumpy\ndtype\nh\x00\x85R", "an array of dtype <class 'list'>"),
    "an encoding of nests": (LAUGHS + b"c_codecs\nencode\n" + text(b"a") + b"h\x00\x86R", "another encoding"),
}


@pytest.mark.parametrize("asking", SMALL)
def test_a_small_file_cannot_ask_for_much_time(asking, monkeypatch):
    content, message = SMALL[asking]
    if message == MANY:
        monkeypatch.setattr(pickled, "MAX_INSTRUCTIONS", 10_000)
    with pytest.raises(bsam.BsamError, match=f"not a pickle of numbers, text and arrays of bytes: .*{message}"):
        read_pickle(HEAD + b"(" + content + b"tu.")


MUCH = {
    "bytes made of one text": LATIN1 + b"h\x00h\x01h\x02\x86R" * 200,
    "a byte array": b"\x96" + struct.pack("<Q", 10**9) + b"abc",
}


@pytest.mark.parametrize("asking", MUCH)
def test_a_small_file_cannot_ask_for_much_memory(asking):
    tracemalloc.start()
    try:
        with pytest.raises(bsam.BsamError, match="not a pickle of numbers"):
            read_pickle(HEAD + b"(" + MUCH[asking] + b"tu.")
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


def test_deep_and_endless_nests_of_lists_do_no_harm():
    assert read_pickle(b"\x80\x02}" + short("deep") + b"]" * 200_000 + b"a" * 199_999 + b"s.").keys() == {"deep"}
    found = read_pickle(b"\x80\x02}" + short("laughs") + b"](" + LAUGHS + b"es.")["laughs"]
    assert (len(found), len(found[0]), len(found[-1]), found[-1][0] is found[-2]) == (61, 0, 50, True)
    itself = read_pickle(b"\x80\x02}" + short("itself") + b"]q\x00h\x00as.")["itself"]
    assert itself[0] is itself


def test_the_largest_file_as_python_3_writes_it_is_within_the_bounds():
    n = 50_000
    content = {b"filenames": [b"%d.png" % i for i in range(n)], b"data": np.full((n, 8), 255, np.uint8)}
    content |= {b"fine_labels": [i % 100 for i in range(n)], b"coarse_labels": [i % 20 for i in range(n)]}
    assert read_pickle(pickle.dumps(content, protocol=2))["filenames"] == content[b"filenames"]


@pytest.mark.parametrize("crafted", CRAFTED)
def test_crafted_pickles_are_refused(crafted):
    with pytest.raises(bsam.BsamError, match=r"not a pickle of numbers, text and arrays of bytes: ."):
        read_pickle(CRAFTED[crafted])


def test_a_far_memo_index_needs_no_memory():
    assert read_pickle(HEAD + b"K\x01r\xff\xff\xff\x7fu.") == {"data": 1}


def test_every_truncation_is_refused():
    content = python2()
    for end in range(len(content)):
        with pytest.raises(bsam.BsamError):
            read_pickle(content[:end])


def test_random_damage_is_read_or_refused():
    content, random = python2(), np.random.default_rng(1)
    for _ in range(3000):
        damaged = bytearray(content)
        for place in random.integers(0, len(content), random.integers(1, 4)):
            damaged[place] = random.integers(0, 256)
        try:
            found = read_pickle(bytes(damaged)).get("data")
        except bsam.BsamError:
            continue
        assert not isinstance(found, np.ndarray) or found.dtype == np.uint8
