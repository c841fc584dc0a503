"""`specache serve`: a checkpoint behind OpenAI's API."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specache_compile.checkpoints.loaded import limit_of
from specache_compile.checkpoints.names import MODEL
from specache_compile.command_line.arguments import gib, whole
from specache_compile.errors import SpecacheError

if TYPE_CHECKING:
    from .server import StoppedInTime

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")


EPILOG = """\
examples:
  specache serve smollm2-135m
  specache serve smollm2-135m --rows 16 --session-folder build/sessions
"""


def api_key(text: str) -> str:
    """A key that a header can contain, as argparse's type of an argument."""
    if not (text.isascii() and text.isprintable() and text.strip() == text != ""):
        raise argparse.ArgumentTypeError("accepted are printable ASCII characters, without spaces around them")
    return text


def add_serve(command: argparse.ArgumentParser) -> None:
    """The arguments of `specache serve`, except the device and the backend's options."""
    command.epilog = EPILOG
    command.add_argument("model", metavar="MODEL", help=MODEL)
    command.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default: local connections only (%(default)s)"
    )
    command.add_argument("--port", type=int, default=8000, help="0 selects a free port (default: %(default)s)")
    command.add_argument(
        "--queue", type=whole, default=64, metavar="N", help="most waiting requests; others get 503 (%(default)s)"
    )
    command.add_argument(
        "--api-key", metavar="KEY", type=api_key, default=os.environ.get("SPECACHE_API_KEY"),
        help="key that requests must contain; also read from SPECACHE_API_KEY",
    )  # fmt: skip
    command.add_argument("--quiet", action="store_true", help="do not log requests")
    command.add_argument(
        "--rows", type=whole, default=8, metavar="N", help="most sequences in a batch (default: %(default)s)"
    )
    group = command.add_argument_group("memory", "caches of running requests, and of sessions for their next turns")
    group.add_argument(
        "--sessions", type=whole, default=16, metavar="N", help="most sessions in memory, by last use (%(default)s)"
    )
    group.add_argument("--session-host-gib", type=gib, metavar="GIB", help="limit of host memory (default: none)")
    group.add_argument("--session-device-gib", type=gib, metavar="GIB", help="limit of device memory (default: none)")
    group.add_argument(
        "--session-folder", type=Path, metavar="DIR", help="folder for evicted sessions, until the server stops"
    )
    group.add_argument(
        "--session-disk-gib", type=gib, default=64.0, metavar="GIB", help="limit of sessions there (%(default)s)"
    )


def run_serve(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Serve until interrupted."""
    with bound(args.host, args.port) as listener:
        server = make_server(args, options, listener)
        print(f"{args.model}: compiling; Ctrl+C stops", file=sys.stderr)
        server.generation.warm_up()
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


def make_server(args: argparse.Namespace, options: dict[str, Any], listener: socket.socket) -> StoppedInTime:
    """The server for that socket, with its model loaded. SpecacheError where the extra `serve` is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SpecacheError(f"{', '.join(missing)}: not installed. Run pip install 'specache-compile[serve]'")
    import uvicorn

    from specache_compile.batching.batch import Batch, verifies_nothing
    from specache_compile.batching.prefixes import SpillFolder

    from .generation import Generation
    from .metrics import Metrics
    from .questions import ServedModel
    from .server import STOPPING, StoppedInTime, application

    if options.get("verify") is not None:
        raise verifies_nothing()
    if args.session_folder is not None:
        SpillFolder(args.session_folder)  # a bad folder is reported before the model is loaded
    served, metrics = ServedModel(args.model, args.device, options), Metrics()
    given = args.session_host_gib, args.session_device_gib, args.session_disk_gib
    host, device, disk = (None if gib is None else int(gib * (1 << 30)) for gib in given)
    batch = Batch(
        served.model, rows=args.rows, host_memory=host, device_memory=device, sessions=args.sessions,
        spill_folder=args.session_folder, spill_bytes=disk,
    )  # fmt: skip
    generation = Generation(served.tokenizer, batch, metrics, limit_of(served.model), args.queue)
    app = application(served, generation, metrics, names_of(listener, args.host), args.api_key)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2 * STOPPING)
    return StoppedInTime(config, generation)
