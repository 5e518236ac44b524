"""Calls that seem to come from another file: Python takes a call's file from the code that makes it."""

from __future__ import annotations


def call_in(module):
    """Make a function that calls one, by a line of a module's file."""
    names = {}
    exec(compile("def call(function, *args):\n    return function(*args)", module.__file__, "exec"), names)
    return names["call"]
