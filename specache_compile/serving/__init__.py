"""`specache serve`: a compiled checkpoint behind OpenAI's API; only the command line imports it."""
