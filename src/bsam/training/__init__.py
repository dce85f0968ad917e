"""One run: its settings, its loop, its record; and many runs side by side."""
