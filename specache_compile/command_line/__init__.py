"""The parts of the `specache` command that no other folder has: its arguments, and `generate`."""
