from __future__ import annotations

import copyreg
import os
import pickle
import struct
import tracemalloc

import numpy as np
import pytest

import bsam
from bsam.data.pickled import read_pickle

ARRAY = np.random.default_rng(0).integers(0, 256, (3, 5), np.uint8)


class Calls:
    """Pickled, it asks for a call."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def short(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode("latin-1")


def python2(
    array: np.ndarray = ARRAY, dtype: str = "u1", content: bytes | None = None, by_columns: bytes = b"\x89"
) -> bytes:
    """An array as cPickle of Python 2 wrote it in the published files: strings of bytes, and globals of the old numpy."""
    content = array.tobytes() if content is None else content
    return (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85" + short("b") + b"\x87Rq\x03(K\x01"
        + b"(" + b"".join(b"M" + struct.pack("<H", n) for n in array.shape) + b"t"
        + b"cnumpy\ndtype\nq\x04" + short(dtype) + b"K\x00K\x01\x87Rq\x05(K\x03" + short("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + by_columns + b"T" + struct.pack("<i", len(content)) + content + b"tb"
    )  # fmt: skip


def dictionary(value: bytes) -> bytes:
    return b"\x80\x02}q\x00(" + short("labels") + b"]q\x06(K\x03M\x10\x27e" + short("data") + value + b"u."


def test_reads_what_python_2_wrote():
    content = dictionary(python2())
    ours, theirs = read_pickle(content), pickle.loads(content, encoding="latin1")  # written by this file
    assert ours["labels"] == theirs["labels"] == [3, 10_000]
    np.testing.assert_array_equal(ours["data"], ARRAY)
    np.testing.assert_array_equal(theirs["data"], ARRAY)
    assert ours["data"].dtype == np.uint8


def test_reads_arrays_by_columns():
    content = dictionary(python2(content=ARRAY.tobytes(order="F"), by_columns=b"\x88"))
    np.testing.assert_array_equal(read_pickle(content)["data"], ARRAY)


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
    "system": Calls(os.system, "touch {}"),
    "open": Calls(open, "{}", "w"),
    "eval": Calls(eval, "open('{}', 'w')"),
    "exec": Calls(exec, "open('{}', 'w')"),
    "getattr": Calls(getattr, Calls(__import__, "os"), "mkdir"),
    "nested": [{"deep": [Calls(os.mkdir, "{}")]}],
    "memmap": Calls(np.memmap, "{}", "uint8", "w+", 0, (3,)),
    "fromfile": Calls(np.fromfile, "/etc/passwd"),
    "copyreg": Calls(copyreg.__newobj__, Calls),
    "built": Calls(np.dtype, Calls(os.mkdir, "{}")),
}


def aimed(value, path):
    if isinstance(value, Calls):
        return Calls(value.reduced[0], *(aimed(argument, path) for argument in value.reduced[1]))
    if isinstance(value, str):
        return value.replace("{}", str(path))
    if isinstance(value, list):
        return [aimed(item, path) for item in value]
    return {key: aimed(item, path) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("harm", HARM)
def test_nothing_is_executed(harm, protocol, tmp_path):
    trap = tmp_path / "trap"
    for content in ({"data": aimed(HARM[harm], trap)}, aimed(HARM[harm], trap)):
        with pytest.raises(bsam.BsamError, match="a pickle"):
            read_pickle(pickle.dumps(content, protocol))
        assert not trap.exists()


def test_the_trap_would_close(tmp_path):
    pickle.loads(
        pickle.dumps(aimed(HARM["nested"], tmp_path / "trap"))
    )  # written by this file: shows that the test above tests something
    assert (tmp_path / "trap").exists()


@pytest.mark.parametrize(
    "array",
    [
        np.array([1, None], object),
        ARRAY.astype(np.int64),
        ARRAY.astype("S1"),
        ARRAY.astype(float),
        np.zeros(2, [("a", "u1")]),
        ARRAY.astype(bool),
        ARRAY > 3,
    ],
)
def test_other_arrays_are_refused(array):
    for protocol in (2, 4, 5):
        with pytest.raises(bsam.BsamError, match=r"bytes \(uint8\)|asks for numpy|instruction"):
            read_pickle(pickle.dumps({"data": array}, protocol))


HEAD = b"\x80\x02}(" + short("data")
RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
CRAFTED = {
    "a huge array from nothing": HEAD + RECONSTRUCT + b"cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85" + short("b") + b"\x87Ru.",
    "a huge array in its state": dictionary(python2(ARRAY).replace(b"(M\x03\x00M\x05\x00t", b"(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ft")),
    "a negative shape": dictionary(python2(ARRAY).replace(b"(M\x03\x00M\x05\x00t", b"(J\xfd\xff\xff\xffJ\xfb\xff\xff\xfft")),
    "a shape of none": dictionary(python2(ARRAY).replace(b"(M\x03\x00M\x05\x00t", b"(t")),
    "objects": dictionary(python2(dtype="O8")),
    "another class": HEAD + RECONSTRUCT + b"cnumpy\ndtype\nK\x00\x85" + short("b") + b"\x87Ru.",
    "an array of a dtype of a list": HEAD + b"cnumpy\ndtype\n](" + short("u1") + b"eK\x00K\x01\x87Ru.",
    "a codec that unpacks": HEAD + b"c_codecs\nencode\n" + short("a" * 9) + short("zlib_codec") + b"\x86Ru.",
    "a codec of text outside": HEAD + b"c_codecs\nencode\nX\x03\x00\x00\x00\xe2\x82\xac" + short("latin1") + b"\x86Ru.",
    "a function called twice": HEAD + RECONSTRUCT + b"K\x00\x85RK\x01\x85Ru.",
    "a call of a number": HEAD + b"K\x01K\x01\x85Ru.",
    "a state for a global": HEAD + b"cnumpy\nndarray\n}" + short("__setstate__") + b"K\x01sbu.",
    "a state for a list": HEAD + b"]}bu.",
    "an array built twice": dictionary(python2() + b"(K\x01K\x00\x85h\x05\x89U\x00tb"),
    "an array never built": b"\x80\x02}" + short("data") + RECONSTRUCT + b"cnumpy\nndarray\nK\x00\x85" + short("b") + b"\x87RsK\x01.",
    "items of a number": b"\x80\x02K\x01K\x02K\x03s.",
    "appended to a number": b"\x80\x02K\x01K\x02a.",
    "a key that is a tuple": b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s.",
    "an odd number of items": b"\x80\x02}(" + short("data") + b"u.",
    "a persistent id": HEAD + short("x") + b"Qu.",
    "a persistent id as text": HEAD + b"Pos\nu.",
    "an extension": HEAD + b"\x82\x01u.",
    "an instance": HEAD + b"(ios\nsystem\nu.",
    "an object": HEAD + b"(cnumpy\nndarray\nou.",
    "made by new": HEAD + b"cnumpy\nndarray\n)\x81u.",
    "a global by parts": b"\x80\x04}\x8c\x04data\x8c\x02os\x8c\x06system\x93s.",
    "a global by numbers": b"\x80\x04}\x8c\x04dataK\x01K\x02\x93s.",
    "a long string that is not there": HEAD + b"T\xff\xff\xff\x7fabcu.",
    "a very long string that is not there": b"\x80\x04}\x8c\x04data\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabcs.",
    "a byte array that is not there": b"\x80\x05}\x8c\x04data\x96\xff\xff\xff\xff\xff\xff\xff\x7fabcs.",
    "a string of negative length": HEAD + b"T\xff\xff\xff\xffabcu.",
    "a far place in the memo, unset": HEAD + b"j\xff\xff\xff\x7fu.",
    "a number of many digits": HEAD + b"I" + b"9" * 100_000 + b"\nu.",
    "twice the same": HEAD + b"K\x012u.",
    "no end": HEAD + b"K\x01u",
    "nothing": b"",
    "only an end": b".",
    "no mark": b"\x80\x02e.",
    "an unknown instruction": b"\x80\x02\xff.",
    "a list": b"\x80\x02].",
    "more after the end": dictionary(python2()) + b"x",
    "more below the end": b"\x80\x02K\x01}.",
    "a longer content": dictionary(python2(content=ARRAY.tobytes() + b"x")),
    "a shorter content": dictionary(python2(content=ARRAY.tobytes()[:-1])),
}  # fmt: skip


@pytest.mark.parametrize("crafted", CRAFTED)
def test_crafted_pickles_are_refused(crafted):
    with pytest.raises(bsam.BsamError, match="pickle"):
        read_pickle(CRAFTED[crafted])


def test_a_far_place_in_the_memo_takes_no_room():
    assert read_pickle(HEAD + b"K\x01r\xff\xff\xff\x7fu.") == {"data": 1}


def test_deep_and_endless_nests_do_no_harm():
    assert read_pickle(b"\x80\x02}" + short("deep") + b"]" * 200_000 + b"a" * 199_999 + b"s.").keys() == {"deep"}
    laughs = b"]q\x00" + b"".join(
        b"](" + b"h\x00" * 50 + b"eq\x00" for _ in range(60)
    )  # 50 ** 60 items, if it were written out
    found = read_pickle(b"\x80\x02}" + short("laughs") + b"](" + laughs + b"es.")["laughs"]
    assert (len(found), len(found[0]), len(found[-1]), found[-1][0] is found[-2]) == (61, 0, 50, True)
    itself = read_pickle(b"\x80\x02}" + short("itself") + b"]q\x00h\x00as.")["itself"]
    assert itself[0] is itself


def long(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text


MILLION = b"a" * 1_000_000
ARRAY_OF_ZERO = RECONSTRUCT + b"cnumpy\nndarray\nK\x00\x85" + short("b") + b"\x87R"
BYTES_8 = b"cnumpy\ndtype\n" + short("u1") + b"K\x00K\x01\x87R"
ARRAY_OF_TEXT = ARRAY_OF_ZERO + b"(K\x01J" + struct.pack("<i", 10**6) + b"\x85h\x01\x89h\x00tb"
BOMBS = {
    "bytes made of one text": b"c_codecs\nencode\nq\x00" + long(MILLION) + b"q\x01" + long(b"latin1") + b"q\x02" + b"h\x00h\x01h\x02\x86R" * 200,
    "arrays made of one text": long(MILLION) + b"q\x00" + BYTES_8 + b"q\x01" + ARRAY_OF_TEXT * 200,
    "long keys made of bytes": b"B" + struct.pack("<I", 10**6) + MILLION + b"q\x00" + b"}h\x00K\x01s" * 200,
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_cannot_ask_for_much_memory(bomb):
    content = b"\x80\x03}(" + long(b"data") + b"(" + BOMBS[bomb] + b"tu."
    tracemalloc.start()
    try:
        with pytest.raises(
            bsam.BsamError, match=r"makes more bytes than it has itself|a key or a name of 1,000,000 characters"
        ):
            read_pickle(content)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(content)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "many",
    [b"(" * 5_000_000, b")" + b"\x85" * 5_000_000, b"]" + b"K\x01a" * 2_500_000],
    ids=["marks", "tuples", "numbers"],
)
def test_a_small_file_cannot_ask_for_much_time(many):
    with pytest.raises(bsam.BsamError, match="a pickle of more than 1,000,000 instructions"):
        read_pickle(b"\x80\x02" + many + b".")


def test_the_largest_file_as_python_3_writes_it_is_within_the_bounds():
    n = 50_000
    content = {
        b"filenames": [b"%d.png" % i for i in range(n)],
        b"fine_labels": [i % 100 for i in range(n)],
        b"coarse_labels": [i % 20 for i in range(n)],
    }
    content[b"data"] = np.full((n, 8), 255, np.uint8)  # fewer pixels: they are one instruction, however many
    found = read_pickle(pickle.dumps(content, protocol=2))
    assert found["filenames"] == content[b"filenames"]
    np.testing.assert_array_equal(found["data"], content[b"data"])


def test_every_truncation_is_refused():
    content = dictionary(python2())
    for end in range(len(content)):
        with pytest.raises(bsam.BsamError):
            read_pickle(content[:end])


def test_random_damage_is_read_or_refused():
    content, random = bytearray(dictionary(python2())), np.random.default_rng(1)
    for _ in range(3000):
        damaged = bytearray(content)
        for place in random.integers(0, len(content), random.integers(1, 4)):
            damaged[place] = random.integers(0, 256)
        try:
            found = read_pickle(bytes(damaged))
        except bsam.BsamError:
            continue
        ours = {type(value) for value in found.values()} - {
            list,
            np.ndarray,
            int,
            str,
            bytes,
            tuple,
            dict,
            bool,
            type(None),
        }
        assert {kind.__module__ for kind in ours} <= {"bsam.data.pickled"}
