"""What is found out before a model is loaded, and what a server that is stopped leaves."""

from __future__ import annotations

import json
import logging
import socket
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._dynamo.utils import counters

from served import figures, posted, serving, wait_for, write_checkpoint
from specache_compile.batching.batch import CHUNK
from specache_compile.cli import main
from specache_compile.serving import serve, server
from specache_compile.serving.serve import bound

pytestmark = pytest.mark.one_process


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The error of a server with these flags; without one, it would report that the model does not exist."""
    assert main(["serve", str(Path(__file__).parent), "--port", "0", *flags]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("listening", [lambda: socket.create_server(("127.0.0.1", 0)), lambda: bound("127.0.0.1", 0)])
def test_a_used_port_is_reported_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], listening: Callable[[], Any]
) -> None:
    """Also the port of a server that still loads its model."""
    with listening() as taken:
        message = refused(capsys, "--port", str(taken.getsockname()[1]))
    assert "cannot listen at --host 127.0.0.1" in message


@pytest.mark.parametrize("flags", [[], ["--quiet"]])
def test_a_quiet_server_prints_no_line_for_a_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    package = logging.getLogger("specache_compile.serving")
    handlers, level = list(package.handlers), package.level
    answering = SimpleNamespace(
        run=lambda sockets: server.log.info("POST /v1/completions 200"), generation=SimpleNamespace(warm_up=list)
    )
    monkeypatch.setattr(serve, "make_server", lambda *given: answering)
    try:
        assert main(["serve", "smollm2-135m", "--port", "0", *flags]) == 0
    finally:
        package.handlers[:] = handlers
        package.setLevel(level)
    assert ("POST /v1/completions 200" in capsys.readouterr().err) == (not flags)


def test_after_its_start_a_server_compiles_for_no_request(tmp_path: Path) -> None:
    prompts = ["ab", "c" * 30, "d" * (CHUNK + 30), "ef", "g" * 40]
    with serving(write_checkpoint(tmp_path), warm=True) as served, ThreadPoolExecutor() as clients:
        assert figures(served)["specache_sessions memory"] == 0
        graphs = counters["stats"]["unique_graphs"]
        sent = [{"prompt": prompt, "max_tokens": 9, "ignore_eos": True} for prompt in prompts]
        assert {status for status, _ in clients.map(partial(posted, served, "v1/completions"), sent)} == {200}
        assert counters["stats"]["unique_graphs"] == graphs > 0


def test_requests_without_the_api_key_are_rejected(tmp_path: Path) -> None:
    with serving(write_checkpoint(tmp_path), "--api-key", "none") as served:  # what the tests' client bears
        assert posted(served, "v1/completions", {"prompt": "a"}) == (
            401, "this server requires its API key. Send Authorization: Bearer KEY",
        )  # fmt: skip
        assert served.client.models.list().data[0].id == served.name
        assert figures(served)


def test_a_port_is_free_again_as_soon_as_its_server_has_stopped(tmp_path: Path) -> None:
    checkpoint, port = write_checkpoint(tmp_path), "0"
    for _ in range(2):
        with serving(checkpoint, "--port", port) as served:
            port = served.url.rpartition(":")[2]
            with socket.create_connection(("127.0.0.1", int(port))) as client:
                client.sendall(b"GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                while client.recv(99):  # the server closes first, and has the connection in TIME_WAIT
                    pass


def test_a_bad_folder_is_reported_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        message = refused(capsys, "--session-folder", str(folder))
        assert f"the spill folder {folder} cannot be written" in message


def test_a_stream_that_outlasts_the_server_gets_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "STOPPING", 0.1)
    body = {"prompt": "Go on. " * 9, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    lines: list[str] = []
    with serving(write_checkpoint(tmp_path)) as served:
        request = urllib.request.Request(
            f"{served.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        client = threading.Thread(
            target=lambda: lines.extend(line.decode() for line in urllib.request.urlopen(request))
        )
        client.start()
        wait_for(served, "specache_running", 1)
        while not figures(served)["specache_generated_tokens_total"]:
            pass
    client.join()
    last = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert (last["code"], last["type"]) == (503, "server_error")
    assert "the server is stopping" in last["message"]
    assert "Traceback" not in capfd.readouterr().err
