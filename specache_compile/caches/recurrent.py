"""The recurrent state of a hybrid model's layer, which is copied and saved with keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Attributes of Hugging Face's layers, which are written in place: tensors by number, or None.
STATES = ("conv_states", "recurrent_states")
# Its flags and sizes for each state. A layer without states has none of these attributes.
MARKS = (
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


def states_of(layer: Any) -> dict[str, Tensor]:
    """A layer's recurrent states, named like `conv_states.0`."""
    named = {f"{name}.{number}": state for name in STATES for number, state in getattr(layer, name, {}).items()}
    return {name: state for name, state in named.items() if state is not None}


def own_states(layer: Any) -> None:
    """Copy the states of a layer that shares them with another one."""
    for name in (*STATES, *MARKS):
        if hasattr(layer, name):
            copied = {
                number: value.clone() if isinstance(value, Tensor) else value
                for number, value in getattr(layer, name).items()
            }
            setattr(layer, name, copied)


def marks_of(layer: Any) -> dict[str, dict[str, Any]]:
    """A layer's flags for each state, with keys as text for JSON."""
    return {
        name: {str(number): value for number, value in getattr(layer, name).items()}
        for name in MARKS
        if hasattr(layer, name)
    }


def restore(layer: Any, states: dict[str, Tensor], marks: dict[str, dict[str, Any]]) -> None:
    """Set the results of `states_of` and `marks_of` in a new layer."""
    for name, noted in marks.items():
        setattr(layer, name, {int(number): value for number, value in noted.items()})
    for name, state in states.items():
        kind, _, number = name.partition(".")
        getattr(layer, kind)[int(number)] = state
        if layer.device is None:
            layer.dtype, layer.device = state.dtype, state.device
