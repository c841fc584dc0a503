"""JSONL files that a person has, read with errors that name file, line and field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specache_compile.errors import SpecacheError


def read_records(path: Path, fields: Mapping[str, type]) -> list[dict[str, Any]]:
    """The objects of a JSONL file, each with the named fields of the named types."""
    records = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise SpecacheError(f"{path}, line {number}: no JSON ({error.msg} at column {error.colno})") from None
        for field, kind in fields.items():
            if not isinstance(record, dict) or not isinstance(record.get(field), kind):
                raise SpecacheError(f"{path}, line {number}: field {field!r} is missing or no {kind.__name__}")
        records.append(record)
    if not records:
        raise SpecacheError(f"{path} holds no records")
    return records


def read_mapping(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        mapping = json.loads(text_of(path))
    except json.JSONDecodeError as error:
        raise SpecacheError(f"{path}: no JSON ({error.msg} at line {error.lineno})") from None
    if not isinstance(mapping, dict):
        raise SpecacheError(f"{path}: a JSON object is wanted")
    return mapping


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise SpecacheError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start})") from None


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def data_folder(folder: Path | None, task: str) -> Path:
    """The folder given with --data; an error in words where there is none."""
    if folder is None:
        raise SpecacheError(f"task {task!r} reads files that you have: give their folder with --data")
    if not folder.is_dir():
        raise SpecacheError(f"no folder {folder}: --data wants the folder of the {task} files")
    return folder
