"""Harmony, the format of gpt-oss: an answer is messages on channels; a call is a message to a function.

    <|channel|>analysis<|message|>...<|end|>                                            reasoning
    <|start|>assistant<|channel|>commentary<|message|>...<|end|>                        text before calls
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>                          text

The prompt ends with `<|start|>assistant`. `<|call|>` and `<|return|>` end the turn.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baton.sampling import StructuredOutput
from gateway.conversation.answer_format import SPECIAL
from gateway.conversation.call_syntax import GuidedTool
from gateway.conversation.formats.harmony_parser import (
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
    HarmonyParser,
)
from gateway.conversation.json_call import one_of
from gateway.conversation.lark import Lark, Vocabulary, quoted
from gateway.conversation.messages import Conversation, Messages, ToolUse, one_call_per_turn
from gateway.conversation.template import ChatTemplate, TemplateStyle, described
from gateway.conversation.turn_grammar import (
    checked_grammar,
    guided_tools,
    response_format_expression,
    thought_up_to,
)

_OTHERS = tuple(token for token in TOKENS if token != END)
"""Under the grammar, a message contains none of these tokens before its END."""
_ANALYSIS_HEAD, _COMMENTARY_HEAD = (f"{CHANNEL}{channel}{MESSAGE}" for channel in (ANALYSIS, COMMENTARY))


class HarmonyFormat:
    """An AnswerFormat."""

    def __init__(self, template: ChatTemplate, vocabulary: Vocabulary) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._prefix = "" if None in map(vocabulary.id_of, TOKENS) else SPECIAL
        """The text before each of the format's tokens in an answer's text. Empty: the tokens are ordinary text."""

    @property
    def kept_special_tokens(self) -> dict[str, str]:
        return {token: self._prefix + token for token in TOKENS}

    def template_arguments(self, conversation: Conversation) -> dict[str, Any]:
        variables = self._template.variables(conversation)
        messages = _with_remarks_in_thoughts(conversation.messages)
        one_by_one = replace(conversation, messages=one_call_per_turn(messages))
        turns = self._template.turns(one_by_one, TemplateStyle())
        # The template always writes a tool's description, so a tool without one gets an empty text.
        tools = [described(replace(tool, description=tool.description or "")) for tool in conversation.tools]
        return {"conversation": turns, **({"tools": tools} if tools else {}), **variables}

    def grammar(
        self,
        conversation: Conversation,
        prompt_end: str,  # noqa: ARG002 - AnswerFormat's signature
        response_format: StructuredOutput | None,
    ) -> StructuredOutput | None:
        """The grammar of a turn: reasoning, and then calls or a final message.

        The tokens that end a turn, `<|call|>` and `<|return|>`, are end-of-sequence tokens to the engine, so no
        rule has them.
        """
        budget = conversation.reasoning.max_tokens
        if not conversation.tools and response_format is None and budget is None:
            return None
        lark = Lark(self._vocabulary)
        use = conversation.tool_choice.use if conversation.tools else ToolUse.NONE
        again = lark.rule("again", f"{lark.marker(START)} {quoted(ASSISTANT)}")
        content = thought_up_to(lark, END, budget, _OTHERS)
        thought = lark.rule("thought", f"{_head(lark, ANALYSIS)} {content}")
        before = f"( {thought} {again} ){'*' if budget is None else '?'}"
        if use is not ToolUse.REQUIRED and response_format is None:
            remark = lark.up_to("remark", END, _OTHERS)
            preamble = lark.rule("preamble", f"{_head(lark, COMMENTARY)} {remark}")
            more = "thought | " if budget is None else ""
            before += f" ( ( {more}{preamble} ) {again} )*"
        last = [] if use is ToolUse.NONE else [_calls(lark, conversation, again)]
        if use is not ToolUse.REQUIRED:
            text = (
                lark.text_without("TEXT", *TOKENS)
                if response_format is None
                else response_format_expression(lark, response_format)
            )
            last.append(f"{_head(lark, FINAL)} {text}")
        lark.rule("start", f"{before} {one_of(last)}")
        return checked_grammar(lark)

    def new_parser(
        self,
        conversation: Conversation,
        prompt_end: str,  # noqa: ARG002 - AnswerFormat's signature
        response_format: StructuredOutput | None = None,  # noqa: ARG002
    ) -> HarmonyParser:
        may_call = conversation.tool_choice.use is not ToolUse.NONE
        return HarmonyParser(conversation.tools if may_call else (), self._prefix)


def _with_remarks_in_thoughts(messages: Messages) -> Messages:
    """The messages. After the last answer, each text before a call is moved to the end of its turn's thoughts.

    As a turn of its own, such a text would be a final message, and the template drops all thoughts before a
    final message. At the end of the thoughts, the text is on the channel on which the model wrote it. A
    message without calls is an answer, unless another message of the assistant follows: then it is a text
    before the calls of that message.
    """
    following = [*(message.role for message in messages[1:]), ""]
    answers = [
        n
        for n, (message, role) in enumerate(zip(messages, following, strict=True), 1)
        if message.role == "assistant" and not message.tool_calls and role != "assistant"
    ]
    begin = max(answers, default=0)
    if not any(message.reasoning for message in messages[begin:]):
        return messages
    kept = [*messages[:begin]]
    parts: list[tuple[str, str]] = []
    """The head and the text of each message on a channel, up to the next call."""
    for message in messages[begin:]:
        if message.role != "assistant":
            kept.append(message)
            continue
        texts = ((_ANALYSIS_HEAD, message.reasoning), (_COMMENTARY_HEAD, message.content))
        parts += [(head, text) for head, text in texts if text]
        if message.tool_calls:
            kept.append(replace(message, content="", reasoning=_joined(parts)))
            parts = []
    return tuple(kept)


def _joined(parts: Sequence[tuple[str, str]]) -> str | None:
    """The parts as one thought. The template writes the head of the first part, and the end of the last one."""
    texts = [text if number == 0 else f"{head}{text}" for number, (head, text) in enumerate(parts)]
    return f"{END}{START}{ASSISTANT}".join(texts) or None


def _head(lark: Lark, channel: str) -> str:
    return f"{lark.marker(CHANNEL)} {quoted(channel)} {lark.marker(MESSAGE)}"


def _calls(lark: Lark, conversation: Conversation, again: str) -> str:
    lark.rule("kind", f'" " {lark.marker(CONSTRAIN)}? "json"')
    call = lark.rule("call", one_of([_call(lark, tool) for tool in guided_tools(conversation)]))
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
