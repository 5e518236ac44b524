"""Cache of short traces, in memory and on disk: a repeated estimate traces nothing, a varied one half as much.

The key of a trace holds all that it depends on, see ``trace_key.py``. A recipe with another batch shape, with other
chunks or on another GPU runs the same program on other shapes: how its layers repeat, as two traces have shown for one
recipe, is reused for another recipe of the same model where its own short trace does the same in every layer, operator
for operator and free for free, and what grows with the number of layers has the same size. What it does elsewhere may
differ as far as batches and the head go (``inherited_proof.py``).
"""

from __future__ import annotations

import functools
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from lowmem_ft.foundation.system.atomic_write import whole_file
from lowmem_ft.foundation.user_paths import kept_folder
from lowmem_ft.planning.estimator.traces.trace_key import TraceKey
from lowmem_ft.planning.estimator.traces.traced_recipe import ShortTrace, TracedRecipe
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.replay.depth.inherited_proof import Outline, inherit, outline_of
from lowmem_ft.virtual_gpu.replay.depth.layer_extrapolation import Repetition
from lowmem_ft.virtual_gpu.replay.depth.layer_passes import Layers, structure_of
from lowmem_ft.virtual_gpu.replay.trace_files import arrays_of, trace_of

logger = logging.getLogger(__name__)

MAX_FOLDER_BYTES = 256 * 2**20
"""The most bytes of files; those used longest ago go first. A short trace of an 8B model takes 0.1 to 0.3 MB."""

MAX_IN_MEMORY = 8
"""The most short traces in memory; each takes some MB as objects."""

_SUFFIX = ".trace.npz"


class _Proof:
    """Repetition of layers, as shown for a trace, with that trace, or only its outline once that was needed.

    Args:
        repetition: how they repeat.
        trace: the trace.
    """

    def __init__(self, repetition: Repetition, trace: Trace) -> None:
        self.repetition = repetition
        self._trace: Trace | None = trace
        self._outline: Outline | None = None

    @property
    def layers(self) -> Layers:
        """The way in which they repeat."""
        return self.repetition.layers

    def inherited(self, trace: Trace, outline: Outline | None) -> Repetition | None:
        """Return how those of another trace, with its outline, repeat; None if this does not tell."""
        if self._trace is not None:
            self._outline, self._trace = Outline.of(self._trace, self.layers), None
        assert self._outline is not None
        return inherit(self.repetition, self._outline, outline, trace)


class KeptTraces:
    """Short traces by key.

    Several processes may share a folder: a file appears whole or not at all. A file that cannot be read, or is from
    another version, is traced again.

    Args:
        folder: the folder that keeps them beyond this process; None: they are not kept on disk.
        max_folder_bytes: the most bytes of all files there.
    """

    def __init__(self, folder: Path | None = None, *, max_folder_bytes: int = MAX_FOLDER_BYTES) -> None:
        self._folder = folder
        self._max_folder_bytes = max_folder_bytes
        self._in_memory: OrderedDict[TraceKey, ShortTrace] = OrderedDict()
        self._proofs: dict[str, dict[str, _Proof]] = {}
        self._layers: dict[str, Layers | None] = {}
        """For each family that was traced or looked up on disk: how the layers of the latest repeat."""

    @classmethod
    def of_user(cls) -> KeptTraces:
        """Return the traces of the user who runs this process, by ``LOWMEM_FT_TRACE_CACHE``."""
        return cls(kept_folder())

    def find(self, key: TraceKey) -> ShortTrace | None:
        """Return the trace with the same key, or None."""
        if key not in self._in_memory:
            file = self._file_of(key)
            found = None if file is None or not file.exists() else _read(file, key)
            if found is not None:
                self._remember(key, found)
        return self._in_memory.get(key)

    def shown_for(self, key: TraceKey, trace: Trace, layers: Layers) -> Repetition | None:
        """Return how the layers of a short trace repeat, by what was shown for a recipe of the same model, or None.

        Args:
            key: the trace's key.
            trace: the trace.
            layers: how its layers should repeat.
        """
        self._look_up(key)
        proofs = self._proofs.get(key.architecture)
        if proofs is None:
            return None
        same = proofs.get(structure_of(trace))
        if same is not None and same.layers == layers and same.repetition.holds_for(trace):
            return same.repetition
        others = [proof for proof in reversed(proofs.values()) if proof.layers == layers]
        outline = outline_of(trace, layers) if others else None
        return next(filter(None, (proof.inherited(trace, outline) for proof in others)), None)

    def _look_up(self, key: TraceKey) -> None:
        """Read the latest trace of the same program, if it is on disk and none was made here."""
        if key.family in self._layers or self._folder is None:
            return
        self._layers[key.family] = None
        files = sorted(self._folder.glob(f"{key.family}-*{_SUFFIX}"), key=_last_used_and_size, reverse=True)
        for file in files[:1]:
            shape = file.name.removeprefix(f"{key.family}-").removesuffix(_SUFFIX)
            self._learn(key, _read(file, key._replace(shape=shape)))

    def layers(self, key: TraceKey) -> Layers | None:
        """Return how the layers repeat in traces of the same program; None without a trace or a repetition."""
        self._look_up(key)
        return self._layers.get(key.family)

    def has(self, key: TraceKey, layers: Layers) -> bool:
        """Return whether a trace of the same model, by any program, was shown to repeat in a way."""
        return any(proof.layers == layers for proof in self._proofs.get(key.architecture, {}).values())

    def keep(self, key: TraceKey, short: ShortTrace) -> None:
        """Store a trace; only in memory if the folder is not writable."""
        self._remember(key, short)
        file = self._file_of(key)
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(file, key, short)
            self._make_room()
        except OSError as error:
            _say_that_none_is_kept(file.parent, error.strerror or str(error))

    def _learn(self, key: TraceKey, short: ShortTrace | None) -> None:
        if short is not None and short.repetition is not None:
            proofs = self._proofs.setdefault(key.architecture, {})
            proofs.setdefault(short.repetition.structure, _Proof(short.repetition, short.traced.trace))
            self._layers[key.family] = short.repetition.layers

    def _remember(self, key: TraceKey, short: ShortTrace) -> None:
        self._learn(key, short)
        self._in_memory[key] = short
        self._in_memory.move_to_end(key)
        if len(self._in_memory) > MAX_IN_MEMORY:
            self._in_memory.popitem(last=False)

    def _file_of(self, key: TraceKey) -> Path | None:
        return None if self._folder is None else self._folder / f"{key.family}-{key.shape}{_SUFFIX}"

    def _make_room(self) -> None:
        assert self._folder is not None
        total = 0
        for file in sorted(self._folder.glob(f"*{_SUFFIX}*"), key=_last_used_and_size, reverse=True):
            total += _last_used_and_size(file)[1]
            if total > self._max_folder_bytes:
                file.unlink(missing_ok=True)


@functools.cache  # once for all traces
def _say_that_none_is_kept(folder: Path, problem: str) -> None:
    logger.warning(
        "Traces are not kept in %s: %s. The same question will take as long again. LOWMEM_FT_TRACE_CACHE names another "
        "folder, or off.",
        folder,
        problem,
    )


def _last_used_and_size(file: Path) -> tuple[float, int]:
    """Return when a file was last read or written, and its bytes; another process may have removed it meanwhile."""
    try:
        found = file.stat()
    except OSError:
        return 0.0, 0
    return found.st_mtime, found.st_size


def _read(file: Path, key: TraceKey) -> ShortTrace | None:
    """Return a kept trace; None if it is damaged or not what it should be."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            trace, repetition, notes = trace_of(arrays)
        if notes.pop("key") != [key.family, key.shape]:
            raise ValueError("it is a trace of something else")
        more = tuple(notes.pop("more"))
        found = ShortTrace(traced=TracedRecipe(trace=trace, **notes), repetition=repetition, more=more)
        os.utime(file)
    except Exception as error:  # a damaged file makes zlib, zipfile and numpy raise all sorts of errors
        logger.info("The kept trace %s cannot be used, and is made again: %s.", file, error)
        return None
    return found


def _write(file: Path, key: TraceKey, short: ShortTrace) -> None:
    traced = short.traced
    notes: dict[str, Any] = {
        "key": [key.family, key.shape],
        "more": short.more,
        "tokens_per_micro_batch": traced.tokens_per_micro_batch,
        "batch": traced.batch,
        "vocabulary_size": traced.vocabulary_size,
        "copied_weight_bytes": traced.copied_weight_bytes,
    }
    arrays = arrays_of(traced.trace, short.repetition, **notes)
    with whole_file(file, is_cache=True) as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)
