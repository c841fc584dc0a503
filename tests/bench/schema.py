"""What `specache bench --json` writes, as pydantic checks it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


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


class Line(Strict):
    """A line of a step's profile: milliseconds, in all and in each part of the step."""

    line: str
    calls: NonNegativeFloat
    ms: NonNegativeFloat
    ms_by_part: list[NonNegativeFloat]


class Found(Strict):
    """An answer of the key search."""

    depth: float
    key: str
    answer: str
    found: bool


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
    of_16_bits: PositiveFloat | None = None
    keys: list[Found] = []
    floor_ms: PositiveFloat | None = None
    of_floor: PositiveFloat | None = None
    first_token_s: PositiveFloat | None = None
    second_token_s: PositiveFloat | None = None
    extend: PositiveInt | None = None
    extend_ms: PositiveFloat | None = None
    profile: list[Line] = []


class Answer(Strict):
    part: Literal["answer"]
    method: str
    cold_s: PositiveFloat
    warm_s: PositiveFloat
    kept_s: PositiveFloat | None = None


class Report(Strict):
    """bandwidth: bytes a second. libraries: versions."""

    provenance: Provenance
    settings: dict[str, Any]
    rows: list[Step | Answer]
    bandwidth: PositiveFloat
    libraries: dict[str, str] = {}
