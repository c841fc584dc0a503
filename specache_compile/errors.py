"""The errors and warnings of the package. Each text names the value that was given, and what to do."""

from __future__ import annotations

import sys
import warnings


class SpecacheError(RuntimeError):
    """The base class of this package's errors. The message states the cause and what to do.

    Example:
        import specache_compile as sc

        try:
            sc.load_model("./no-such-folder")
        except sc.SpecacheError as error:
            print(error)
    """


class OptionError(SpecacheError, ValueError):
    """An unknown option, or a value that the option does not accept; the message lists the accepted ones.

    Example:
        import specache_compile as sc

        try:
            sc.explain("examples/needle-llama", options={"bits": 3})
        except sc.OptionError as error:
            print(error)  # option bits=3: accepted are 1, 1.5, 2, 4, 8, 16
    """


class RequestError(SpecacheError):
    """A request that a batch can never run: its memory budget is too small, or the model's RoPE changes within it."""


def first_line(error: BaseException) -> str:
    """The first line of another package's error, as part of a sentence."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def split_session() -> SpecacheError:
    return SpecacheError(
        "save, load and hold do not support a cache that is split over ranks (tensor parallel). Prefill again, or use "
        "a model on one rank"
    )


class HeldTensorError(SpecacheError):
    """A read of a held cache tensor outside the compiled model, or a use of a stale one.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        inputs = tokenizer("Hello", return_tensors="pt").to(model.device)
        cache = sc.cache_of(model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True))
        try:
            print(cache.layers[0].keys.sum())
        except sc.HeldTensorError:
            print(sc.materialize(cache).layers[0].keys.sum())
    """


class SpecacheWarning(UserWarning):
    """A call that is not compressed, or an option without effect; the generated tokens are correct.

    A model warns once for each reason, at the line of the caller.

    Example:
        import warnings

        import specache_compile as sc

        warnings.simplefilter("error", sc.SpecacheWarning)  # stop instead of running uncompressed
    """


# A warning skips the frames of these packages, so that it points at the user's line.
LIBRARIES = {"specache_compile", "torch", "transformers", "accelerate", "peft", "contextlib", "functools", "threading"}


def warn(message: str, category: type[Warning] = SpecacheWarning) -> None:
    """Warn at the innermost frame that belongs to none of `LIBRARIES`."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


RECOMPILE_LIMIT = (
    "Dynamo's recompile limit was reached (raise torch._dynamo.config.recompile_limit, or pass recompile_limit= to "
    "torch.compile; TORCH_LOGS=recompiles prints the cause)"
)


def no_host_tier(what: str) -> SpecacheError:
    """The error for an operation that needs 16-bit pairs of a cache without a host tier."""
    return SpecacheError(
        f"option host_tier=False: {what} needs pairs in host memory, and this cache has none there. Prefill in one "
        "call and then decode one token at a time, or compile with host_tier=True, the default."
    )
