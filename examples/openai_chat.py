"""Chats with Baton through the openai package: one answer as a whole, then one as a stream.

    python examples/openai_chat.py [--base-url http://127.0.0.1:8000/v1] [QUESTION]

BATON_API_KEY contains the API key, if the gateway requires one.
"""

import argparse
import os
import sys

from openai import APIError, OpenAI


def chat(base_url: str, question: str) -> None:
    # A gateway without API keys accepts any key.
    with OpenAI(base_url=base_url, api_key=os.environ.get("BATON_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(
            model=model, max_tokens=32, messages=[{"role": "user", "content": question}]
        )
        print(whole.choices[0].message.content)

        stream = client.chat.completions.create(
            model=model,
            max_tokens=32,
            messages=[{"role": "user", "content": question}],
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None:
                print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    options = parser.parse_args()
    try:
        chat(options.base_url, options.question)
    except APIError as error:
        print(f"openai_chat: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
