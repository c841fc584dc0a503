"""The folder of kept traces: nobody else's files are read, nothing is half written, and whatever is wrong with it is
nothing but slower."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specache_compile as sc
from conftest import LOSSLESS
from kept_traces import ALL, FULL, TESTS, Traces, in_new_process, llama, run
from specache_compile.cache_folder import VARIABLE, cache_folder
from specache_compile.warm import store

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda data: data[: len(data) // 2],
    "none": lambda data: b"",
    "other bytes": lambda data: data[::-1],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.quick_for("half")
def test_damaged_files_are_ignored_with_one_warning(kept: Traces, folder: Path, damage: str) -> None:
    for file in folder.glob("*/*/*/*"):
        file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with pytest.warns(sc.SpecacheWarning, match="is of no use"):
        assert run(llama(), kept) == 1
    assert run(llama(), kept) == 0


_ran: list[str] = []


class Poison:
    """What runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return _ran.append, ("unpickled",)


@pytest.mark.parametrize("what", ["*/*/*/*", "*/*/*", "*/*", "*", "."], ids=["file", "form", "call", "all", "root"])
@pytest.mark.quick_for("root")
def test_what_others_may_write_to_is_not_unpickled(kept: Traces, folder: Path, what: str) -> None:
    for file in folder.glob("*/*/*/*"):
        file.write_bytes(pickle.dumps(Poison()))
    for path in folder.glob(what) if what != "." else [folder]:
        path.chmod(path.stat().st_mode | 0o002)
    with pytest.warns(sc.SpecacheWarning, match="other users"):
        assert run(llama(), kept) == 1
    assert _ran == []


@pytest.mark.parametrize(
    ("owner", "mode", "ours"),
    [("me", 0o700, True), ("root", 0o755, True), ("me", 0o720, False), ("me", 0o702, False), ("another", 0o700, False)],
)
def test_only_this_users_and_roots_files_are_ours(owner: str, mode: int, ours: bool) -> None:
    owners = {"me": os.geteuid(), "root": 0, "another": os.geteuid() + 1}
    found = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owners[owner], 0, 1, 0, 0, 0))
    assert store.is_ours(found) is ours


def test_what_is_written_is_this_users_alone(kept: Traces, folder: Path) -> None:
    umask = os.umask(0)
    try:
        assert store.write(folder.parent / "new" / "folder" / "file", b"data")
    finally:
        os.umask(umask)
    for path in (folder, *folder.rglob("*"), *(folder.parent / "new").rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_a_form_of_other_options_is_not_taken_whoever_has_moved_it_there(kept: Traces, folder: Path) -> None:
    """Nothing in the form itself tells options apart."""
    before = set(folder.glob("*/*"))
    other = {**FULL, "disable_passes": ["causal_prefill"]}
    assert run(llama(), kept, options=other) == 1
    forms = [form for call in before for form in call.iterdir()]
    for call in set(folder.glob("*/*")) - before:
        shutil.rmtree(call)
        for form in forms:
            shutil.copytree(form, call / form.name)
    assert run(llama(), kept, options=other) == 1


# What a folder may do to a writer.


def no_space(*args: Any, **more: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(*args: Any, **more: Any) -> Any:
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize(
    ("name", "refuse", "told"),
    [("replace", no_space, "No space left"), ("mkdir", read_only, "Read-only file system")],
    ids=["full", "read-only"],
)
@pytest.mark.quick_for("read-only")
def test_a_folder_that_takes_no_file_is_nothing_but_slower(
    traces: Traces, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, refuse: Any, told: str
) -> None:
    monkeypatch.setattr(os, name, refuse)
    with pytest.warns(sc.SpecacheWarning, match=told) as warned:
        assert run(llama(), traces, ALL) == 3
    monkeypatch.undo()
    assert sum("kept for the next process" in str(warning.message) for warning in warned) == 1
    assert [file for file in folder.rglob("*") if file.is_file()] == []


def test_a_folder_that_is_read_only_is_read(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's, which its image has filled: not even the time of use is written."""
    assert run(llama(), traces, ALL) == 3
    for name in ("mkdir", "replace", "utime"):
        monkeypatch.setattr(os, name, read_only)
    assert run(llama(), traces) == 0


def test_what_a_killed_writer_left_is_no_form(traces: Traces, folder: Path) -> None:
    assert run(llama(), traces, ALL) == 3
    for call in folder.glob("*/*"):
        half = call / ("0" * 32)
        half.mkdir()
        (half / f"{store.PART}abc").write_bytes(b"half")
    assert run(llama(), traces) == 0
    assert len(list(store.entries(folder))) == 6, "it counts, and goes when it is the oldest"


ONE_PROCESS = """
import os, signal, sys
sys.path[:0] = {paths!r}
import pytest
from kept_traces import ALL, counted, llama, run
written, replace = 0, os.replace
def kill_late(*paths):
    global written
    written += 1
    if written == {killed}:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
os.replace = kill_late
with pytest.MonkeyPatch.context() as patch, counted(patch) as traces:
    print(run(llama(), traces, ALL, options={options!r}))
"""


def code(killed: int = 0) -> str:
    """A process that runs a model, and is killed while it writes its file of this number."""
    return ONE_PROCESS.format(paths=[str(TESTS)], killed=killed, options=LOSSLESS)


@pytest.mark.slow
def test_a_writer_is_killed_and_two_write_at_once(folder: Path) -> None:
    """Seven files: a prefill, a decode and its pre-decode, an extend, and the form of each graph."""
    killed = subprocess.run([sys.executable, "-c", code(killed=3)], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    both = [subprocess.Popen([sys.executable, "-c", code()], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    counts = [int(process.communicate()[0]) for process in both]
    assert all(2 <= count <= 3 for count in counts), "one form was whole"
    assert int(in_new_process(code())) == 0


# Bounds


def test_the_oldest_go_first(kept: Traces, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sorted(store.entries(folder), key=lambda entry: entry[2])
    assert len(found) == 3
    newest, size, _ = found[-1]
    store.trim(folder, most_bytes=size)
    assert [form for form, _, _ in store.entries(folder)] == [newest]
    mine = folder / "a" / "folder" / "of mine"
    mine.mkdir(parents=True)
    assert store.clear(folder) == size
    assert list(store.entries(folder)) == []
    assert mine.is_dir()


def test_who_keeps_a_form_trims_the_folder(kept: Traces, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max(size for _, size, _ in store.entries(folder))
    monkeypatch.setattr(store, "MOST_BYTES", 2 * largest)
    assert run(llama(num_key_value_heads=2), kept) == 1
    assert sum(size for _, size, _ in store.entries(folder)) <= 2 * largest


def test_a_call_has_so_many_forms_at_most(kept: Traces, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another constant is one more of the same call's."""
    monkeypatch.setattr(store, "MOST_FORMS", 1)
    assert run(llama(rms_norm_eps=1e-2), kept) == 1
    assert [len(list(call.iterdir())) for call in folder.glob("*/*")] == [1, 1, 1]
    assert run(llama(rms_norm_eps=1e-2), kept) == 0


# Where it is


def test_off_keeps_nothing(traces: Traces, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    assert store.folder() is None
    assert cache_folder() == folder.parent / "specache-compile", "a converted checkpoint has to be somewhere"
    assert run(llama(), traces) == 1
    assert not folder.exists()
