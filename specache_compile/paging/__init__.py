"""Tiers in pages of 256 tokens, which rows of many caches name and count: what is stored once may be several rows'."""
