import re
import time

import pytest

from bsam.core.progress import stderr_progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("is_terminal", [False, True])
def test_nothing_is_printed_before_the_first_call(capsys, monkeypatch, is_terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    with stderr_progress("Decoding"):
        pass
    assert capsys.readouterr() == ("", "")


def test_lines_every_ten_seconds_and_the_last(capsys, clock):
    with stderr_progress("Decoding") as show:
        for second in range(26):
            clock[0] = 5.0 + second
            show(second + 1, 26)
    out, error = capsys.readouterr()
    assert out == ""
    assert error.splitlines() == [
        "Decoding: 1 of 26",  # some may have been done long ago, so that the speed is not known yet
        "Decoding: 11 of 26, about 15 s left",
        "Decoding: 21 of 26, about 5 s left",
        "Decoding: 26 of 26",
    ]


def test_a_terminal_has_one_line_which_is_replaced_five_times_a_second(capsys, clock, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with pytest.raises(KeyError), stderr_progress("Decoding") as show:  # noqa: PT012
        for done in range(5):
            clock[0] = 5.0 + 0.125 * done
            show(done, 100)
        raise KeyError
    error = capsys.readouterr().err
    assert re.findall(r"\rDecoding: (\d+) of 100", error) == ["0", "2", "4"]
    assert error.count("\n") == 1
    assert error.endswith("left\x1b[K\n")  # what is printed next begins on a line of its own
