"""Tiers in pages of 256 tokens. Rows of several caches may share a page; each page counts its rows."""
