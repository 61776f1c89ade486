"""The grammar of harmony: thoughts, then calls or a final message; harmony.py shows the format.

The tokens that end a turn, `<|call|>` and `<|return|>`, are end-of-sequence tokens to the engine, so no rule
has them.
"""

from baton.errors import InvalidRequest
from baton.sampling import StructuredOutput
from gateway.conversation.call_syntax import GuidedTool
from gateway.conversation.formats.harmony_tokens import (
    ANALYSIS,
    ASSISTANT,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    RECIPIENT,
    START,
    TOKENS,
)
from gateway.conversation.json_call import one_of
from gateway.conversation.lark import Lark, Vocabulary, quoted
from gateway.conversation.messages import Conversation, ToolUse
from gateway.conversation.turn_grammar import answer_expression, checked_grammar, guided_tool

_OTHERS = tuple(token for token in TOKENS if token != END)


def harmony_grammar(
    vocabulary: Vocabulary, conversation: Conversation, answer: StructuredOutput | None
) -> StructuredOutput | None:
    """The grammar; None: the model may write anything. Raises InvalidRequest for a field that cannot be
    satisfied."""
    budget = conversation.reasoning.max_tokens
    if not conversation.tools and answer is None and budget is None:
        return None
    lark = Lark(vocabulary)
    use = conversation.tool_choice.use if conversation.tools else ToolUse.NONE
    again = lark.rule("again", f"{lark.marker(START)} {quoted(ASSISTANT)}")
    before = f"( {_thought(lark, budget)} {again} ){'*' if budget is None else '?'}"
    if use is not ToolUse.REQUIRED and answer is None:
        preamble = lark.rule("preamble", f"{_head(lark, COMMENTARY)} {lark.up_to('remark', END, _OTHERS)}")
        more = "thought | " if budget is None else ""
        before += f" ( ( {more}{preamble} ) {again} )*"
    last = [] if use is ToolUse.NONE else [_calls(lark, conversation, again)]
    if use is not ToolUse.REQUIRED:
        content = lark.text_without("TEXT", *TOKENS) if answer is None else answer_expression(lark, answer)
        last.append(f"{_head(lark, FINAL)} {content}")
    lark.rule("start", f"{before} {one_of(last)}")
    return checked_grammar(lark)


def _head(lark: Lark, channel: str) -> str:
    return f"{lark.marker(CHANNEL)} {quoted(channel)} {lark.marker(MESSAGE)}"


def _thought(lark: Lark, budget: int | None) -> str:
    if budget is None:
        content = lark.up_to("thinking", END, _OTHERS)
    elif lark.is_token(END):
        content = lark.tokens_up_to("thinking", END, budget)
    else:
        raise InvalidRequest(
            "reasoning",
            f"this model's end of reasoning, {END}, is not one token, so its length cannot be limited",
        )
    return lark.rule("thought", f"{_head(lark, ANALYSIS)} {content}")


def _calls(lark: Lark, conversation: Conversation, again: str) -> str:
    is_required = conversation.tool_choice.use is ToolUse.REQUIRED
    tools = [guided_tool(tool, is_required or tool.strict) for tool in conversation.callable_tools]
    lark.rule("kind", f'" " {lark.marker(CONSTRAIN)}? "json"')
    call = lark.rule("call", one_of([_call(lark, tool) for tool in tools]))
    if not conversation.parallel_tool_calls:
        return call
    return f"{call} ( {lark.marker(END)} {again} {call} )*"


def _call(lark: Lark, tool: GuidedTool) -> str:
    channel, recipient = lark.marker(CHANNEL), f" {RECIPIENT}{FUNCTIONS}{tool.name}"
    heads = (
        f"{channel} {quoted(COMMENTARY + recipient)}",
        f"{quoted(recipient)} {channel} {quoted(COMMENTARY)}",
    )
    return f"{one_of(heads)} kind? {lark.marker(MESSAGE)} %json {tool.schema}"
