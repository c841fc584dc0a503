"""The bytes of a token, which may be a part of a character."""

from __future__ import annotations

import re
from typing import Any

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_table() -> dict[str, int]:
    """The byte of each character with which a byte-level tokenizer writes its tokens: GPT-2's table."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


TABLE = byte_table()


def bytes_of(tokenizer: Any, token: int, text: str) -> bytes:
    """The bytes of a token.

    Args:
        tokenizer: of the library tokenizers.
        token: its id.
        text: its text when decoded after the token before it.
    """
    written = tokenizer.id_to_token(token) or ""
    if byte := BYTE.fullmatch(written):
        return bytes([int(byte[1], 16)])
    if "ByteLevel" in repr(tokenizer.decoder) and all(letter in TABLE for letter in written):
        return bytes(TABLE[letter] for letter in written)
    return text.encode()
