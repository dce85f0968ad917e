"""Figures in files. ``*_info`` functions return the numbers that ``plot_*`` and ``draw_*`` draw with matplotlib."""
