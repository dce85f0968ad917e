"""Run many runs: in this process, in several, or as tasks of Ray."""
