"""SpeCache as a torch.compile backend: `torch.compile(model, backend="specache")`."""

from .errors import HeldTensorError, OptionError, SpecacheError, SpecacheWarning
from .options import Options

__all__ = ["HeldTensorError", "OptionError", "Options", "SpecacheError", "SpecacheWarning"]
