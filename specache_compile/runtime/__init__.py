"""The run time of rewritten graphs: sessions, their state tensors, and held tensors."""
