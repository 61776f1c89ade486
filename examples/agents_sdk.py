"""An agent of the OpenAI Agents SDK calls a function of this program (`pip install openai-agents`).

    python examples/agents_sdk.py [--base-url http://127.0.0.1:8000/v1] [--model smollm2]
        [--api responses|chat] [--stream] [QUESTION]

BATON_API_KEY contains the API key, if the gateway requires one.
"""

import argparse
import asyncio
import os
import sys
from typing import Literal

try:
    from agents import (
        Agent,
        Model,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI
except ImportError:
    sys.exit("agents_sdk: needs OpenAI's Agents SDK; run `pip install openai-agents`")

LENGTHS_M = {"river": 7.9, "bridge": 227.0, "tower": 330.0}


def length_of(thing: Literal["river", "bridge", "tower"]) -> str:
    """The length of a thing, in meters"""
    result = f"{LENGTHS_M[thing]} m"
    print(f"length_of({thing}) = {result}")
    return result


TOOL = function_tool(length_of)


async def ask(model: Model, question: str, is_stream: bool) -> None:
    # A small model may not call a tool by itself, so its first answer must be a call. Then the SDK lets it choose.
    settings = ModelSettings(
        tool_choice="required", parallel_tool_calls=False, temperature=0.0, max_tokens=256
    )
    agent = Agent(
        name="surveyor", instructions="Be brief.", model=model, tools=[TOOL], model_settings=settings
    )
    if not is_stream:
        print((await Runner.run(agent, question)).final_output)
        return
    result = Runner.run_streamed(agent, question)
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            print(event.data.delta, end="", flush=True)
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--api", choices=("responses", "chat"), default="responses")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("question", nargs="?", default="How long is the bridge?")
    arguments = parser.parse_args()
    # Otherwise the SDK sends traces of the agent's work to OpenAI.
    set_tracing_disabled(True)
    # A gateway without API keys accepts any key.
    client = AsyncOpenAI(base_url=arguments.base_url, api_key=os.environ.get("BATON_API_KEY", "none"))
    kind = OpenAIResponsesModel if arguments.api == "responses" else OpenAIChatCompletionsModel
    asyncio.run(ask(kind(arguments.model, client), arguments.question, arguments.stream))
    return 0


if __name__ == "__main__":
    sys.exit(main())
