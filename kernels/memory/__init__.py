"""Host memory: pinned, grown, and how much of it there may be."""
