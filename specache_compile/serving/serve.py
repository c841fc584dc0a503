"""`specache serve`: a checkpoint behind OpenAI's API."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import logging
import math
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specache_compile.checkpoints.loaded import limit_of
from specache_compile.checkpoints.names import MODEL, print_origin
from specache_compile.errors import SpecacheError

if TYPE_CHECKING:
    from uvicorn import Server

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
GIB = 1 << 30
LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")


EPILOG = """\
examples:
  specache serve smollm2-135m
  specache serve smollm2-135m --rows 16 --session-folder build/sessions
"""


def add_serve(command: argparse.ArgumentParser) -> None:
    """The arguments of `specache serve`, except the device and the backend's options."""
    command.epilog = EPILOG
    command.add_argument("model", metavar="MODEL", help=MODEL)
    command.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default: local connections only (%(default)s)"
    )
    command.add_argument("--port", type=int, default=8000, help="0 selects a free port (default: %(default)s)")
    command.add_argument(
        "--queue", type=int, default=64, metavar="N", help="most waiting requests; others get status 503 (%(default)s)"
    )
    command.add_argument(
        "--api-key", metavar="KEY", help="key that requests must contain; also read from SPECACHE_API_KEY"
    )
    command.add_argument("--quiet", action="store_true", help="do not log requests")
    command.add_argument(
        "--rows", type=int, default=8, metavar="N", help="maximum number of sequences in a batch (default: %(default)s)"
    )
    group = command.add_argument_group("memory", "caches of running requests, and of sessions for their next turns")
    group.add_argument(
        "--sessions", type=int, default=16, metavar="N", help="most sessions in memory; the oldest goes (%(default)s)"
    )
    group.add_argument("--session-host-gib", type=float, metavar="GIB", help="limit of host memory (default: none)")
    group.add_argument("--session-device-gib", type=float, metavar="GIB", help="limit of device memory (default: none)")
    group.add_argument(
        "--session-folder", type=Path, metavar="DIR", help="folder for evicted sessions, until the server stops"
    )
    group.add_argument(
        "--session-disk-gib", type=float, default=64.0, metavar="GIB", help="limit of sessions there (%(default)s)"
    )


def run_serve(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Serve until interrupted."""
    with bound(args.host, args.port) as listener:
        server = make_server(args, options, listener)
        print(f"{args.model} at {url_of(listener)}/v1; Ctrl+C stops", file=sys.stderr)
        if not args.quiet:
            log_requests()
        server.run([listener])


def log_requests() -> None:
    """Print a line for each request on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger(__package__)
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def bound(host: str, port: int) -> socket.socket:
    """A listening socket. It is created before the model is loaded, so that a used port is reported at once."""
    if not 0 <= port < 1 << 16:  # getaddrinfo would use its lower bits
        raise SpecacheError(f"--port {port}: accepted are 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise SpecacheError(f"cannot listen at --host {host} --port {port} ({error.strerror}). Pass others") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def names_of(listener: socket.socket, host: str) -> list[str] | None:
    """This machine's names of a loopback address; None for any other address."""
    address = listener.getsockname()[0]
    return [*LOOPBACK, host, address] if ipaddress.ip_address(address).is_loopback else None


def make_server(args: argparse.Namespace, options: dict[str, Any], listener: socket.socket) -> Server:
    """The server for that socket, with its model loaded. SpecacheError where the extra `serve` is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SpecacheError(f"{', '.join(missing)}: not installed. Run pip install 'specache-compile[serve]'")
    for name in ("queue", "rows", "sessions"):
        if getattr(args, name) < 1:
            raise SpecacheError(f"--{name} {getattr(args, name)}: accepted is 1 or more")
    limits = {name: getattr(args, f"session_{name}_gib") for name in ("host", "device", "disk")}
    for name, given in limits.items():
        if given is not None and not 0 < given < math.inf:
            raise SpecacheError(f"--session-{name}-gib {given}: accepted is more than 0")
    key = key_of(args)
    import uvicorn

    from specache_compile.batching.batch import Batch, verifies_nothing
    from specache_compile.batching.spill import SpillFolder

    from .generation import Generation
    from .metrics import Metrics
    from .served_model import ServedModel
    from .server import STOPPING, StoppedInTime, application

    if options.get("verify") is not None:
        raise verifies_nothing()
    if args.session_folder is not None:
        SpillFolder(args.session_folder)  # a bad folder is reported before the model is loaded
    print_origin(args.model)
    served, metrics = ServedModel(args.model, args.device, options), Metrics()
    host, device, disk = (None if given is None else int(given * GIB) for given in limits.values())
    batch = Batch(
        served.model, rows=args.rows, host_memory=host, device_memory=device, sessions=args.sessions,
        spill_folder=args.session_folder, spill_bytes=disk,
    )  # fmt: skip
    generation = Generation(served, batch, metrics, limit_of(served.model), args.queue)
    app = application(served, generation, metrics, names_of(listener, args.host), key)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2 * STOPPING)
    return StoppedInTime(config, generation)


def key_of(args: argparse.Namespace) -> str | None:
    """The API key that requests must send; SpecacheError if a header cannot contain it."""
    key = args.api_key if args.api_key is not None else os.environ.get("SPECACHE_API_KEY")
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise SpecacheError("--api-key: accepted are printable ASCII characters, without spaces around them")
    return key
