"""The data of a run as a stream, which is tokenized while it is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice

import numpy as np

from lowmem_ft.data.batches.collating import Collator
from lowmem_ft.data.batches.epoch_rows import StreamedExamples
from lowmem_ft.data.mixing import drawn, probabilities_of
from lowmem_ft.data.prepared_data import PreparedData, digest_of, evaluation_fields
from lowmem_ft.data.repeated_rows import STREAM_NOT_LOOKED_AT
from lowmem_ft.data.row import TokenizedExample
from lowmem_ft.data.source_keys import without_weights
from lowmem_ft.data.sources.splits import Part, held_out_parts, training_parts
from lowmem_ft.data.tokenized_parts import NUM_EXAMPLES_TO_LOOK_AT, TokenizedParts
from lowmem_ft.foundation.errors import DataError

logger = logging.getLogger(__name__)


def streamed_data(tokenized: TokenizedParts, collate: Collator) -> PreparedData:
    """Return examples that are tokenized while they are read."""
    config = tokenized.config
    parts = training_parts(config)
    streams = [tokenized.stream(part) for part in parts]
    heads = [list(islice(stream.examples(), NUM_EXAMPLES_TO_LOOK_AT)) for stream in streams]
    for head in heads:
        tokenized.look_at(head)
    probabilities = probabilities_of([part.listed for part in parts])
    if len(parts) > 1 and probabilities is None:
        raise DataError(without_weights(len(parts)))

    def examples(generator: np.random.Generator) -> Iterator[TokenizedExample]:
        if probabilities is None:
            return streams[0].examples()
        starts = [stream.examples for stream in streams]
        return drawn(starts, probabilities, generator, stopping_strategy=config.stopping_strategy)

    train = StreamedExamples(
        examples,
        source=", ".join(str(part.source) for part in parts),
        shuffle_buffer_size=config.shuffle_buffer_size if config.shuffle else 1,
        pack_to=config.max_length if config.packing else None,
    )
    for part, probability in zip(parts, probabilities or (), strict=bool(probabilities)):
        logger.info("Of the examples of an epoch, %.1f%% come from %s.", 100 * probability, part.source)
    logger.info(STREAM_NOT_LOOKED_AT)
    evaluation = {part.listed.name: _held_out_stream(tokenized, part) for part in held_out_parts(config)}
    return PreparedData(
        train=train,
        summary=None,
        evaluation_summary=None,
        collate=collate,
        fingerprint=digest_of(
            array for head in heads for one in head for array in (one.input_ids_T, one.labels_T)
        ),
        formats=frozenset(tokenized.formats),
        **evaluation_fields(evaluation),
    )


def _held_out_stream(tokenized: TokenizedParts, part: Part) -> StreamedExamples:
    stream = tokenized.stream(part)
    return StreamedExamples(
        lambda _: stream.examples(),
        source=str(part.source),
        shuffle_buffer_size=1,
        pack_to=tokenized.config.max_length if tokenized.config.packing else None,
    )
