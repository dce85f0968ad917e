"""The fixture that starts two ranks: a crash must not pass unnoticed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEAP = "malloc(): unaligned tcache chunk detected"
START = """
import os, signal, sys
rank, folder = int(sys.argv[1]), sys.argv[2]
first = folder.endswith("first")

def heap():
    print("malloc(): unaligned tcache chunk detected", file=sys.stderr, flush=True)
    os.abort()

def save():
    import torch
    torch.save({"rank": rank}, f"{folder}/{rank}.pt")
"""


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGSEGV)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.abort()",
        "print('double free or corruption (out)', file=sys.stderr); os.abort()",
        f"sys.exit({HEAP!r})",
        "heap() if rank else os.kill(os.getpid(), signal.SIGSEGV)",
    ],
)
def test_ranks_that_end_in_any_other_way_fail_at_once(end, run_ranks, tmp_path):
    script, crashes = tmp_path / "script.py", []
    script.write_text(f"{START}\nif first:\n    {end}\nsave()\n")
    with pytest.raises(AssertionError):
        run_ranks(crashes, script, tmp_path)
    assert not (tmp_path / "second").exists()


def test_a_second_death_of_heap_corruption_fails_and_both_are_noted(run_ranks, tmp_path):
    script, crashes = tmp_path / "script.py", []
    script.write_text(f"{START}\nheap()\n")
    with pytest.raises(AssertionError, match="unaligned tcache"):
        run_ranks(crashes, script, tmp_path)
    assert [crash.splitlines()[0] for crash in crashes] == ["script.py: the ranks ended with [-6, -6]"] * 2


def test_one_death_of_heap_corruption_is_in_the_summary_with_its_stacks(tmp_path):
    """As a user sees it: the tests pass, and the summary tells."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "script.py").write_text(f"{START}\nif first and rank == 1:\n    heap()\nsave()\n")
    (tmp_path / "test_ranks.py").write_text(
        "from pathlib import Path\n"
        "def test_ranks(two_ranks_of, tmp_path):\n"
        "    found = two_ranks_of(Path(__file__).with_name('script.py'), tmp_path)\n"
        "    assert found == [{'rank': 0}, {'rank': 1}]\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
    found = subprocess.run([*command, "test_ranks.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stdout
    for words in ("processes that died of heap corruption", "script.py: the ranks ended with [0, -6]", HEAP, "in heap"):
        assert words in found.stdout
