"""Errors about what a trace cannot follow, in one line in place of torch's own text about dispatchers and storages."""

from __future__ import annotations

import re
import traceback

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.virtual_gpu.values.questions import is_of_library, shown_line

_NO_KERNEL = re.compile(r"Could not run '(?P<operator>[\w:.]+)' with arguments from the")
_NO_STORAGE = re.compile(r"Cannot access (?:storage|data pointer) of (?P<kind>\w+)|tensor with \w+ layout")
_NO_DATA = "its data is not allocated yet"
_SPARSE, _TRANSFORMED = ("SparseTensorImpl", "SparseCsrTensorImpl"), ("TensorWrapper", "BatchedTensorImpl")


def no_rule(operator: object, place: str) -> ModelError:
    """Return the error for an operator whose result no rule describes."""
    return ModelError(
        f"A trace needs to know the shape of what {operator} returns, and torch has no rule for it, at {place}. Give "
        "it one with torch.library.register_fake, or write that part with other operators."
    )


def lacks_kernel(error: BaseException) -> bool:
    """Return whether torch has looked for a kernel that only a real device has."""
    return isinstance(error, NotImplementedError) and _NO_KERNEL.search(str(error)) is not None


def what_cannot_be_traced(error: BaseException | None) -> ModelError | None:
    """Return our words for an error of torch's C++ about tensors without memory; None for other errors."""
    if not isinstance(error, (RuntimeError, NotImplementedError)) or isinstance(error, ModelError):
        return None
    text, place = str(error), _place_of(error)
    if (kernel := _NO_KERNEL.search(text)) is not None:
        return no_rule(kernel["operator"], place)
    if _NO_DATA in text:
        return ModelError(
            f"A trace has shapes and no values, and code in C++ reads values at {place}. Put it into an operator of "
            "torch.library with a rule (register_fake), or leave it out while tracing."
        )
    storage = _NO_STORAGE.search(text)
    if storage is None:
        return None
    if storage["kind"] in _TRANSFORMED:
        return ModelError(
            f"A trace follows tensors that have memory of their own, and not those inside torch.func (grad, vmap, "
            f"jvp), as at {place}. Compute these gradients by torch.autograd.grad, row by row, or leave them out "
            "while tracing."
        )
    return ModelError(
        f"A trace follows dense tensors, and not sparse ones, as at {place}. Estimate an embedding with sparse=False: "
        "its gradient then counts in full, where a sparse one takes the rows of a batch."
    )


def _place_of(error: BaseException) -> str:
    """Return the last line of the program's own code that led to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_of_library(frame.filename)] or frames
    return shown_line(own[-1].filename, own[-1].lineno) if own else "a line without source"
