"""What a process has compiled, kept for the next one, which then traces nothing."""
