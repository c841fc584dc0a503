"""The figures of `/metrics`, in Prometheus's text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """The figures of one server, in its own registry. Times are in seconds."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.requests = Counter("specache_requests", "Answered requests, by HTTP status", ["status"], registry=own)
        self.left = Counter("specache_left", "Requests whose client left before the end", registry=own)
        self.prompt_tokens = Counter(
            "specache_prompt_tokens", "Tokens of prompts: reused from a session, or computed", ["how"], registry=own
        )
        self.generated_tokens = Counter("specache_generated_tokens", "Tokens generated", registry=own)
        self.first_token = Histogram(
            "specache_first_token_seconds", "From a request's arrival to its first token", buckets=SECONDS, registry=own
        )
        self.queue = Gauge("specache_queue", "Requests that wait for the model", registry=own)
        self.running = Gauge("specache_running", "Requests that the model works on", registry=own)
        self.sessions = Gauge("specache_sessions", "Kept prefixes and sessions", ["place"], registry=own)
        self.evicted = Gauge("specache_evicted", "Sessions evicted from memory", ["to"], registry=own)
