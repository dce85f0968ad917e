"""The job script of the guide for clusters, with real signals; a shell script stands for ``bsam``."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "cluster.md"
TRAINING = """#!/bin/sh
trap 'sleep 0.2; echo checkpoint >> events; exit 143' TERM
echo "train $1" >> events
while :; do sleep 0.02; done
"""


def test_the_job_script_stops_the_command_waits_for_it_and_requeues_the_job(tmp_path):
    scripts = re.findall(r"```shell\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (script,) = (script for script in scripts if "--signal" in script)
    (tmp_path / "job.sh").write_text(script)
    for name, text in (("bsam", TRAINING), ("scontrol", '#!/bin/sh\necho "$@" >> events\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    events = tmp_path / "events"
    with subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environment) as job:
        while not events.exists() or not events.read_text():
            assert job.poll() is None
            time.sleep(0.01)
        job.send_signal(signal.SIGUSR1)  # to the shell of the job alone, as SLURM does with B:
        job.wait(timeout=60)
    assert events.read_text().splitlines() == ["train run", "checkpoint", "requeue 17"]
