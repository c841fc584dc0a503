"""Host memory: pinning, growing, and limits."""
