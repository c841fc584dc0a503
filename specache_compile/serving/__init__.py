"""`specache serve`: a compiled checkpoint behind OpenAI's interface; only the command line imports it."""
