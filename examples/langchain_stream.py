"""Streams an answer out of Baton through LangChain (`pip install langchain-openai`).

    python examples/langchain_stream.py [--base-url http://127.0.0.1:8000/v1] [--model smollm2] [QUESTION]

BATON_API_KEY contains the API key, if the gateway requires one.
"""

import argparse
import os
import sys

try:
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr
except ImportError:
    sys.exit("langchain_stream: needs LangChain; run `pip install langchain-openai`")


def stream(base_url: str, model: str, question: str) -> None:
    # A gateway without API keys accepts any key.
    key = SecretStr(os.environ.get("BATON_API_KEY", "none"))
    llm = ChatOpenAI(base_url=base_url, model=model, api_key=key)
    prompt = ChatPromptTemplate([("system", "Answer briefly."), ("user", "{question}")])
    for chunk in (prompt | llm).stream({"question": question}):
        print(chunk.text, end="", flush=True)
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    options = parser.parse_args()
    stream(options.base_url, options.model, options.question)
    return 0


if __name__ == "__main__":
    sys.exit(main())
