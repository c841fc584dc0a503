"""One table, many processes: each row is measured once, and a lost process's rows by another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from conftest import NEEDLE_LLAMA
from specache_compile.evaluation import sharing
from specache_compile.evaluation.result_rows import ResultRow, append_row, read_rows
from specache_compile.evaluation.sharing import own_device, shared_rows

MODEL = str(NEEDLE_LLAMA)


def row(key: str) -> ResultRow:
    return ResultRow(key, "needle", "uncompiled", key, 100, 1.0, "keys found", 1, 0, 1.0, 0.1)


def test_what_another_is_measuring_is_left_to_it_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measured, reported = tmp_path / "rows.jsonl", [], []
    append_row(path, row("a"))
    other = FileLock(sharing.lock_of(path, sharing.name_of("b")))
    other.acquire()

    def the_other_finishes(seconds: float) -> None:
        assert measured == ["c"]
        append_row(path, row("b"))
        other.release()

    monkeypatch.setattr(time, "sleep", the_other_finishes)

    def measure(key: str) -> ResultRow:
        measured.append(key)
        return row(key)

    shared_rows(["a", "b", "c"], path, measure, reported.append)
    assert measured == ["c"]
    assert set(read_rows(path)) == {"a", "b", "c"}
    assert reported == [1, 2, 2, 3]


def test_a_rank_has_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_device("cuda") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [own_device(device) for device in ("cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:1", "cpu"]


WORKER = """
import sys, time
from pathlib import Path
from specache_compile.evaluation.result_rows import ResultRow
from specache_compile.evaluation.sharing import shared_rows

def measure(key):
    print(key, flush=True)
    time.sleep(float(sys.argv[2]))
    return ResultRow(key, "needle", "uncompiled", key, 100, 1.0, "keys found", 1, 0, 1.0, 0.1)

shared_rows([str(number) for number in range(6)], Path(sys.argv[1]), measure, lambda count: None)
"""


@pytest.mark.slow
def test_two_processes_share_the_rows_and_one_takes_over_from_a_lost_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-c", WORKER, str(path)]
    lost = subprocess.Popen([*start, "600"], stdout=subprocess.PIPE, text=True, env=environment)
    assert lost.stdout is not None
    taken = lost.stdout.readline().strip()  # it has begun
    others = [subprocess.Popen([*start, "0.3"], stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    while len(read_rows(path)) < 5:
        time.sleep(0.1)
    assert taken not in read_rows(path)
    lost.send_signal(signal.SIGKILL)
    measured = [key for other in others for key in other.communicate(timeout=60)[0].split()]
    assert sorted(measured) == [str(number) for number in range(6)], "each once, the lost one's too"
    assert len(path.read_text().splitlines()) == 6
