"""NVIDIA MPS, with a stand-in for its control program: ``control`` in conftest.py."""

import pytest

from bsam.lab.training.machine import is_mps_installed, nvidia_mps


def test_mps_is_installed_if_its_program_is_on_the_path(control, monkeypatch):
    assert is_mps_installed()
    assert not control.exists()  # nothing was started
    monkeypatch.setenv("PATH", "")
    assert not is_mps_installed()


@pytest.mark.parametrize(
    ("case", "words", "calls"),
    [
        ("", None, ["get_server_list", "quit"]),
        ("DENIED", "denied", ["get_server_list", "quit"]),
        ("RUNS_ALREADY", None, ["get_server_list"]),
        ("PATH", "No such file", []),
    ],
)
def test_mps_is_started_and_stopped_or_reported_as_off(case, words, calls, control, monkeypatch):
    control.touch()
    if case:
        monkeypatch.setenv(case, "" if case == "PATH" else "1")
    messages = []
    with pytest.raises(KeyboardInterrupt), nvidia_mps(messages.append) as variables:  # noqa: PT012
        assert (variables is None) == (words is not None)
        assert ("CUDA_MPS_PIPE_DIRECTORY" in (variables or {})) == (case == "")
        raise KeyboardInterrupt
    assert control.read_text().split() == calls
    assert [words in message for message in messages] == ([] if words is None else [True])


@pytest.mark.parametrize(
    ("case", "visible", "renumbered"),
    [("", "2,5", "0,1"), ("", "GPU-1b,GPU-7", None), ("", "", None), ("RUNS_ALREADY", "2,5", None)],
)
@pytest.mark.usefixtures("control")
def test_a_daemon_started_here_numbers_the_visible_gpus_from_0(case, visible, renumbered, gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if case:
        monkeypatch.setenv(case, "1")
    with nvidia_mps(print) as variables:
        assert variables.get("CUDA_VISIBLE_DEVICES") == renumbered
