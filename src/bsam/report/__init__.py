"""Numbers first, drawing second."""
