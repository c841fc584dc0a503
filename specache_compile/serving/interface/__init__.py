"""OpenAI's API: requests as questions to the model, and its answers in OpenAI's format."""
