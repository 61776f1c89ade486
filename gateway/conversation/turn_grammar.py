"""The grammar of an assistant's turn: reasoning, then text or calls, as far as something is asked of them.

    required, named     calls and nothing else
    auto                any text until a call begins; the call is guided
    none                any text without a call
    a response format   the text matches it, or calls take its place

Arguments match their schema where calls are required and where a tool is strict; else they are any JSON object.
"""

from baton.errors import InvalidRequest
from baton.sampling import MAX_GRAMMAR_CHARACTERS, GrammarKind, StructuredOutput
from gateway.conversation.call_syntax import CallSyntax, GuidedTool
from gateway.conversation.guided_schema import ANY_ARGUMENTS, check_parameters, guided_schema
from gateway.conversation.lark import Lark, Vocabulary, escaped_slashes, quoted
from gateway.conversation.messages import Conversation, Tool, ToolUse
from gateway.conversation.parser import ReasoningTags


def turn_grammar(
    vocabulary: Vocabulary,
    syntax: CallSyntax,
    conversation: Conversation,
    tags: ReasoningTags | None,
    has_begun_to_reason: bool,
    answer: StructuredOutput | None,
) -> StructuredOutput | None:
    """`tags`: of the reasoning that this turn may have; None: it has none."""
    budget = conversation.reasoning.max_tokens
    if not conversation.tools and (tags is None or (answer is None and budget is None)):
        return answer
    lark = Lark(vocabulary)
    thought = "" if tags is None else _thought(lark, tags, has_begun_to_reason, budget)
    # Else a text that begins with the mark would be text to the grammar and reasoning to the parser.
    shunned = () if tags is None or lark.is_token(tags.begin) else (tags.begin,)
    lark.rule("start", f"{thought} {_body(lark, syntax, conversation, shunned, answer)}")
    source = lark.source()
    if len(source) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            "tools",
            f"the schemas of the tools that may be called make a grammar of {len(source)} characters, at most "
            f"{MAX_GRAMMAR_CHARACTERS} are allowed; offer fewer or smaller tools, or leave out strict",
        )
    return StructuredOutput(GrammarKind.LARK, source)


def _thought(lark: Lark, tags: ReasoningTags, has_begun: bool, budget: int | None) -> str:
    if budget is None:
        rest = lark.up_to("thought", tags.end)
    elif lark.is_token(tags.end):
        rest = lark.tokens_up_to("thought", tags.end, budget)
    else:
        raise InvalidRequest(
            "reasoning",
            f"this model's end of reasoning, {tags.end}, is not one token, so its length cannot be limited",
        )
    rest += r" ( /\n{1,2}/ )?"
    return rest if has_begun else f"( {lark.marker(tags.begin)} {rest} )?"


def _body(
    lark: Lark,
    syntax: CallSyntax,
    conversation: Conversation,
    shunned: tuple[str, ...],
    answer: StructuredOutput | None,
) -> str:
    use = conversation.tool_choice.use
    if not conversation.tools:
        return lark.text_without("TEXT", *shunned) if answer is None else _answer(lark, answer)
    if use is ToolUse.NONE:
        return _plain(lark, syntax, shunned) if answer is None else _answer(lark, answer)
    calls = _calls(lark, syntax, conversation)
    if use is ToolUse.REQUIRED:
        return calls
    if answer is not None:
        if syntax.bare_beginning is not None:
            raise InvalidRequest(
                "structured_output",
                "this model's calls have no mark of their own, so it cannot choose between calls and an answer in a "
                "given form; set tool_choice to required or none, or leave out tools",
            )
        return f"( {calls} | {_answer(lark, answer)} )"
    text = _plain(lark, syntax, shunned)
    if syntax.bare_beginning is not None:
        return f"( {calls} | {text} )"
    opening = lark.up_to("opening", syntax.markers[0], shunned)
    if conversation.parallel_tool_calls and syntax.repeats is not None:
        return f"( {opening} section )* {text}"
    return f"( {opening} section | {text} )"


def _calls(lark: Lark, syntax: CallSyntax, conversation: Conversation) -> str:
    """All calls of the turn, and no text."""
    is_parallel = conversation.parallel_tool_calls
    is_required = conversation.tool_choice.use is ToolUse.REQUIRED
    tools = [_guided(tool, is_required or tool.strict) for tool in conversation.callable_tools]
    lark.rule("section", syntax.section(lark, tools, is_parallel))
    begin = "" if syntax.bare_beginning is not None else lark.marker(syntax.markers[0])
    if is_parallel and syntax.repeats is not None:
        return f"{begin} section ( {quoted(syntax.repeats)} {begin} section )*"
    return f"{begin} section"


def _guided(tool: Tool, fits: bool) -> GuidedTool:
    if not fits:
        check_parameters(tool)
    return GuidedTool(tool.name, guided_schema(tool) if fits else ANY_ARGUMENTS, tool if fits else None)


def _plain(lark: Lark, syntax: CallSyntax, shunned: tuple[str, ...]) -> str:
    """Text that no parser takes for a call."""
    beginning = syntax.bare_beginning
    excluded = "" if beginning is None else rf" & ~/\s*{beginning}(?s:.*)/"
    return lark.text_without("TEXT", *syntax.markers, *shunned, also=excluded)


def _answer(lark: Lark, answer: StructuredOutput) -> str:
    match answer.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"%json {answer.source}"
        case GrammarKind.REGEX:
            return lark.rule("ANSWER", f"/{escaped_slashes(answer.source)}/")
        case GrammarKind.LARK:
            raise InvalidRequest(
                "structured_output",
                "a Lark grammar cannot stand beside tools or reasoning; use a JSON schema or a regular expression",
            )
