"""Read runs, group them into experiments, and compare their scores."""
