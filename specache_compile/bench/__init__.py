"""`specache bench`: decode steps, first tokens and bytes of each method, on your model and machine."""
