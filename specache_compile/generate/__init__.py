"""Generation with a compiled model: the way to it, and drafts that are verified."""
