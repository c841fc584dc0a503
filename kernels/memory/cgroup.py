"""The memory that a control group leaves: in a container, often far less than the machine has free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Files:
    """The names that a version of the memory controller has.

    limit: the file with the group's limit.
    usage: the file with the bytes that count against the limit.
    cache: in memory.stat, those of these bytes that are file pages, which the controller drops before it runs out.
    """

    limit: str
    usage: str
    cache: str


VERSION_1 = Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = Files("memory.max", "memory.current", "inactive_file")


def remaining_memory() -> int | None:
    """Bytes that this process's group, and each group around it, still lets it have; None: no limit is to be seen."""
    left = [bytes_left(folder, files) for folder, files in groups()]
    return min((size for size in left if size is not None), default=None)


def groups() -> Iterator[tuple[Path, Files]]:
    """The folders that limit this process: its own group and all above. In a container that sees its group as the root,
    those named outside of it are not there, and have no limit to tell."""
    for line in read(MEMBERSHIP).splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mounts, files = [ROOT / "memory"], VERSION_1
        elif number == "0":
            mounts, files = [ROOT, ROOT / "unified"], VERSION_2
        else:
            continue
        group = Path(path.lstrip("/"))
        for mount in mounts:
            yield from ((mount / above, files) for above in (group, *group.parents))


def bytes_left(folder: Path, files: Files) -> int | None:
    """Limit less usage of one group; None where it has none."""
    limit, usage = read(folder / files.limit).strip(), read(folder / files.usage).strip()
    if not limit.isdecimal() or not usage.isdecimal():  # no such folder, or "max"
        return None
    statistics = dict(line.split() for line in read(folder / "memory.stat").splitlines())
    return max(0, int(limit) - int(usage) + int(statistics.get(files.cache, 0)))


def read(file: Path) -> str:
    """What a file holds; nothing where it is not there, or not for us."""
    try:
        return file.read_text()
    except OSError:
        return ""
