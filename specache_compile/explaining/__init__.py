"""What the backend does to a model, told before it runs: graphs, bytes, times. Compiling imports nothing of it."""
