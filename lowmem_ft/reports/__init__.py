"""Estimates, plans and runs as text, figures and files: it takes values, and returns something to print or write."""
