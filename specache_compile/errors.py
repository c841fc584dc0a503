"""The errors and warnings that a person can meet, each saying what was given and what to do."""

from __future__ import annotations

import sys
import warnings


class SpecacheError(RuntimeError):
    """The backend cannot do what was asked, and says what to do instead."""


class OptionError(SpecacheError, ValueError):
    """An option's name or value is not accepted; the message lists what is."""


def first_line(error: BaseException) -> str:
    """An error of somebody else's, as part of a sentence."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def split_heads(heads: int, ranks: int) -> SpecacheError:
    return SpecacheError(
        f"{heads} KV heads do not divide by {ranks} ranks: each rank has whole heads. Take a number of ranks "
        f"that divides {heads}, or a DistributedConfig whose tp_plan leaves the attention whole"
    )


def split_session() -> SpecacheError:
    return SpecacheError(
        "a cache that is split over ranks (tensor parallel) is neither saved, nor loaded, nor taken over: each rank "
        "has its own KV heads. Prefill again, or do it where the model is whole"
    )


class HeldTensorError(SpecacheError):
    """Something outside the compiled model tried to read, or to use a stale view of, a held cache tensor."""


class SpecacheWarning(UserWarning):
    """Something was left as Hugging Face wrote it; it is right, but not compressed."""


# The packages whose frames a warning passes over, to point at the line of the user's that led to it.
LIBRARIES = {"specache_compile", "torch", "transformers", "accelerate", "peft", "contextlib", "functools", "threading"}


def warn(message: str, category: type[Warning] = SpecacheWarning) -> None:
    """Warn at the innermost frame that belongs to no library of `LIBRARIES`."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


RECOMPILE_LIMIT = (
    "Dynamo's recompile limit was reached (raise torch._dynamo.config.recompile_limit, or recompile_limit= of "
    "torch.compile where it has it; TORCH_LOGS=recompiles shows the cause)"
)


def copy_failed(error: BaseException) -> SpecacheError:
    return SpecacheError(
        f"a copy between the host tier and the device failed ({error!r}); this cache can no longer be trusted. "
        "See to the cause (host memory, most often) and generate again with a new cache."
    )


def no_host_tier(what: str) -> SpecacheError:
    """`what` needs pairs in 16 bits that a cache without a host tier has not."""
    return SpecacheError(
        f"option host_tier=False: {what} needs pairs in host memory, and this cache keeps none there. A prompt is read "
        "in one call, and behind it one token at a time; host_tier=True, the default, keeps what the rest needs."
    )
