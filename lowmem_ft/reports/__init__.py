"""Estimates as text, figures and files: values in, something to read out."""
