"""The page of a report: one HTML file with tables, verdicts and interactive figures."""
