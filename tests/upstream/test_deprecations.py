"""What torch and transformers are about to take away fails a test, whoever of the two is blamed for the call."""

from __future__ import annotations

import types
import warnings

import pytest

CATEGORIES = [DeprecationWarning, PendingDeprecationWarning, FutureWarning]


def warn_in(module: str, category: type[Warning]) -> None:
    """Warn as a function of a module does, with its own line for the caller's."""
    code = "import warnings\ndef deprecated(category): warnings.warn('soon gone', category)"
    name_of_it = {"__name__": module}
    exec(compile(code, f"{module}.py", "exec"), name_of_it)
    function = name_of_it["deprecated"]
    assert isinstance(function, types.FunctionType)
    function(category)


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize(
    "module", ["lowmem_ft.training.step", "torch", "transformers.trainer", "tests.conftest"]
)
def test_what_is_deprecated_fails(module, category):
    with pytest.raises(category):
        warn_in(module, category)


def test_what_others_do_among_themselves_does_not():
    with warnings.catch_warnings(record=True):
        warn_in("dateutil.tz", DeprecationWarning)
        warn_in("torchmetrics", FutureWarning)
