"""The choice of examples to train on, how to read them, and which of their tokens to learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lowmem_ft.data.source_keys import source_problems
from lowmem_ft.foundation.errors import DataError
from lowmem_ft.foundation.knob import Effect, knob
from lowmem_ft.foundation.memory.least_memory import PARTS_BY_TOKENS

FormatName = Literal["messages", "conversations", "prompt_completion", "alpaca", "text", "tokens"]
LossOn = Literal["completion", "assistant", "all"]
SampleBy = Literal["line", "paragraph", "document"]

MOST_PROCESSES = 1024


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training data, an optional held-out part, and the processing of examples into batches."""

    path: str | None = knob(
        None,
        "Hub dataset name, or a local json/jsonl/csv/tsv/parquet/txt file (or .gz of one), a folder of them, or a "
        "glob; several are separated by commas.",
    )
    sources: list[dict[str, Any]] | None = knob(
        None,
        "Several sources in place of path, as [{path: a.jsonl}, {path: b.jsonl, repeats: 2}]: each may have "
        "data's name, revision, data_files, split, sample_by, max_samples, format, *_column, system_prompt and loss_on "
        "for itself. repeats: how often each of its examples occurs in an "
        "epoch, 1 if it does not say. Or a weight for every source: the next example is drawn from a source with a "
        "probability in proportion to its weight, as by datasets.interleave_datasets(probabilities=...), once for all "
        "epochs, from training.seed; an epoch ends as stopping_strategy says.",
    )
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = knob(
        "first_exhausted",
        "With weights, what ends an epoch, as in interleave_datasets: the first source that has no example left, so "
        "that others are read in part; or the last one, until which the others begin again.",
    )
    name: str | None = knob(None, "Configuration of a hub dataset, as in load_dataset(path, name).")
    revision: str | None = knob(None, "Hub branch, tag or commit; null: the default branch.")
    data_files: list[str] | None = knob(None, "Files inside the hub repository or folder; null: all files.")
    split: str = knob(
        "train", "Split to train on; slices such as train[:10%] work. Local files hold `train` only."
    )
    sample_by: Literal["line", "paragraph", "document"] = knob(
        "line",
        "What is one example of a txt file, as in load_dataset('text'): a line, a paragraph (up to a blank line), or "
        "the whole file; longer examples than max_length are split.",
    )
    streaming: bool = knob(
        False,
        "Read and tokenize while training, without a copy on disk; a resumed run reads again up to its position.",
        frees="disk: no tokenized copy",
        costs="tokenizing time in every epoch, and in every process",
    )
    max_samples: int | None = knob(None, "Read only the first n examples of the training split; null: all.")

    format: Literal["auto", "messages", "conversations", "prompt_completion", "alpaca", "text", "tokens"] = (
        knob("auto", "What an example looks like; auto: recognised from the columns, and logged.")
    )
    messages_column: str | None = knob(None, "Column of message lists; null: messages or conversations.")
    prompt_column: str | None = knob(None, "Column of prompts; null: prompt (alpaca: instruction).")
    input_column: str | None = knob(
        None, "Column of an additional input below an alpaca instruction; null: input, if it exists."
    )
    completion_column: str | None = knob(None, "Column of completions; null: completion (alpaca: output).")
    text_column: str | None = knob(None, "Column of raw text; null: text.")
    system_prompt: str | None = knob(None, "System message for chats without one; null: no message is added.")
    chat_template: str | None = knob(None, "File with a Jinja chat template; null: the tokenizer's own.")
    loss_on: Literal["auto", "completion", "assistant", "all"] = knob(
        "auto",
        "Tokens to learn: the completion (of a chat: the last assistant turn), every assistant turn, or all. "
        "auto: completion for prompt/completion and alpaca, assistant for chats, all for text, the labels for tokens.",
    )

    max_length: int | None = knob(
        1024,
        "Longest example in tokens; longer ones are truncated (text: split) and counted; null: the model's limit.",
        frees="activations grow with the tokens of a micro-batch",
        costs="tokens beyond the limit are not learnt",
        effects=Effect(fidelity="other mathematics", consent="shorter_rows"),
        search_values=(4096, 2048, 1024, 512),
        remaining_bytes=PARTS_BY_TOKENS,
    )
    packing: bool = knob(
        False,
        "Join short examples into rows of max_length; attention and positions of each stay separate.",
        frees="padding",
        costs="sdpa and eager attention build a mask of max_length x max_length for each row",
    )
    documents_per_row: int | None = knob(
        None,
        "Documents that an estimate assumes in a packed row, since attention costs by their lengths; null: 4. Training "
        "and rehearsals count those of the data, and `lowmem-ft data` says how many they are.",
    )
    group_by_length: bool = knob(
        False,
        "Batch examples of similar length, so that less is padded.",
        frees="padding",
        costs="batches are less random",
    )
    shuffle: bool = knob(
        True, "A new order in every epoch, from training.seed; false: the order of the files."
    )
    shuffle_buffer_size: int = knob(
        1000, "With streaming: examples held in memory to draw the next one from."
    )

    eval_path: str | None = knob(
        None, "Held-out examples, as for data.path; null: see eval_split, eval_size."
    )
    eval_split: str | None = knob(None, "Held-out split of eval_path, or of path if eval_path is null.")
    eval_size: float | None = knob(
        None,
        "Number of training examples to hold out (below 1: their share), from each source, drawn by training.seed.",
    )
    num_proc: int | None = knob(
        None, "Processes that tokenize; null: this one, or for more than 20,000 rows one on each core."
    )

    @property
    def has_held_out(self) -> bool:
        """True if some rows are held out."""
        return any(source is not None for source in (self.eval_path, self.eval_split, self.eval_size))

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves, before any file is read."""
        if self.sources is not None:
            yield from source_problems(self.sources, streaming=self.streaming)
        if self.sources is not None and self.path is not None:
            yield (
                f"data.sources takes the place of data.path, got {self.path} as well. Set one of them to null, or add "
                "that path to the sources."
            )
        if self.stopping_strategy != "first_exhausted" and not any(
            source.get("weight") for source in self.sources or ()
        ):
            yield (
                f"data.stopping_strategy={self.stopping_strategy} says where an epoch of weighted sources ends, and no "
                "source of data.sources has a weight. Add weights, or set it to first_exhausted."
            )
        yield from self._problems_of_rows()
        yield from self._problems_of_held_out()

    def _problems_of_rows(self) -> Iterator[str]:
        for key in ("max_samples", "shuffle_buffer_size", "num_proc"):
            value = getattr(self, key)
            if value is not None and value < 1:
                yield f"data.{key} is at least 1, got {value}."
        if self.num_proc is not None and self.num_proc > MOST_PROCESSES:
            yield f"data.num_proc is at most {MOST_PROCESSES}, got {self.num_proc}. Set it to the number of cores."
        if self.max_length is not None and self.max_length < 2:
            yield f"data.max_length is at least 2 (one token predicts the next), got {self.max_length}."
        if self.documents_per_row is not None:
            if self.documents_per_row < 1:
                yield f"data.documents_per_row is at least 1, got {self.documents_per_row}."
            if not self.packing:
                yield (
                    f"data.documents_per_row={self.documents_per_row} says what packed rows hold, and data.packing is "
                    "false: each row is one document. Set data.packing=true, or leave it out."
                )
        if self.packing and self.group_by_length:
            yield (
                "data.packing fills every row, so data.group_by_length=true has nothing to group. Set one of them to "
                "false."
            )
        if self.streaming and self.group_by_length:
            yield (
                "data.group_by_length needs all lengths beforehand, which data.streaming=true does not have. Set one "
                "of them to false."
            )
        if self.streaming and self.num_proc is not None:
            yield (
                f"data.num_proc={self.num_proc} works on files that are tokenized beforehand, not with "
                "data.streaming=true. Set data.num_proc=null."
            )
        if self.group_by_length and not self.shuffle:
            yield (
                "data.group_by_length reorders examples, so it needs data.shuffle=true, got false. "
                "Set data.group_by_length=false to keep the order of the files."
            )

    def _problems_of_held_out(self) -> Iterator[str]:
        if self.eval_size is not None and self.eval_size <= 0:
            yield (
                f"data.eval_size is a number of examples, or a share between 0 and 1, got {self.eval_size:g}. "
                "Set data.eval_size=null to hold out nothing."
            )
        if self.eval_size is not None and self.eval_size > 1 and not float(self.eval_size).is_integer():
            yield f"data.eval_size above 1 is a whole number of examples, got {self.eval_size:g}."
        if self.eval_size is not None and (self.eval_path is not None or self.eval_split is not None):
            yield (
                "data.eval_size takes the held-out part from the training data, but data.eval_path or "
                "data.eval_split is set already. Set only one of them."
            )
        if self.eval_size is not None and self.streaming:
            yield (
                "data.eval_size chooses among all examples, which data.streaming=true does not know beforehand. "
                "Use data.eval_path or data.eval_split."
            )

    @property
    def is_named(self) -> bool:
        """True if any training data is named."""
        return self.path is not None or self.sources is not None

    def refuse_positions(self, limit: int | None) -> None:
        """Reject rows that are longer than a model accepts.

        Args:
            limit: the model's, in tokens; None: it has none.

        Raises:
            DataError: if they are.
        """
        if self.max_length is not None and limit is not None and self.max_length > limit:
            raise DataError(
                f"data.max_length is at most what the model takes, {limit} tokens, got {self.max_length}. "
                f"Set data.max_length={limit} or less, or null for the model's limit."
            )
