"""The server of the page: who is answered, and what the page may load."""

from __future__ import annotations

import re
import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("gradio", reason="the page needs the extra ui: pip install 'lowmem-ft[ui]'")
import httpx
from processes import LIMIT_SECONDS

from lowmem_ft.cli import main
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.ui import serving
from lowmem_ft.ui.desk import Desk
from lowmem_ft.ui.form import Form
from lowmem_ft.ui.kept_files import KeptFiles
from lowmem_ft.ui.page import make_page


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    kept = KeptFiles(tmp_path_factory.mktemp("kept"))
    page = make_page(Desk(), kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", "")  # which the launch sets, and is put back here
        patch.setenv("NO_PROXY", "*")
        serving.launch(page, kept.folder / "uploads", 0, lambda address: None)
        yield page
        page.close(verbose=False)


@pytest.fixture(scope="module")
def client(page):
    with httpx.Client(base_url=page.local_url, timeout=LIMIT_SECONDS) as client:
        yield client


def test_the_server_is_for_this_machine_alone(page):
    assert page.server_name == "127.0.0.1"
    assert page.share is False
    assert page.local_url.startswith("http://127.0.0.1:")


def test_a_port_in_use_is_told_without_words_of_the_library(page, tmp_path):
    with pytest.raises(
        UserError, match=rf"got {page.server_port}, which is in use or reserved\. Name another"
    ) as raised:
        serving.launch(
            make_page(Desk(), KeptFiles(tmp_path)), tmp_path, page.server_port, lambda address: None
        )
    assert "GRADIO" not in str(raised.value)


def test_the_page_loads_nothing_from_elsewhere(client):
    answer = client.get("/")
    assert answer.status_code == 200
    loaded = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"([^\"]+)\"", answer.text)
    assert loaded != []
    assert [url for url in loaded if re.match(r"(https?:)?//", url) and "127.0.0.1" not in url] == []
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy


@pytest.mark.parametrize("host, code", [("127.0.0.1:1", 200), ("localhost", 200), ("evil.example", 400)])
def test_only_this_machines_names_are_answered(client, host, code):
    assert client.get("/", headers={"Host": host}).status_code == code


@pytest.mark.parametrize(
    "origin, code", [("http://evil.example", 403), ("null", 403), ("http://127.0.0.1:1", 403), (None, 200)]
)
def test_pages_of_other_servers_can_send_nothing(page, client, origin, code):
    """The last row is the page's own, and sends the same."""
    headers = {"Origin": origin or page.local_url.rstrip("/")}
    sent = client.post("/gradio_api/upload", files={"files": ("a.json", b"{}")}, headers=headers)
    assert sent.status_code == code


def test_what_a_browser_sent_is_gone_after_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")
    seen = []

    def stop(page, uploads, port, on_ready):
        (uploads / "data.jsonl").write_text("{}")
        seen.append(uploads)
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "launch", stop)
    monkeypatch.setattr(Desk, "start", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        serving.serve(0, lambda address: None)
    assert list((tmp_path / "lowmem_ft" / "ui").iterdir()) == []
    assert seen[0].parent == tmp_path / "lowmem_ft" / "ui"


def test_ctrl_c_closes_the_page_and_ends_as_ctrl_c_ends_other_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")
    monkeypatch.setattr(Desk, "start", lambda self: None)
    stop = SimpleNamespace(sleep=lambda seconds: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(serving, "time", stop)
    monkeypatch.setattr(serving, "launch", lambda page, *_: setattr(page, "is_running", True))
    assert main(["ui"]) == 130
    assert "Stopped by SIGINT and the page is closed." in capsys.readouterr().err


def test_no_file_of_this_machine_is_served(client):
    for path in ("/etc/passwd", "../../../etc/passwd"):
        assert client.get(f"/gradio_api/file={path}").status_code in (403, 404)


def test_gradio_sends_no_analytics(page, client):
    assert page.analytics_enabled is False
    assert client.get("/config").json()["analytics_enabled"] is False


def test_no_event_of_the_page_is_a_public_endpoint(client):
    assert client.get("/gradio_api/info").json()["named_endpoints"] == {}


def test_the_page_has_each_field_of_the_form(page):
    names = {block.elem_id for block in page.blocks.values()}
    assert {*vars(Form())} <= names
