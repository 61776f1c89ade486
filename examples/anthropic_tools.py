"""The same tool loop as in openai_tools.py, streamed, through Anthropic's own package.

    python examples/anthropic_tools.py [--base-url http://127.0.0.1:8000] [--model smollm2] [QUESTION]

BATON_API_KEY contains the API key, if the gateway requires one.
"""

import argparse
import os
import sys
from typing import Any

from anthropic import Anthropic, APIError

LENGTHS_M = {"river": 7.9, "bridge": 227.0, "tower": 330.0}
TOOLS: list[Any] = [
    {
        "name": "length_of",
        "description": "The length of a thing, in meters",
        "strict": True,
        "input_schema": {
            "type": "object",
            "properties": {"thing": {"enum": list(LENGTHS_M)}},
            "required": ["thing"],
            "additionalProperties": False,
        },
    }
]


def ask(base_url: str, model: str, question: str) -> None:
    # A gateway without API keys accepts any key.
    with Anthropic(base_url=base_url, api_key=os.environ.get("BATON_API_KEY", "none")) as client:
        turns: list[Any] = [{"role": "user", "content": question}]
        # A small model may not call a tool by itself, so the first answer must be a call. The second must be text.
        for choice in ("any", "none"):
            settings: Any = {"type": choice}
            if choice == "any":
                settings["disable_parallel_tool_use"] = True
            with client.messages.stream(
                model=model, max_tokens=64, messages=turns, tools=TOOLS, tool_choice=settings
            ) as stream:
                for text in stream.text_stream:
                    print(text, end="", flush=True)
                answer = stream.get_final_message()
            turns.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": called(block.name, block.input)}
                for block in answer.content
                if block.type == "tool_use"
            ]
            if results:
                turns.append({"role": "user", "content": results})
        print()


def called(name: str, arguments: Any) -> str:
    result = f"{LENGTHS_M[arguments['thing']]} m"  # strict: arguments always fit the schema
    print(f"{name}({arguments}) = {result}")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("question", nargs="?", default="How long is the bridge?")
    arguments = parser.parse_args()
    try:
        ask(arguments.base_url, arguments.model, arguments.question)
    except APIError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
