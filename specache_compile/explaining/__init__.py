"""What the backend will do to a model: graphs, bytes, times. Compiling imports none of this."""
