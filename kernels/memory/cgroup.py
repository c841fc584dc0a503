"""Memory available under a control group's limit: in a container often far below the machine's free memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Files:
    """File names of one version of the memory controller.

    limit: the file with the group's limit.
    usage: the file with the bytes that count against the limit.
    cache: key in memory.stat for file pages among these bytes, which the controller can drop.
    """

    limit: str
    usage: str
    cache: str


VERSION_1 = Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = Files("memory.max", "memory.current", "inactive_file")


def remaining_memory() -> int | None:
    """Return the bytes that this process may still allocate under all its groups' limits; None without a limit."""
    left = [bytes_left(folder, files) for folder, files in groups()]
    return min((size for size in left if size is not None), default=None)


def groups() -> Iterator[tuple[Path, Files]]:
    """Yield the folders of this process's group and of all groups above it.

    If a container sees its group as the root, some of these folders do not exist, and set no limit.
    """
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
    """Return the limit of one group minus its usage; None without a limit."""
    limit, usage = read(folder / files.limit).strip(), read(folder / files.usage).strip()
    if not limit.isdecimal() or not usage.isdecimal():  # no such folder, or "max"
        return None
    statistics = dict(line.split() for line in read(folder / "memory.stat").splitlines())
    return max(0, int(limit) - int(usage) + int(statistics.get(files.cache, 0)))


def read(file: Path) -> str:
    """Return a file's content; "" if it does not exist or is not readable."""
    try:
        return file.read_text()
    except OSError:
        return ""
