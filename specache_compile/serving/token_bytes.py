"""The bytes of a token, which may be a part of a character."""

from __future__ import annotations

import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# The byte of each character with which a byte-level tokenizer writes its tokens.
TABLE = {letter: byte for byte, letter in bytes_to_unicode().items()}


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
