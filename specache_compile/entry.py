"""The entry point that `torch.compile(model, backend="specache")` loads."""

from .backend import specache as specache
from .generate import route_generate

route_generate()
