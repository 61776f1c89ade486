"""The grammar of an assistant's turn: reasoning, then text or calls.

It depends on the tool choice:

    required, named   only calls
    auto              any text until a call begins; the grammar guides the call
    none              any text without a call

With a response format, any text must match it. With `auto`, the turn is then either such a text or calls.

If calls are required or a tool is strict, arguments match their schema. Otherwise they are any JSON object.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from baton.errors import InvalidRequest
from baton.sampling import MAX_GRAMMAR_CHARACTERS, GrammarKind, StructuredOutput
from gateway.conversation.call_syntax import CallSyntax, GuidedTool
from gateway.conversation.guided_schema import ANY_ARGUMENTS, check_parameters, guided_schema, spaced
from gateway.conversation.lark import Lark, Vocabulary, escaped_slashes, quoted, too_large
from gateway.conversation.lookalikes import may_be_json_call
from gateway.conversation.messages import Conversation, Tool, ToolUse
from gateway.conversation.parser import ReasoningTags


def turn_grammar(
    vocabulary: Vocabulary,
    syntax: CallSyntax,
    conversation: Conversation,
    tags: ReasoningTags | None,
    has_begun_to_reason: bool,
    response_format: StructuredOutput | None,
) -> StructuredOutput | None:
    """The turn's grammar; None: no grammar is needed. `tags`: the tags of reasoning; None: the turn has no
    reasoning."""
    budget = conversation.reasoning.max_tokens
    if not conversation.tools and (tags is None or (response_format is None and budget is None)):
        return response_format
    lark = Lark(vocabulary)
    thought = "" if tags is None else _thought(lark, tags, has_begun_to_reason, budget)
    # Text must not contain this tag: the grammar would accept it as text, but the parser would read
    # reasoning.
    shunned = () if tags is None or lark.is_token(tags.begin) else (tags.begin,)
    lark.rule("start", f"{thought} {_body(lark, syntax, conversation, shunned, response_format)}")
    return checked_grammar(lark)


def checked_grammar(lark: Lark) -> StructuredOutput:
    """The grammar that consists of these rules. Raises InvalidRequest if it is too large."""
    source = lark.source()
    if len(source) > MAX_GRAMMAR_CHARACTERS:
        raise too_large(str(len(source)))
    return StructuredOutput(GrammarKind.LARK, source)


def thought_up_to(lark: Lark, end: str, budget: int | None, shunned: Sequence[str] = ()) -> str:
    """Defines a rule: reasoning of at most `budget` tokens up to the marker `end`, without `shunned` markers. Raises
    InvalidRequest if the length of this model's reasoning cannot be limited."""
    if budget is None:
        return lark.up_to("thinking", end, shunned)
    if not lark.is_token(end):
        raise InvalidRequest(
            "reasoning",
            f"this model's end of reasoning, {end}, is not one token, so its length cannot be limited",
        )
    return lark.tokens_up_to("thinking", end, budget)


def guided_tools(conversation: Conversation) -> list[GuidedTool]:
    """The tools that the turn may call. Raises InvalidRequest if the schema of one of them is invalid."""
    is_required = conversation.tool_choice.use is ToolUse.REQUIRED
    return [_guided_tool(tool, is_required or tool.strict) for tool in conversation.callable_tools]


def _thought(lark: Lark, tags: ReasoningTags, has_begun: bool, budget: int | None) -> str:
    # MiniMax-M2 writes three newlines between its reasoning and a call
    rest = thought_up_to(lark, tags.end, budget) + r" ( /\n{1,3}/ )?"
    # GLM-4.5 writes a newline first
    return rest if has_begun else f"( {_after_newline(lark, tags.begin)} {rest} )?"


def _after_newline(lark: Lark, marker: str) -> str:
    """The expression for a marker, or a newline and the marker. A separate, optional newline would not work. In a place
    where text may also begin, the lexer would take the newline as text, and would not go back to the marker."""
    return f"( {lark.marker(marker)} | {lark.marked(chr(10) + marker, marker)} )"


def _body(
    lark: Lark,
    syntax: CallSyntax,
    conversation: Conversation,
    shunned: tuple[str, ...],
    response_format: StructuredOutput | None,
) -> str:
    use = conversation.tool_choice.use
    if not conversation.tools:
        return (
            lark.text_without("TEXT", *shunned)
            if response_format is None
            else response_format_expression(lark, response_format)
        )
    if use is ToolUse.NONE:
        return (
            _plain(lark, syntax, shunned)
            if response_format is None
            else response_format_expression(lark, response_format)
        )
    calls = _calls(lark, syntax, conversation, None if use is ToolUse.REQUIRED else response_format)
    if use is ToolUse.REQUIRED:
        return calls
    if response_format is not None:
        return f"( {calls} | {_no_call(lark, syntax, conversation, response_format)} )"
    text = _plain(lark, syntax, shunned)
    if syntax.bare_beginning is not None:
        return f"( {calls} | {text} )"
    opening = lark.up_to("opening", syntax.markers[0], shunned)
    if conversation.parallel_tool_calls and syntax.between_sections is not None:
        return f"( {opening} section )* {text}"
    return f"( {opening} section | {text} )"


def _calls(
    lark: Lark, syntax: CallSyntax, conversation: Conversation, response_format: StructuredOutput | None
) -> str:
    """The expression for all calls of the turn, without text. `response_format`: what the model may write instead of
    calls."""
    is_parallel, tools = conversation.parallel_tool_calls, guided_tools(conversation)
    if (
        syntax.bare_beginning is not None
        and response_format is not None
        and response_format.kind is GrammarKind.JSON_SCHEMA
    ):
        tools = [replace(tool, is_beside_json=True) for tool in tools]
    lark.rule("section", syntax.section(lark, tools, is_parallel))
    begin = "" if syntax.bare_beginning is not None else lark.marker(syntax.markers[0])
    first = _after_newline(lark, syntax.markers[0]) if begin and syntax.between_sections == "\n" else begin
    if is_parallel and syntax.between_sections is not None:
        return f"{first} section ( {quoted(syntax.between_sections)} {begin} section )*"
    return f"{first} section"


def _guided_tool(tool: Tool, must_match: bool) -> GuidedTool:
    """The tool, and the schema that the grammar enforces: with `must_match` the tool's own schema, otherwise any
    object."""
    if not must_match:
        check_parameters(tool)
    return GuidedTool(
        tool.name, guided_schema(tool) if must_match else ANY_ARGUMENTS, tool if must_match else None
    )


def _no_call(
    lark: Lark, syntax: CallSyntax, conversation: Conversation, response_format: StructuredOutput
) -> str:
    """The expression for an answer that matches the response format, and that no parser reads as a call. Raises
    InvalidRequest if a value of the format's schema may look like a call."""
    beginning = syntax.bare_beginning
    if beginning is None:
        return response_format_expression(lark, response_format)
    names = {tool.name for tool in conversation.tools}
    if (
        response_format.kind is GrammarKind.JSON_SCHEMA
        and re.match(beginning, '{"name": "')
        and may_be_json_call(response_format.source, names)
    ):
        raise InvalidRequest(
            "structured_output",
            "this model's calls are JSON objects without a mark of their own, and an answer of this schema may look "
            "like one. Put a required property other than name, type, id, arguments and parameters first, or set "
            "tool_choice to required or none",
        )
    return response_format_expression(lark, response_format, beside_calls=beginning)


def _not_beginning_like(beginning: str | None) -> str:
    """The condition that a terminal does not begin like `beginning`, as Lark text."""
    return "" if beginning is None else rf" & ~/\s*{beginning}(?s:.*)/"


def _plain(lark: Lark, syntax: CallSyntax, shunned: tuple[str, ...]) -> str:
    """The expression for text that no parser reads as a call."""
    return lark.text_without(
        "TEXT", *syntax.markers, *shunned, also=_not_beginning_like(syntax.bare_beginning)
    )


def response_format_expression(
    lark: Lark, response_format: StructuredOutput, beside_calls: str | None = None
) -> str:
    """The client's structured output, as a Lark expression. Raises InvalidRequest if it is a whole grammar.

    `beside_calls`: how calls begin, if the model may write calls without a marker instead of the answer; otherwise
    None. A regular expression then gets the condition that the answer does not begin like a call. JSON then gets the
    spacing of calls.
    """
    match response_format.kind:
        case GrammarKind.JSON_SCHEMA:
            return (
                f"%json {response_format.source if beside_calls is None else spaced(response_format.source)}"
            )
        case GrammarKind.REGEX:
            return lark.rule(
                "ANSWER", f"/{escaped_slashes(response_format.source)}/{_not_beginning_like(beside_calls)}"
            )
        case GrammarKind.LARK:
            raise InvalidRequest(
                "structured_output",
                "a Lark grammar cannot stand beside tools or reasoning; use a JSON schema or a regular expression",
            )
