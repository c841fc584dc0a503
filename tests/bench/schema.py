"""What `specache bench --json` writes, as pydantic checks it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Provenance(BaseModel):
    command: str
    date: str
    device: str
    threads: PositiveInt
    torch: str
    triton: str | None
    transformers: str


class Step(Strict):
    """Milliseconds, seconds and bytes; llama.cpp's rows have no floor, and no first tokens."""

    part: Literal["step"]
    method: str
    context: PositiveInt
    batch: PositiveInt
    step_ms: PositiveFloat
    step_ms_half: tuple[PositiveFloat, PositiveFloat]
    steps: PositiveInt
    device_bytes: NonNegativeInt
    host_bytes: NonNegativeInt
    floor_ms: PositiveFloat | None = None
    of_floor: PositiveFloat | None = None
    first_token_s: PositiveFloat | None = None
    second_token_s: PositiveFloat | None = None


class Answer(Strict):
    part: Literal["answer"]
    method: str
    cold_s: PositiveFloat
    warm_s: PositiveFloat


class Report(Strict):
    """bandwidth: bytes a second. libraries: versions."""

    provenance: Provenance
    settings: dict[str, Any]
    rows: list[Step | Answer]
    bandwidth: PositiveFloat
    libraries: dict[str, str] = {}
