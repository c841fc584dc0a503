"""The folder of stored traces: each file is whole, and a damaged, full or read-only folder only costs time."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

import specache_compile as sc
from kept_traces import ALL, Traces, llama, run
from specache_compile import entry
from specache_compile.cache_folder import VARIABLE, cache_folder
from specache_compile.warm import hooks, trace_folder


def test_damaged_files_are_ignored(kept: Traces, folder: Path) -> None:
    for file in folder.glob("*/*/*/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert run(llama(), kept) == 1
    assert run(llama(), kept) == 0


READ_ONLY = Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))


def test_a_folder_that_takes_no_file_is_nothing_but_slower(
    traces: Traces, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "mkdir", READ_ONLY)
    with pytest.warns(sc.SpecacheWarning, match="Read-only file system") as warned:
        assert run(llama(), traces, ALL) == 3
    monkeypatch.undo()
    assert sum("stored for later processes" in str(warning.message) for warning in warned) == 1
    assert [file for file in folder.rglob("*") if file.is_file()] == []


def test_a_folder_that_is_read_only_is_read(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, whose image contains the folder."""
    assert run(llama(), traces, ALL) == 3
    for name in ("mkdir", "replace"):
        monkeypatch.setattr(os, name, READ_ONLY)
    assert run(llama(), traces) == 0


def test_a_call_has_a_limited_number_of_traces(kept: Traces, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config with another constant makes one more trace of the same call."""
    monkeypatch.setattr(trace_folder, "MOST_TRACES", 1)
    assert run(llama(rms_norm_eps=1e-2), kept) == 1
    assert [len(list(call.iterdir())) for call in folder.glob("*/*")] == [1, 1, 1]
    assert run(llama(rms_norm_eps=1e-2), kept) == 0


@pytest.mark.parametrize(("given", "calls"), [("", 0), ("/a/folder", 1)], ids=["unset", "a folder"])
def test_dynamo_is_patched_only_where_the_variable_is_a_folder(
    monkeypatch: pytest.MonkeyPatch, given: str, calls: int
) -> None:
    patched: list[bool] = []
    monkeypatch.setattr(hooks, "route_traces", lambda: patched.append(True))
    monkeypatch.setenv(VARIABLE, given)
    entry.keep_traces()
    assert len(patched) == calls


def test_without_a_folder_nothing_is_stored(traces: Traces, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr("specache_compile.cache_folder.HF_HOME", str(folder.parent))
    assert trace_folder.folder() is None
    assert cache_folder() == folder.parent / "specache-compile", "a converted checkpoint needs a folder"
    assert run(llama(), traces) == 1
    assert [file for file in folder.parent.rglob("*") if file.is_file()] == []
