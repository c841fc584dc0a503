"""`specache bench`: a decode step, the first tokens and the bytes, method beside method, on your model and machine."""
