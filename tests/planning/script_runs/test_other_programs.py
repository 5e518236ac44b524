"""Programs that train no language model take on this machine what their estimates say."""

from __future__ import annotations

import pytest
from measuring.real_script import run_for_real

from lowmem_ft.planning.script_runs import estimate_script

SHARE = 0.001
"""What they may differ by: numbers that libraries keep for the log, and tensors of a few bytes."""

PACKED = """
    import torch
    from torch import nn
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(1000, 64)
            self.layers = nn.{layers}(64, 128, 2, batch_first=True, bidirectional=True, dropout=0.1)
            self.head = nn.Linear(256, 10)

        def forward(self, ids, lengths):
            rows = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
            return self.head(pad_packed_sequence(self.layers(rows)[0], batch_first=True)[0])

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Tagger().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for longest in (50, 70, 60):
        ids = torch.randint(0, 1000, (4, longest), device=device)
        lengths = torch.tensor([12, longest, longest - 9, 7])
        model(ids, lengths).logsumexp(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

PROGRAMS = {layers: PACKED.replace("{layers}", layers) for layers in ("LSTM", "GRU")}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_takes_on_this_machine_what_its_estimate_says(script, text):
    name = script(text)
    on_gpu = estimate_script(name, gpu="rtx-4090")
    found, real = estimate_script(name, gpu="cpu"), run_for_real(name)
    assert on_gpu.steps == found.steps == real.steps == 3
    assert "_pack_padded_sequence" not in " ".join(on_gpu.estimate.choices)
    assert found.kept_bytes == pytest.approx(real.kept_bytes, rel=SHARE)
    for phase in ("forward", "backward", "optimizer_step"):
        assert found.estimate.by_phase[phase] == pytest.approx(real.by_phase[phase], rel=SHARE), phase


def test_what_onednn_keeps_of_lstm_is_said_to_be_left_out(script):
    padded = PROGRAMS["LSTM"].replace(
        "pad_packed_sequence(self.layers(rows)[0], batch_first=True)[0]", "rows"
    )
    name = script(padded.replace("rows = pack", "rows = self.layers(self.words(ids))[0] #"))
    assert "oneDNN keeps of LSTM layers" in " ".join(estimate_script(name, gpu="cpu").estimate.not_modelled)
