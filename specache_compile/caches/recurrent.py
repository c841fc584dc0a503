"""What a layer of a hybrid's cache has beside keys and values: a recurrence's state, copied and saved with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Attributes of Hugging Face's layers: tensors by their number, None where there is none. They are written in place.
STATES = ("conv_states", "recurrent_states")
# Its own numbers for each state. A layer without states has none of these attributes.
MARKS = (
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


def states_of(layer: Any) -> dict[str, Tensor]:
    """A layer's recurrent state, as `conv_states.0`."""
    named = {f"{name}.{number}": state for name in STATES for number, state in getattr(layer, name, {}).items()}
    return {name: state for name, state in named.items() if state is not None}


def own_states(layer: Any) -> None:
    """Give a layer that shares its state with another one of its own."""
    for name in (*STATES, *MARKS):
        if hasattr(layer, name):
            copied = {
                number: value.clone() if isinstance(value, Tensor) else value
                for number, value in getattr(layer, name).items()
            }
            setattr(layer, name, copied)


def marks_of(layer: Any) -> dict[str, dict[str, Any]]:
    """What a layer notes of each state, as JSON has it: numbers as text."""
    return {
        name: {str(number): value for number, value in getattr(layer, name).items()}
        for name in MARKS
        if hasattr(layer, name)
    }


def restore(layer: Any, states: dict[str, Tensor], marks: dict[str, dict[str, Any]]) -> None:
    """Give a new layer what `states_of` and `marks_of` told of another."""
    for name, noted in marks.items():
        setattr(layer, name, {int(number): value for number, value in noted.items()})
    for name, state in states.items():
        kind, _, number = name.partition(".")
        getattr(layer, kind)[int(number)] = state
        if layer.device is None:
            layer.dtype, layer.device = state.dtype, state.device
