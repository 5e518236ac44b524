"""`lowmem-ft export`, as a user meets it."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
import urllib.request
from pathlib import Path

import pytest
import torch
from llama_cpp_library import fetch_llama_cpp, llama_cpp_logits
from tiny_models import TINY
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

pytest.importorskip("peft")

from lowmem_ft.cli import main
from lowmem_ft.training.export import exported_answers, exporting

KEPT_RUNS = Path(__file__).parents[2] / "data" / "kept_runs"
SOURCE_PACKAGE = "https://pypi.org/simple/llama-cpp-python/"


@pytest.fixture(autouse=True)
def _captured_logs(caplog):
    caplog.set_level("INFO")


@pytest.fixture
def folders(base_and_adapter):
    return base_and_adapter(hidden_size=64)


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("width", [32, 96])
def test_widths_that_are_no_whole_blocks_are_exported_with_a_warning(tmp_path, caplog, width):
    """bitsandbytes fails with them on CPUs with AVX512-BF16, whatever the model."""
    config = LlamaConfig(
        hidden_size=width, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=512
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "base")
    assert main(["export", str(tmp_path / "base"), str(tmp_path / "out"), "--quantized", "nf4"]) == 0
    assert f"model.layers.0.self_attn.q_proj has {width} inputs" in caplog.text


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_quantized_adapter_is_a_folder_that_from_pretrained_loads_in_four_bits(folders, capsys, caplog):
    pytest.importorskip("bitsandbytes")
    tmp_path, _, adapter, adapted = folders
    assert main(["export", str(adapter), str(tmp_path / "out"), "--quantized", "nf4"]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    packed = [name for name, weight in loaded.named_parameters() if weight.dtype == torch.uint8]
    assert len(packed) == 14
    assert loaded.config.quantization_config.bnb_4bit_quant_type == "nf4"
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    bits = loaded.config.quantization_config
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", quantization_config=bits)
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, wanted(ids).logits)
    assert not torch.equal(loaded(ids).logits, adapted(ids).logits)
    said = capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    source = exported_answers.greedy_answer(merged, AutoTokenizer.from_pretrained(TINY))
    exported = exported_answers.greedy_answer(loaded, AutoTokenizer.from_pretrained(tmp_path / "out"))
    assert (
        f"the first {exported_answers.Comparison(source, exported).num_agreeing} of {len(source.ids)}" in said
    )
    verdict = next(line for line in said.splitlines() if line.startswith("verdict"))
    assert "the same model, rounded: " in verdict
    assert (
        f"`lowmem-ft evaluate {adapter} data=FILE`, without and with model.quantization=nf4" in verdict
    ) == (source.ids != exported.ids)
    assert "nf4 for 81,920 of" in caplog.text
    assert "Linear layers are in 4 bits" in (tmp_path / "out" / "README.md").read_text()
    assert _left(tmp_path) == ["adapter", "base", "merged", "out"]


def test_a_run_stands_for_its_model_and_merges_as_the_other_command_does(folders, caplog):
    tmp_path, _, adapter, _ = folders
    run = tmp_path / "run"
    shutil.copytree(adapter, run / "model")
    (run / "recipe.yaml").write_text("model: {name_or_path: any}\nadapter: {name: lora}\n")
    (run / "metrics.jsonl").write_text("")
    assert main(["export", str(run), str(tmp_path / "one"), "--merged"]) == 0
    assert main(["merge", str(adapter), str(tmp_path / "other")]) == 0
    assert f"{run} holds a run: its model is used" in caplog.text
    one, other = (tmp_path / name / "model.safetensors" for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_an_unfinished_run_stands_for_its_newest_checkpoint(tmp_path, caplog):
    run = KEPT_RUNS / "d010f8e" / "lora"
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--merged", "--base", str(KEPT_RUNS / "model")]) == 0
    assert f"{run} holds a run: its checkpoint-2 is used" in caplog.text
    base, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (KEPT_RUNS / "model", out))
    assert not torch.equal(base(torch.arange(8)[None]).logits, merged(torch.arange(8)[None]).logits)


@pytest.mark.parametrize(
    "source, options, says",
    [
        ("base", ["--merged"], "is a plain model already"),
        ("run", ["--merged"], "has neither a finished model (model/) nor a complete checkpoint"),
        ("base", ["--gguf", "q8_0"], "found by --llama-cpp DIR, got none"),
        ("base", ["--gguf", "q8_0", "--llama-cpp", "base"], "base has no such file"),
        ("base", ["--quantized", "nf4", "--llama-cpp", "base"], "--llama-cpp is for --gguf"),
        ("base", ["--quantized", "nf4", "--base", "base"], "--base=base is the base of an adapter"),
        ("adapter", [], "One of the arguments --merged --quantized --gguf is required"),
    ],
)
def test_what_cannot_be_exported_says_why(folders, monkeypatch, capsys, source, options, says):
    tmp_path = folders[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("recipe.yaml", "metrics.jsonl"):
        (tmp_path / "run" / name).write_text("")
    assert main(["export", source, "out", *options]) == 2
    assert says in capsys.readouterr().err
    assert _left(tmp_path) == ["adapter", "base", "run"]


def test_a_folder_in_use_and_a_full_disk_are_refused_before_anything_is_written(folders, monkeypatch, capsys):
    tmp_path, base, adapter, _ = folders
    assert main(["export", str(adapter), str(base), "--merged"]) == 2
    assert "exists already, and is not empty" in capsys.readouterr().err
    usage = shutil.disk_usage(tmp_path)._replace(free=64 * 2**20 + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for options in (["--merged"], ["--quantized", "nf4"]):
        assert main(["export", str(adapter), str(tmp_path / "out"), *options]) == 2
        said = capsys.readouterr().err
        assert re.search(r"needs \S+ MiB on its disk \(.*(merged|4 bits)\S*.*and 64.0 MiB are free", said), (
            said
        )
    assert _left(tmp_path) == ["adapter", "base"]


def _converter(folder: Path, program: str) -> Path:
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(f"import sys\n{program}\n")
    return folder


@pytest.mark.parametrize(
    "program, says",
    [
        ("import no_such_package", "needs the package no_such_package"),
        ("print('what?'); sys.exit('Model X is not supported')", r"(exit code 1): Model X is not supported"),
        ("", "(exit code 0): it said nothing"),
    ],
)
def test_a_converter_that_fails_leaves_nothing_and_says_why(folders, capsys, program, says):
    tmp_path, _, adapter, _ = folders
    llama_cpp = _converter(tmp_path / "llama", program)
    options = ["--gguf", "bf16", "--llama-cpp", str(llama_cpp)]
    assert main(["export", str(adapter), str(tmp_path / "out"), *options]) == 2
    assert says in capsys.readouterr().err
    assert _left(tmp_path) == ["adapter", "base", "llama"]


def test_an_interrupted_or_killed_export_leaves_nothing_half_done(folders, monkeypatch, capsys):
    tmp_path, _, adapter, _ = folders
    llama_cpp = _converter(tmp_path / "llama", "")
    options = ["--gguf", "bf16", "--llama-cpp", str(llama_cpp)]
    left = tmp_path / "out.incomplete"  # by a process that was killed
    left.mkdir()
    (left / "out-q8_0.gguf").write_bytes(b"half")

    def stopped(converter, folder, target, gguf_type):
        assert (folder / "model.safetensors").is_file()
        assert _left(target.parent) == []
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "convert_to_gguf", stopped)
    assert main(["export", str(adapter), str(tmp_path / "out"), *options]) == 130
    assert _left(tmp_path) == ["adapter", "base", "llama"]


def test_code_that_a_model_brings_is_never_run(folders, capsys):
    tmp_path, base, _, _ = folders
    config = json.loads((base / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["code.Evil", None]}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    llama_cpp = _converter(tmp_path / "llama", "raise SystemExit('it ran')")
    options = ["--gguf", "bf16", "--llama-cpp", str(llama_cpp)]
    assert main(["export", str(base), str(tmp_path / "out"), *options]) == 2
    assert "names some (auto_map)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ids, difference, says",
    [
        ([1, 2, 3], 0.0, "^the same model: logits are equal to the bit$"),
        ([1, 2, 3], 0.1, r"rounded: 10\.\d\d%, .*; the answer is the same$"),
        (
            [9, 2, 3],
            0.1,
            r"rounded: 10\.\d\d%, where 0% is equal and 100% is refused\. .* Compare losses: `measure`$",
        ),
    ],
)
def test_a_comparison_ends_with_its_verdict(ids, difference, says):
    logits_V = torch.linspace(-1.7, 1.7, 101)  # of about 1 standard deviation
    source = exported_answers.Answer([0], [1, 2, 3], "one", logits_V)
    exported = exported_answers.Answer([0], ids, "other", logits_V + difference)
    label, verdict = exported_answers.Comparison(source, exported).rows("`measure`")[-1]
    assert label == "verdict"
    assert re.search(says, verdict)


def test_an_export_that_answers_like_another_model_is_refused(folders, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    tmp_path, base, _, _ = folders
    stock = exporting.greedy_answer

    def other(model, tokenizer, prompt_ids=None):
        answer = stock(model, tokenizer, prompt_ids)
        return (
            answer
            if prompt_ids is None
            else exported_answers.Answer(answer.prompt_ids, answer.ids, answer.text, -answer.logits_V)
        )

    monkeypatch.setattr(exporting, "greedy_answer", other)
    assert main(["export", str(base), str(tmp_path / "out"), "--quantized", "nf4"]) == 2
    assert "is not the source's model" in capsys.readouterr().err
    assert _left(tmp_path) == ["adapter", "base"]


@pytest.fixture(scope="module")
def llama_cpp_source(tmp_path_factory):
    """A folder with llama.cpp's converter, from the source package of llama-cpp-python."""
    try:
        page = urllib.request.urlopen(SOURCE_PACKAGE, timeout=60).read().decode()
        found = re.findall(r'href="([^"#]*llama_cpp_python-0\.3\.36\.tar\.gz)', page)
        packed = urllib.request.urlopen(found[0], timeout=600).read()
    except (OSError, IndexError) as error:
        pytest.skip(f"the source package of llama-cpp-python cannot be had: {error}")
    folder = tmp_path_factory.mktemp("llama_cpp")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/vendor/llama.cpp"))


def _llama_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of Llama 2's kind, which the converter knows by its form; others it knows by their vocabulary."""
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *bytes_])
    tokenizer.train([str(TINY / "data.jsonl")], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.slow
def test_llama_cpp_itself_computes_the_logits_of_the_exported_file(tmp_path, llama_cpp_source, capsys):
    for package in ("gguf", "sentencepiece"):
        pytest.importorskip(package)
    tokenizer = _llama_tokenizer()
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=len(tokenizer),
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    base = tmp_path / "base"
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    (tmp_path / "npm").mkdir()
    libraries = fetch_llama_cpp(tmp_path / "npm")
    for gguf_type, most in (("f32", 1e-3), ("bf16", 0.02), ("q8_0", 0.05)):
        target = tmp_path / gguf_type
        options = ["--gguf", gguf_type, "--llama-cpp", str(llama_cpp_source)]
        assert main(["export", str(base), str(target), *options]) == 0
        said = capsys.readouterr().out
        assert f"llama-cli -m {target / f'{gguf_type}-{gguf_type}.gguf'}" in " ".join(said.split())
        if gguf_type == "f32":
            assert "export says  the same" in said
            assert "differ by at most 0," in said
        assert (target / "Modelfile").read_text() == f"FROM ./{gguf_type}-{gguf_type}.gguf\n"
        ids, logits_V = llama_cpp_logits(
            libraries, target / f"{gguf_type}-{gguf_type}.gguf", exported_answers.PROMPT
        )
        assert [id for id in ids if id != tokenizer.bos_token_id] == tokenizer(exported_answers.PROMPT)[
            "input_ids"
        ]
        with torch.no_grad():
            wanted_V = model.eval()(torch.tensor([ids])).logits[0, -1]
        assert (logits_V - wanted_V).square().mean().sqrt() < most * wanted_V.std()
    capsys.readouterr()
