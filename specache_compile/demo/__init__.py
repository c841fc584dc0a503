"""`specache demo`, the first thing to run: keys found, bytes and times of one real model, method by method."""
