"""The fixture that starts two ranks: a crash must not go unnoticed, also in a worker of pytest-xdist."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from processes import Script

HEAP = "malloc(): unaligned tcache chunk detected"
START = f"""
import os, shutil, signal, sys
rank, folder = int(sys.argv[1]), sys.argv[2]
first = folder.endswith("first")

def heap():
    print({HEAP!r}, file=sys.stderr, flush=True)
    os.abort()
"""


def script(folder: Path, then: str) -> Path:
    """A script that does something and then copies a saved tensor, which is faster than importing torch to save one."""
    torch.save({"a": 1}, folder / "saved.pt")
    path = folder / "script.py"
    path.write_text(f"{START}\n{then}\nshutil.copy({str(folder / 'saved.pt')!r}, f'{{folder}}/{{rank}}.pt')\n")
    return path


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
    with pytest.raises(AssertionError):
        run_ranks([], script(tmp_path, f"if first:\n    {end}"), tmp_path)
    assert not (tmp_path / "second").exists()


def test_a_second_death_of_heap_corruption_fails_and_both_are_noted(run_ranks, tmp_path):
    crashes = []
    with pytest.raises(AssertionError, match="unaligned tcache"):
        run_ranks(crashes, script(tmp_path, "heap()"), tmp_path)
    assert [crash.splitlines()[0] for crash in crashes] == ["script.py: the ranks ended with [-6, -6]"] * 2


def test_one_death_of_heap_corruption_is_in_the_summary_with_its_stacks(tmp_path):
    """The tests pass, and the summary shows the crash of a worker."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    script(tmp_path, "if first and rank == 1:\n    heap()")
    (tmp_path / "test_ranks.py").write_text(
        "import multiprocessing\n"
        "from pathlib import Path\n"
        "import processes\n"
        "processes.CONTEXT = multiprocessing.get_context('fork')\n"  # nothing needs to be imported again
        "def test_ranks(two_ranks_of, tmp_path):\n"
        "    assert two_ranks_of(Path(__file__).with_name('script.py'), tmp_path) == [{'a': 1}] * 2\n"
    )
    options = ["-n", "1", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path]
    options += ["-o", f"pythonpath={Path(__file__).parent}"]
    code = Script("pytest", *options, tmp_path / "test_ranks.py", output=tmp_path / "printed.txt").wait()
    printed = (tmp_path / "printed.txt").read_text()
    assert code == 0, printed
    title = "processes that died of heap corruption"
    for words in (title, "script.py: the ranks ended with [0, -6]", HEAP, "in heap"):
        assert printed.count(words) == 1


def test_tests_and_the_processes_that_they_start_use_one_thread():
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"
