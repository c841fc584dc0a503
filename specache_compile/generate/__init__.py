"""Generation with a compiled model: routing `generate` to it, drafting and verification."""
