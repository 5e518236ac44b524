"""A row of a batch before it becomes tensors: one example, or with packing several. Axes: T tokens of one example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np

IGNORED_LABEL = -100
"""Label of a token without loss (torch's and transformers' ``ignore_index``)."""

LENGTH_MULTIPLE = 8
"""Multiple to which row lengths are rounded up: tensor cores need it, and the allocator sees fewer sizes."""


@dataclass(frozen=True)
class TokenizedExample:
    """One example as model inputs.

    Args:
        sample_id: index among the rows of the source; those of a second source continue the first's, except in a
            stream.
        input_ids_T: int64 token ids.
        labels_T: int64, -100 where nothing is learnt; the first always is.
    """

    sample_id: int
    input_ids_T: np.ndarray
    labels_T: np.ndarray


Row: TypeAlias = list[TokenizedExample]
