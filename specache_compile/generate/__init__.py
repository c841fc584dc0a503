"""Generation with a compiled model: how `generate` reaches it, and drafts that are verified."""
