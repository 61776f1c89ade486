"""The loop of a coding agent: in each turn, the model calls a tool on a folder, and the conversation grows.

    python examples/coding_loop.py [--base-url http://127.0.0.1:8000/v1] [--turns 20] [--free] [--folder FOLDER] [TASK]

Answers are streamed. Each line of the output shows a call, and how much of the turn's prompt was in a prefix cache.
`prompt_cache_key` sends each turn to the workers that have the earlier turns in their caches. A small model would call
the same tool in every turn, so each turn names its tool. With --free, the model chooses. Without --folder, the files
are in a temporary folder.
"""

import argparse
import json
import os
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from openai import APIError, OpenAI

TEXT = {"type": "string", "maxLength": 80}
SYSTEM = "You are a careful programmer. You work on the files of one folder, one small step at a time."
TASK = "Write a program that prints the first ten primes, and a page that explains it."


def tool(name: str, description: str, *parameters: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": dict.fromkeys(parameters, TEXT),
        "required": list(parameters),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema, "strict": True},
    }


TOOLS: list[Any] = [
    tool("write_file", "Writes a file anew", "path", "content"),
    tool("list_files", "The names of all files"),
    tool("read_file", "What a file contains", "path"),
    tool("edit_file", "Replaces a text in a file by another one", "path", "old", "new"),
]


def carried_out(folder: Path, name: str, arguments: dict[str, str]) -> str:
    """Runs a tool, and returns its result for the model. Refuses every file outside the folder."""
    try:
        if name == "list_files":
            return (
                "\n".join(sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))) or "no files"
            )
        path = (folder / arguments["path"]).resolve()
        if not path.is_relative_to(folder) or path == folder:
            return f"error: {arguments['path']} is not in the folder"
        if name == "read_file":
            return path.read_text()
        if name == "edit_file":
            content = path.read_text()
            if arguments["old"] not in content:
                return "error: the file does not contain the old text"
            path.write_text(content.replace(arguments["old"], arguments["new"], 1))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(arguments["content"])
    except OSError as error:
        return f"error: {error.strerror}"
    except ValueError as error:  # the file is not text, or the path is invalid
        return f"error: {error}"
    return "done"


def turn(client: OpenAI, model: str, messages: list[Any], key: str, choice: Any) -> tuple[list[Any], str]:
    """Streams one turn. Returns its calls, and a text with its token counts."""
    calls: dict[int, Any] = {}
    usage = ""
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=200,
        prompt_cache_key=key,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for piece in [piece for choice in chunk.choices for piece in choice.delta.tool_calls or ()]:
            assert piece.function is not None
            call = calls.setdefault(piece.index, {"type": "function", "function": {"arguments": ""}})
            if piece.id:
                call["id"] = piece.id
                call["function"]["name"] = piece.function.name
            call["function"]["arguments"] += piece.function.arguments or ""
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details else 0
            usage = f"{chunk.usage.prompt_tokens} tokens in, {cached} cached"
    return list(calls.values()), usage


def work(client: OpenAI, folder: Path, task: str, num_turns: int, *, is_free: bool) -> None:
    model, key = client.models.list().data[0].id, uuid.uuid4().hex
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    for number in range(1, num_turns + 1):
        name = TOOLS[(number - 1) % len(TOOLS)]["function"]["name"]
        choice = "required" if is_free else {"type": "function", "function": {"name": name}}
        calls, usage = turn(client, model, messages, key, choice)
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        for call in calls:
            function = call["function"]
            try:
                result = carried_out(folder, function["name"], json.loads(function["arguments"]))
            except json.JSONDecodeError:  # cut off by max_tokens
                function["arguments"], result = "{}", "error: the arguments were too long"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            print(f"{number:3}  {usage}  {function['name']}  {result.splitlines()[0][:60] if result else ''}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--free", action="store_true", help="the model chooses each tool")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("task", nargs="?", default=TASK)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as temporary,
        OpenAI(base_url=arguments.base_url, api_key=os.environ.get("BATON_API_KEY", "none")) as client,
    ):
        folder = (arguments.folder or Path(temporary)).resolve()
        try:
            work(client, folder, arguments.task, arguments.turns, is_free=arguments.free)
        except APIError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
