"""Write what the analysis found: tables, figures and the page."""
