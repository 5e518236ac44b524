"""What limits would cut is counted from whole examples, and agrees with what training then reads."""

import numpy as np
import pytest

from lowmem_ft.data.length_profile import LengthProfile
from lowmem_ft.data.text.summary import Outcome
from lowmem_ft.foundation.errors import DataError

CHATS = [
    {
        "messages": [
            {"role": "user", "content": "so " * asked},
            {"role": "assistant", "content": "yes " * answered},
        ]
    }
    for asked, answered in [(3, 4), (30, 2), (2, 40), (12, 12), (60, 60), (1, 1)]
]
TEXTS = [{"text": "word " * count} for count in (1, 7, 8, 9, 16, 17, 40, 100)]


def profile_of(data, *, splits=False):
    return LengthProfile(data.train.masks(), splits=splits)


@pytest.mark.parametrize("max_length", [2, 8, 24, 33, 64, 200])
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_it_agrees_with_rows_that_are_cut(max_length, loss_on, write_jsonl, load):
    path = write_jsonl(CHATS)
    profile = profile_of(load(path, max_length=None, loss_on=loss_on))
    cut = profile.cut_at(max_length)
    if cut.rows == 0:
        with pytest.raises(DataError, match="Nothing is left to learn"):
            load(path, max_length=max_length, loss_on=loss_on)
        return
    data = load(path, max_length=max_length, loss_on=loss_on)
    summary = data.summary
    assert cut.rows == summary.num_examples
    assert cut.rows_cut == summary.num_cut
    assert cut.answers_cut == summary.num_answers_cut
    assert cut.rows_left_out == summary.outcomes[Outcome.ANSWER_CUT_OFF]
    assert profile.num_labels - cut.labels_lost == summary.num_label_tokens
    assert cut.tokens_lost == sum(max(0, length - max_length) for length in profile.lengths_R.tolist())
    assert profile.row_lengths(max_length).tolist() == data.train.row_lengths.tolist()


@pytest.mark.parametrize("max_length", [2, 8, 9, 16, 50, 500])
def test_raw_text_is_split_as_in_training(max_length, write_jsonl, load):
    path = write_jsonl(TEXTS)
    profile = profile_of(load(path, max_length=None), splits=True)
    data, cut = load(path, max_length=max_length), profile.cut_at(max_length)
    assert profile.row_lengths(max_length).tolist() == data.train.row_lengths.tolist()
    assert (cut.rows, cut.rows_cut) == (data.summary.num_examples, data.summary.num_cut)
    assert (cut.tokens_lost, cut.labels_lost) == (0, 0)


def test_parts_of_the_masks_add_up():
    parts = [([3, 2], [0, 1, 1, 0, 1]), ([4], [0, 0, 0, 1])]
    masks = [(np.array(lengths), np.array(mask, dtype=bool)) for lengths, mask in parts]
    profile = LengthProfile(masks, splits=False)
    assert (profile.longest, profile.num_labels) == (4, 4)
    cut = profile.cut_at(2)
    assert (cut.rows_cut, cut.answers_cut, cut.rows_left_out, cut.labels_lost, cut.tokens_lost) == (
        2,
        2,
        1,
        2,
        3,
    )
    assert profile.row_lengths(2).tolist() == [2, 2]
    assert profile.row_lengths(None).tolist() == [3, 2, 4]
