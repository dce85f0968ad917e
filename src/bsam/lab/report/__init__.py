"""Numbers first, drawing second: read runs, compare them, and write tables, figures and the page."""
