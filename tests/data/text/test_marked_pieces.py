"""The text of tokens is shown whole, in pieces, and safe for a terminal."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowmem_ft.data.text.marked_pieces import Piece, marked_pieces
from lowmem_ft.foundation.system.visible import visible


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain\nlines, é 你好 🙂", "plain\nlines, é 你好 🙂"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("a\tb\rc\x00\x7f\x9b1m", r"a\tb\rc\x00\x7f\x9b1m"),
        ("left\u202eright\u2066\u200b\ufeff", r"left\u202eright\u2066\u200b\ufeff"),
        ("tag\U000e0041", r"tag\U000e0041"),
        ("half\ud83d", r"half\ud83d"),
        ("⟦ours⟧", r"\u27e6ours\u27e7"),
        ("👩\u200d💻 x\u200cy", "👩\u200d💻 x\u200cy"),
    ],
)
def test_what_a_terminal_would_obey_or_hide_is_written_out(text, shown):
    assert visible(text) == shown
    assert visible(shown) == shown


def test_pieces_are_the_whole_text(make_tokenizer):
    tokenizer = make_tokenizer()
    text = "<|im_start|>user\nHi 🙂 you<|im_end|>\n<|im_start|>assistant\nHo\x1b[2J there<|im_end|>\n"
    ids = np.array(tokenizer(text)["input_ids"])
    offset = len(tokenizer("<|im_start|>user\nHi 🙂 you<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    learnt = np.zeros(len(ids), dtype=bool)
    learnt[offset:-1] = True
    before, answer, after = marked_pieces(ids, learnt, tokenizer)
    assert before == Piece("<|im_start|>user\nHi 🙂 you<|im_end|>\n<|im_start|>assistant\n", is_learnt=False)
    assert answer == Piece(r"Ho\x1b[2J there<|im_end|>", is_learnt=True)
    assert after == Piece("\n", is_learnt=False)
    assert marked_pieces(ids[:0], learnt[:0], tokenizer) == []


def test_a_blank_at_the_beginning_of_a_piece_stays():
    """Decoders of SentencePiece drop the first blank of what they decode."""
    words = Tokenizer(models.WordLevel({"▁Say": 0, "▁yes": 1, "▁or": 2, "▁no": 3}, unk_token="▁no"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    pieces = marked_pieces(np.array([0, 1, 2, 3]), np.array([False, True, True, False]), tokenizer)
    assert [piece.text for piece in pieces] == ["Say", " yes or", " no"]
