"""Tables, figures and console output. ``*_info`` functions return the numbers that ``plot_*`` and ``draw_*`` draw."""
