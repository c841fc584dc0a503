"""Memory of the host tier: how much of it there is, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specache_compile.kernels import cgroup, host_memory

MANY = 1 << 62


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /sys/fs/cgroup, and in it one in place of /proc/self/cgroup."""
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def limit(folder: Path, files: cgroup.Files, most: int | str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files.limit).write_text(f"{most}\n")
    (folder / files.usage).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{files.cache} {cache}\n")


@pytest.mark.parametrize(
    ("files", "mount", "membership"),
    [
        (cgroup.VERSION_2, "", "0::/pod/box\n"),
        (cgroup.VERSION_2, "unified", "5:cpu:/\n0::/pod/box\n"),
        (cgroup.VERSION_1, "memory", "5:cpu:/\n4:memory,hugetlb:/pod/box\n0::/\n"),
    ],
    ids=["version 2", "both, 2 has memory", "version 1"],
)
def test_the_nearest_limit_of_all_groups_around_counts(
    system: Path, files: cgroup.Files, mount: str, membership: str
) -> None:
    (system / "membership").write_text(membership)
    limit(system / mount / "pod/box", files, 1000, 300, 50)
    assert cgroup.remaining_memory() == 750  # pages of files can be had back
    limit(system / mount / "pod", files, 2000, 1500, 0)
    assert cgroup.remaining_memory() == 500
    limit(system / mount / "pod", files, 2000, 2300, 0)
    assert cgroup.remaining_memory() == 0


def test_a_container_that_sees_its_own_group_as_the_root(system: Path) -> None:
    (system / "membership").write_text("4:memory:/docker/0123\n")
    limit(system / "memory", cgroup.VERSION_1, 900, 100, 0)
    assert cgroup.remaining_memory() == 800


def test_no_limit_is_none(system: Path) -> None:
    assert cgroup.remaining_memory() is None  # no Linux
    (system / "membership").write_text("0::/box\n")
    assert cgroup.remaining_memory() is None  # no memory controller
    limit(system / "box", cgroup.VERSION_2, "max", 100, 0)
    assert cgroup.remaining_memory() is None


def test_what_version_1_writes_for_no_limit_is_more_than_any_machine_has(system: Path) -> None:
    (system / "membership").write_text("4:memory:/\n")
    limit(system / "memory", cgroup.VERSION_1, 9223372036854771712, 100, 0)
    left = cgroup.remaining_memory()
    assert left is not None
    assert left > MANY


# Pinning, with a stand-in for CUDA


class Driver:
    """Notes what it is asked for, and which device is current then."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.current: object = "no device"

    def note(self, name: str) -> Callable[..., int]:
        return lambda *given: self.calls.append((name, self.current)) or 0

    @contextmanager
    def device(self, wanted: object) -> Iterator[None]:
        before, self.current = self.current, wanted
        yield
        self.current = before


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    runtime = SimpleNamespace(
        cudaHostRegister=driver.note("register"), cudaHostUnregister=driver.note("unregister")
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", driver.device)
    monkeypatch.setattr(torch.cuda, "synchronize", driver.note("synchronize"))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    return driver


def test_memory_is_registered_and_freed_with_its_device_current(driver: Driver) -> None:
    device = torch.device("cuda:1")
    tensor = host_memory.host_zeros((1000,), torch.float32, device)
    assert driver.calls == [("register", device)]
    del tensor
    assert driver.calls[1:] == [("synchronize", device), ("unregister", device)]
