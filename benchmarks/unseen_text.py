"""Write a text that SmolLM2 (November 2024) was not trained on: later release notes of some projects.

    python benchmarks/unseen_text.py build/unseen.txt                       for `specache eval --text build/unseen.txt`
    python benchmarks/unseen_text.py build/django.txt --projects django     one project

Django 5.2 to 6.1.3 (BSD), SQLAlchemy 2.1 (MIT) and NumPy 2.2 to 2.5.5 (BSD), from PyPI: 140,000 tokens. Changelogs of
2025 and 2026 of xarray (Apache), mypy (MIT), Scrapy (BSD), pytest (MIT) and Astropy (BSD): 150,000 more.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import sys
import tarfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FILES = "https://files.pythonhosted.org/packages/"


class Source(NamedTuple):
    """A source distribution on PyPI, its hash, and a pattern of the selected files, whose groups give their order.

    older: the heading of the first older entry in a changelog, where the text ends.
    """

    path: str
    sha256: str
    notes: str
    older: str = ""


SOURCES = {
    "django": Source(
        "55/79/49a609ea76ec51404b482932e33f1e6858946b920232c11b11a25bea3032/django-6.1.3.tar.gz",
        "b5d2d9e35295065d13b1927b3f19a59bd119f737aa6299def14ccca1ae3c8c0d",
        r".*/docs/releases/((?:5\.2|6\.[01])(?:\.\d+)?)\.txt",
    ),
    "sqlalchemy": Source(
        "3f/69/b87a540f6888ebc1f63a6e6138e8dc0827331a9be7c5eb15e3bd40a76281/sqlalchemy-2.1.9.tar.gz",
        "d700a8b2edfb26282a470333d6bc4a454c4acda4d201a3bea7b72fa76c217d28",
        r".*/doc/build/changelog/(?:changelog|migration)_(21)\.rst",
    ),
    "numpy": Source(
        "4e/3a/8770c288c47f0b5c2a786d3c20e79f66fd245f2d42cd232d7cd5e00e83e5/numpy-2.5.5.tar.gz",
        "5cddc243c75114ba845f01b1f87aca1572dbf7b6c2d88636ed3e1d2bccd7f1bf",
        r".*/doc/source/release/(2\.[2-5]\.\d+)-notes\.rst",
    ),
    "xarray": Source(
        "ff/f5/781c70b234f54e0401f4f7c4427a7486da38d50dbb138c7d7c55144b3d86/xarray-2026.9.0.tar.gz",
        "6abc69694c22fa1f0fb2f357ff4e41d88beb4477ed71091f944b7dbf67ed54fe",
        r".*/doc/whats-new\.rst()",
        ".. _whats-new.2024.11.0:",
    ),
    "mypy": Source(
        "4a/3c/78ecece71ee4b5445389a4ccd11627cfb9c69e4de554d11060171f376305/mypy-2.4.1.tar.gz",
        "63b590965691e540a335fa74dadf31a7069142f6b72e234689bbd244edf55623",
        r"[^/]*/CHANGELOG\.md()",
        "## Mypy 1.14",
    ),
    "scrapy": Source(
        "7a/bd/5a65f4d9319bf1533472a446915b941f393f6d2d547bf88cec23207beddf/scrapy-2.19.0.tar.gz",
        "34130726582b64c91531162ab277c4053e558876d49ba219cb43679e71d80a87",
        r".*/docs/news\.rst()",
        "Scrapy 2.12.0",
    ),
    "pytest": Source(
        "79/42/bb4641652e58dedeac2ec51abc1f8cae4fee4ec63899a0999016229a0f2a/pytest-9.2.0.tar.gz",
        "97c4f3b1f3c7414aa36465e09b8220f1d03627993bd51b1282e193753c80557b",
        r".*/doc/en/changelog\.rst()",
        "pytest 8.3.4",
    ),
    "astropy": Source(
        "95/57/02089e6da0fc00846d309034ad74e13ebcadc67b1c5cef397ae0597473fa/astropy-8.0.2.tar.gz",
        "e6af35823099ad6a40b57dbe5ff845f577374ea131925c9fa4b49eeab06c5310",
        r"[^/]*/CHANGES\.rst()",
        "Version 7.0.0",
    ),
}
# The texts of the quality tables, which measure windows of 16,384 tokens on both.
TEXTS = {
    "build/unseen.txt": ("django", "sqlalchemy", "numpy"),
    "build/unseen_more.txt": ("xarray", "mypy", "scrapy", "pytest", "astropy"),
}


def fetched(source: Source) -> bytes:
    """The distribution's archive."""
    print(f"fetching {source.path.rpartition('/')[2]} from PyPI", file=sys.stderr)
    with urllib.request.urlopen(FILES + source.path, timeout=120) as answer:
        data: bytes = answer.read()
    found = hashlib.sha256(data).hexdigest()
    if found != source.sha256:
        raise OSError(f"{source.path}: the hash is {found}, not {source.sha256}")
    return data


def release_notes(sdist: bytes, source: Source) -> str:
    """The notes of a source's archive in the order of their versions; of a changelog, the entries before `older`."""
    with tarfile.open(fileobj=io.BytesIO(sdist)) as archive:
        notes = {
            (tuple(map(int, re.findall(r"\d+", found[1]))), member.name): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if (found := re.fullmatch(source.notes, member.name))
        }
    text = "\n".join(notes[place] for place in sorted(notes))
    if not source.older:
        return text
    newer, heading, _ = text.partition(f"\n{source.older}")
    if not heading:
        raise OSError(f"a changelog has no heading {source.older!r}")
    return newer


def write_text(out: Path, projects: Sequence[str]) -> None:
    """Write these projects' notes to a file; exits with one line if the network or the file fails."""
    try:
        text = "\n".join(release_notes(fetched(SOURCES[name]), SOURCES[name]) for name in projects)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, "utf-8")
    except OSError as error:  # urllib's errors are of its kind
        sys.exit(f"unseen_text.py: {error}")


def main() -> None:
    usual = TEXTS["build/unseen.txt"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--projects", nargs="+", choices=SOURCES, default=usual, help=f"({' '.join(usual)})")
    args = parser.parse_args()
    write_text(args.out, args.projects)


if __name__ == "__main__":
    main()
