"""The model calls a function of this program, through the openai package, and answers with what it returned.

    python examples/openai_tools.py [--base-url http://127.0.0.1:8000/v1] [QUESTION]

BATON_API_KEY contains the API key, if the gateway requires one.
"""

import argparse
import json
import os
import sys
from typing import Any

from openai import APIError, OpenAI

LENGTHS_M = {"river": 7.9, "bridge": 227.0, "tower": 330.0}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "length_of",
            "description": "The length of a thing, in meters",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"thing": {"enum": list(LENGTHS_M)}},
                "required": ["thing"],
                "additionalProperties": False,
            },
        },
    }
]


def ask(base_url: str, question: str) -> None:
    # A gateway without API keys accepts any key.
    with OpenAI(base_url=base_url, api_key=os.environ.get("BATON_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        messages: list[Any] = [{"role": "user", "content": question}]
        # A small model may not call a tool by itself, so the first answer must be a call. The second must be text.
        for choice in ("required", "none"):
            answer = client.chat.completions.create(
                model=model,
                messages=messages,
                tools=TOOLS,
                tool_choice=choice,
                parallel_tool_calls=False,
                max_tokens=64,
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                assert call.type == "function"
                arguments = json.loads(call.function.arguments)  # strict: they always fit the schema
                result = f"{LENGTHS_M[arguments['thing']]} m"
                print(f"{call.function.name}({call.function.arguments}) = {result}")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print(message.content)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("question", nargs="?", default="How long is the bridge?")
    arguments = parser.parse_args()
    try:
        ask(arguments.base_url, arguments.question)
    except APIError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
