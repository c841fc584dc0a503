"""Write a text that SmolLM2 (November 2024) was not trained on: later release notes of three projects.

    python benchmarks/unseen_text.py build/unseen.txt                       for `specache eval --text build/unseen.txt`
    python benchmarks/unseen_text.py build/django.txt --projects django     one project

Django 5.2 to 6.1.3 (BSD), SQLAlchemy 2.1 (MIT) and NumPy 2.2 to 2.5.5 (BSD), from PyPI: 140,000 tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import NamedTuple

FILES = "https://files.pythonhosted.org/packages/"


class Source(NamedTuple):
    """A source distribution on PyPI, its hash, and a pattern of the selected files, whose groups give their order."""

    path: str
    sha256: str
    notes: str


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


def release_notes(sdist: bytes, wanted: str) -> str:
    """The notes in the order of their versions, from the distribution's archive."""
    with tarfile.open(fileobj=io.BytesIO(sdist)) as archive:
        notes = {
            (tuple(map(int, found[1].split("."))), member.name): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if (found := re.fullmatch(wanted, member.name))
        }
    return "\n".join(notes[place] for place in sorted(notes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--projects", nargs="+", choices=SOURCES, default=list(SOURCES), help="(all)")
    args = parser.parse_args()
    try:
        text = "\n".join(release_notes(fetched(SOURCES[name]), SOURCES[name].notes) for name in args.projects)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    except OSError as error:  # urllib's errors are of its kind
        sys.exit(f"unseen_text.py: {error}")


if __name__ == "__main__":
    main()
