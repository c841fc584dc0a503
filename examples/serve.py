"""Start the server, and send two turns of a conversation with OpenAI's client.

pip install openai && python examples/serve.py [MODEL]
"""

from __future__ import annotations

import subprocess
import sys

import openai
from openai.types.chat import ChatCompletionMessageParam

PORT = 8123


def main(name: str = "smollm2-135m") -> None:
    command = [sys.executable, "-m", "specache_compile.cli", "serve", name, "--port", str(PORT)]
    with subprocess.Popen(command) as server:
        try:
            # The client retries with pauses until the server listens.
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=100)
            messages: list[ChatCompletionMessageParam] = []
            for question in ("What is the capital of France?", "And of Italy?"):
                messages.append({"role": "user", "content": question})
                answer = client.chat.completions.create(model=name, messages=messages, max_tokens=20, temperature=0)
                text = answer.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                print(f"{question} {text}")
        finally:
            server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
