"""Ten tasks on the page, in headless Chromium, on a screen and on a phone.

Each loads the page, changes something, sees a number move or a part appear, and where there is a command, copies and
runs it: its JSON has the same number.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowmem_ft.ui.kept_files import KeptFiles

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the browser is driven by playwright's Python package"
)
pytest.importorskip("gradio", reason="the page needs the extra ui")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
PATIENCE_MS = 600_000


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    caches = tmp_path_factory.mktemp("caches")
    return {**os.environ, "XDG_CACHE_HOME": str(caches), "LOWMEM_FT_TRACE_CACHE": str(caches / "traces")}


@pytest.fixture(scope="module")
def model(environment):
    files = KeptFiles(Path(environment["XDG_CACHE_HOME"], "lowmem_ft", "ui"))
    return files.keep_config(json.dumps(CONFIG).encode())


@pytest.fixture(scope="module")
def address(environment):
    program = [sys.executable, "-m", "lowmem_ft", "ui", "--port", "0"]
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True) as server:
        found = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())
        try:
            yield found[0]
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(params=[1400, 420])
def page(browser, address, model, request):
    """The page as it was opened, on a screen of that width; nothing may be asked of another server."""
    context = browser.new_context(viewport={"width": request.param, "height": 900})
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address.rstrip("/"))
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    asked, errors = [], []
    page.on("request", lambda each: asked.append(each.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.home, page.model = address, model
    page.goto(f"{address}?model={model}&length=512")
    peak_of(page)
    yield page
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert errors == []
    assert page.evaluate("document.documentElement.scrollWidth") == request.param
    context.close()


def peak_of(page):
    """Return the bytes on the page, once it works on nothing."""
    page.wait_for_function(
        "!document.querySelector('#progress .progress') && document.querySelector('#peak')",
        timeout=PATIENCE_MS,
    )
    return int(page.get_attribute("#peak", "data-bytes"))


def moved_from(page, before):
    page.wait_for_function(
        f"document.querySelector('#peak') && document.querySelector('#peak').dataset.bytes != '{before}'"
    )
    return peak_of(page)


def fill(page, name, text):
    field = page.locator(f"#{name} input, #{name} textarea").first
    field.fill(text)
    field.press("Enter")


def choose(page, name, text):
    page.locator(f"#{name} label", has_text=re.compile(f"^\\s*{text}\\s*$")).click()


def pick(page, name, text):
    field = page.locator(f"#{name} input").first
    field.click()
    field.fill(text)
    page.locator("[role=option]", has_text=text).first.click()


def copied(page, part):
    """Return what a click on a part's first copy button has put on the clipboard."""
    page.locator(f"#{part} .copied button").first.click()
    page.locator(f"#{part} .copied button", has_text="copied").wait_for()
    return page.evaluate("navigator.clipboard.readText()")


def json_of(command, environment, tmp_path):
    _, *words = shlex.split(command)
    file = tmp_path / "out.json"
    program = [sys.executable, "-m", "lowmem_ft", *words, "--json", str(file)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    return json.loads(file.read_text())


def test_1_longer_rows_move_the_number_and_the_command_agrees(page, environment, tmp_path):
    before = peak_of(page)
    fill(page, "length", "2048")
    after = moved_from(page, before)
    assert after > before
    assert json_of(copied(page, "command"), environment, tmp_path)["device"]["process_peak_bytes"] == after


def test_2_another_method_moves_the_number_and_the_command_agrees(page, environment, tmp_path):
    before = peak_of(page)
    choose(page, "method", "full")
    after = moved_from(page, before)
    command = copied(page, "command")
    assert "adapter.name=none" in command
    assert json_of(command, environment, tmp_path)["device"]["process_peak_bytes"] == after


def test_3_another_gpu_is_in_the_verdict(page):
    before = peak_of(page)
    pick(page, "gpu", "T4")
    moved_from(page, before)
    assert "on t4" in page.inner_text("#estimate")


def test_4_a_budget_below_the_need_does_not_fit(page):
    pick(page, "gpu", "the cheapest with the budget")
    page.locator("#progress .problem", has_text="for a GPU or for a budget").wait_for()
    fill(page, "budget", "1")
    page.locator("#estimate .verdict").wait_for()
    assert "of " in page.inner_text("#estimate .verdict")
    assert "budget.device=1GiB" in copied(page, "command")


def test_5_the_address_is_the_state(page):
    before = peak_of(page)
    fill(page, "length", "1024")
    after = moved_from(page, before)
    page.wait_for_function("location.search.includes('length=1024')")
    page.goto(page.url)
    page.locator("#peak").wait_for()
    assert peak_of(page) == after
    assert page.locator("#length input, #length textarea").first.input_value() == "1024"


def test_6_two_settings_side_by_side(page):
    before = peak_of(page)
    page.locator("#keep").click()
    page.locator("#compared table").wait_for()
    fill(page, "length", "2048")
    after = moved_from(page, before)
    assert after > before
    rows = page.locator("#compared tr", has_text="process at the peak").inner_text().split("\t")
    assert rows[-1].strip().startswith("+")
    page.wait_for_function("location.search.includes('kept=')")
    page.goto(page.url)
    page.locator("#compared tr", has_text="process at the peak").wait_for()
    assert page.locator("#compared tr", has_text="process at the peak").inner_text().split("\t") == rows


def test_7_the_recipe_and_the_lines_for_trl_are_copied(page):
    peak_of(page)
    page.get_by_role("tab", name="Recipe").click()
    assert "max_length: 512" in copied(page, "recipe-text")
    page.get_by_role("tab", name="TRL").click()
    lines = copied(page, "script")
    compile(lines, "script", "exec")
    assert "hf.attach(trainer, recipe)" in lines
    assert "data.max_length=512" in lines


def test_8_where_memory_ends_and_what_a_gib_buys(page):
    peak_of(page)
    page.locator("#ask-lengths").click()
    page.locator("#lengths table").wait_for()
    assert "4,096 tokens fit, the longest that the model takes" in page.inner_text("#lengths")
    assert "One GiB more" in page.inner_text("#lengths")


def test_9_gpus_and_methods_have_speeds_and_dollars(page):
    peak_of(page)
    page.locator("#ask-methods").click()
    page.locator("#methods table").wait_for()
    heads = page.locator("#methods th").all_inner_texts()
    assert {"GPU", "LoRA", "QLoRA", "tok/s", "$/1M"} <= {*heads}
    assert page.locator("#methods tbody tr").count() > 20


def test_10_a_plan_with_reasons_and_a_question_that_is_cancelled(page):
    before = peak_of(page)
    fill(page, "length", str(page.viewport_size["width"]))  # a plan that the server remembers takes no time
    moved_from(page, before)
    page.locator("#ask-plan").click()
    page.locator("#plan .progress").wait_for()
    page.locator("#cancel").click()
    page.locator("#progress .problem", has_text="Cancelled").wait_for()
    page.locator("#plan .progress").wait_for(state="detached")
    page.locator("#ask-plan").click()
    page.locator("#plan table, #plan dl").first.wait_for()
    assert "combinations considered" in page.inner_text("#plan")
    assert "lowmem-ft train" in page.inner_text("#plan")


def test_a_name_outside_the_catalogue_is_refused_and_nothing_is_read(page):
    for name in ("../../../etc", "someone/elses-model", "${oc.env:HOME}"):
        page.goto(f"{page.home}?model={name}&more=adapter.r%3D%24%7Boc.env%3AHOME%7D")
        page.locator("#progress .problem").first.wait_for()
        assert page.locator("#peak").count() == 0
