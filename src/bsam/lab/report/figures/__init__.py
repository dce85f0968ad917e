"""Figures: functions that return plotly figures, and pictures of predictions."""
