import re
import time

import pytest

from bsam.lab.common.progress import ProgressLine


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_nothing_is_printed_without_progress(capsys):
    with ProgressLine():
        pass
    assert capsys.readouterr() == ("", "")


def test_a_line_every_minute(capsys, clock):
    with ProgressLine() as line:
        for minutes in range(4):
            clock[0] = 5.0 + 60 * minutes
            line.reach("Decoding", 10 * minutes, 40)
        line.say("Something else.")
        line.reach("Decoding", 40, 40)
    out, error = capsys.readouterr()
    assert out == "Something else.\n"
    assert error.splitlines() == [
        "Decoding: 10 of 40, about 3 min left",
        "Decoding: 20 of 40, about 2 min left",
        "Decoding: 30 of 40, about 60 s left",
        "Decoding: 40 of 40",
    ]


def test_a_terminal_redraws_one_line_five_times_a_second(capsys, clock, terminal, monkeypatch):
    terminal()
    monkeypatch.setenv("COLUMNS", "46")
    with pytest.raises(KeyError), ProgressLine() as line:  # noqa: PT012
        for done in range(5):
            clock[0] = 5.0 + 0.125 * done
            line.reach("Decoding", done, 100)
        line.say("Something else.")
        raise KeyError
    out, error = capsys.readouterr()
    assert out == "Something else.\n"
    assert re.findall(r"\rDecoding: (\d+) of 100", error) == ["0", "2", "4", "4", "4"]  # after the sentence, at the end
    assert error.count("\n") == 1
    assert error.endswith("left\x1b[K\n")  # the next output starts on a new line
    assert max(map(len, error.split("\r"))) <= 45 + len("\x1b[K\n")


def test_several_stages_and_notes(capsys, clock, terminal, monkeypatch):
    terminal()
    monkeypatch.setenv("COLUMNS", "100")
    with ProgressLine() as line:
        for stage, done in (("models", 0), ("trace", 9), ("models", 1), ("trace", 0), ("trace", 2)):
            clock[0] += 4.0
            line.reach(stage, done, {"models": 2, "trace": 9}[stage])
        line.reach("models", 2, 2, "at last")
    assert re.findall(r"\r([^\x1b]+)", capsys.readouterr().err) == [
        "models: 0 of 2",
        "models: 0 of 2, trace: 9 of 9",
        "models: 1 of 2, trace: 9 of 9, about 8.0 s left",
        "models: 1 of 2, trace: 0 of 9",
        "models: 1 of 2, trace: 2 of 9, about 14 s left",
        "models: 2 of 2, trace: 2 of 9, at last",
    ]
