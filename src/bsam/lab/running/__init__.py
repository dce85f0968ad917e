"""Train many runs: in this process, in several processes, or as Ray tasks."""
