"""JSON files that a person has, read with errors that name file, line and field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specache_compile.errors import SpecacheError

# A field's name, and its type or types.
Fields = Mapping[str, "type | tuple[type, ...]"]


def read_records(path: Path, fields: Fields) -> list[dict[str, Any]]:
    """The objects of a JSONL file, each with the named fields of the named types."""
    return [record for _, record in placed_records(path, fields)]


def placed_records(path: Path, fields: Fields) -> list[tuple[str, dict[str, Any]]]:
    """As `read_records`, each object with its place in the file. A file may also be one JSON array (.json)."""
    places = items_of(path) if path.suffix == ".json" else lines_of(path)
    records = [(place, checked(record, fields, place)) for place, record in places]
    if not records:
        raise SpecacheError(f"{path} holds no records")
    return records


def items_of(path: Path) -> Iterator[tuple[str, Any]]:
    items = parsed(path)
    if not isinstance(items, list):
        raise SpecacheError(f"{path}: a JSON array of records is wanted")
    yield from ((f"{path}, record {number}", item) for number, item in enumerate(items, 1))


def lines_of(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            yield place, json.loads(line)
        except json.JSONDecodeError as error:
            raise SpecacheError(f"{place}: no JSON ({error.msg} at column {error.colno})") from None


def checked(record: Any, fields: Fields, place: str) -> dict[str, Any]:
    """A record that has the named fields of the named types; `place` is where it stands."""
    for field, kind in fields.items():
        if not isinstance(record, dict) or not isinstance(record.get(field), kind):
            names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise SpecacheError(f"{place}: field {field!r} is missing or no {names}")
    return record  # type: ignore[no-any-return]


def check_known(place: str, record: Mapping[str, Any], field: str, known: Sequence[str]) -> None:
    """SpecacheError where the record's field is none of `known`; `place` is where the record stands."""
    if record[field] not in known:
        raise SpecacheError(f"{place}: field {field!r} is {record[field]!r}, and none of {', '.join(known)}")


def read_mapping(path: Path) -> dict[str, Any]:
    """A JSON object."""
    mapping = parsed(path)
    if not isinstance(mapping, dict):
        raise SpecacheError(f"{path}: a JSON object is wanted")
    return mapping


def parsed(path: Path) -> Any:
    """The contents of a JSON file."""
    try:
        return json.loads(text_of(path))
    except json.JSONDecodeError as error:
        raise SpecacheError(f"{path}: no JSON ({error.msg} at line {error.lineno})") from None


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise SpecacheError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start})") from None


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def data_folder(folder: Path | None, task: str) -> Path:
    """The folder given with --data; SpecacheError where there is none."""
    if folder is None:
        raise SpecacheError(f"task {task!r} reads files that you have: give their folder with --data")
    if not folder.is_dir():
        raise SpecacheError(f"no folder {folder}: --data wants the folder of the {task} files")
    return folder
