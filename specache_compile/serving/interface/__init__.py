"""OpenAI's interface: what may be asked, as a question to the model; its answers, as they are sent."""
