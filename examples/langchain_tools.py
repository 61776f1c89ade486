"""The model calls a function of this program, through LangChain (`pip install langchain-openai`).

    python examples/langchain_tools.py [--base-url http://127.0.0.1:8000/v1] [--model smollm2] [QUESTION]

BATON_API_KEY contains the API key, if the gateway requires one.
"""

import argparse
import os
import sys
from typing import Any, Literal

try:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr
except ImportError:
    sys.exit("langchain_tools: needs LangChain; run `pip install langchain-openai`")

LENGTHS_M = {"river": 7.9, "bridge": 227.0, "tower": 330.0}


def length_of(thing: Literal["river", "bridge", "tower"]) -> str:
    """The length of a thing, in meters"""
    return f"{LENGTHS_M[thing]} m"


TOOL = StructuredTool.from_function(length_of)


def ask(base_url: str, model: str, question: str) -> None:
    # A gateway without API keys accepts any key.
    key = SecretStr(os.environ.get("BATON_API_KEY", "none"))
    chat = ChatOpenAI(base_url=base_url, model=model, api_key=key, max_completion_tokens=64)
    messages: list[Any] = [HumanMessage(question)]
    # A small model may not call a tool by itself, so the first answer must be a call. The second must be text.
    for choice in ("required", "none"):
        answer = chat.bind_tools([TOOL], tool_choice=choice, parallel_tool_calls=False).invoke(messages)
        messages.append(answer)
        for call in answer.tool_calls:
            result = TOOL.invoke(call)
            print(f"{call['name']}({call['args']}) = {result.content}")
            messages.append(result)
    print(answer.content)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("question", nargs="?", default="How long is the bridge?")
    arguments = parser.parse_args()
    ask(arguments.base_url, arguments.model, arguments.question)
    return 0


if __name__ == "__main__":
    sys.exit(main())
