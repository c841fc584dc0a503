"""Memory available under a control group's limit (version 2), often far below the free memory of the machine."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def remaining_memory() -> int | None:
    """Return the bytes that this process may still allocate under all its groups' limits; None without a limit."""
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else []
    own = next((Path(line.removeprefix("0::/")) for line in lines if line.startswith("0::/")), Path())
    left = [bytes_left(ROOT / group) for group in (own, *own.parents)]
    return min((size for size in left if size is not None), default=None)


def bytes_left(folder: Path) -> int | None:
    """Return the limit of one group minus its usage, of which file pages can be dropped; None without a limit."""
    try:
        limit, usage, stat = ((folder / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
    except OSError:  # no such group, or no memory controller
        return None
    if limit.strip() == "max":
        return None
    statistics = dict(line.split() for line in stat.splitlines())
    return max(0, int(limit) - int(usage) + int(statistics["inactive_file"]))
