"""ChatCompletionRequest: the body of POST /v1/chat/completions."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from baton.errors import InvalidRequest
from baton.sampling import MAX_LOGPROBS, SamplingParams
from gateway.conversation import Conversation
from gateway.conversation.template import MAX_OPTIONS, TemplateValue, check_template_options
from gateway.http.body import NotSupported, Only, Whole
from gateway.http.openai.fields import Effort, GenerationFields, reasoning_of
from gateway.http.openai.messages import Messages, chat_messages_of
from gateway.http.openai.tools import NamedTool, ToolChoiceField, Tools, tool_choice_of, tools_of
from gateway.preprocess import UNLIMITED

TemplateOptions = Annotated[dict[str, TemplateValue], Field(max_length=MAX_OPTIONS)]


class ChatCompletionRequest(GenerationFields):
    """OpenAI's fields work as OpenAI documents them, except as described here."""

    messages: Messages
    max_completion_tokens: Whole[int | None] = Field(
        None,
        ge=1,
        description="OpenAI's newer name for max_tokens. Default: all that the prompt leaves room for.",
    )
    logprobs: bool | None = None
    top_logprobs: Whole[int | None] = Field(None, ge=0, le=MAX_LOGPROBS, description="Needs logprobs: true.")
    safety_identifier: str | None = Field(None, max_length=1024, description="Accepted and ignored.")
    tools: Tools | None = Field(None, description="Functions that the model may call; the client runs them.")
    tool_choice: ToolChoiceField | None = Field(
        None, description="Whether the model may or must call tools, and which. Default: `auto`."
    )
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer. Default: true.")
    reasoning_effort: Effort | None = Field(
        None,
        description="How much the model thinks first; a level has no effect if the model's template has none.",
    )
    store: Annotated[None, Only(False)] = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None

    # Extensions to OpenAI's API; names and meanings are vLLM's.
    include_reasoning: bool | None = Field(
        None, description="false leaves the model's reasoning out of the answer. Default: true."
    )
    thinking_token_budget: Whole[int | None] = Field(
        None, ge=0, le=2**31 - 1, description="At most this many tokens of reasoning."
    )
    chat_template_kwargs: TemplateOptions | None = Field(
        None, description="Further variables of the model's chat template, such as `enable_thinking`."
    )

    audio: NotSupported = None
    function_call: NotSupported = None
    functions: NotSupported = None
    metadata: NotSupported = None
    moderation: NotSupported = None
    prediction: NotSupported = None
    prompt_cache_options: NotSupported = None
    prompt_cache_retention: NotSupported = None
    verbosity: NotSupported = None
    web_search_options: NotSupported = None

    # Only in vLLM's chats
    add_generation_prompt: Annotated[None, Only(True)] = None
    add_special_tokens: Annotated[None, Only(False)] = None
    chat_template: NotSupported = None
    continue_final_message: Annotated[None, Only(False)] = None
    documents: NotSupported = None
    echo: Annotated[None, Only(False)] = None
    return_prompt_text: Annotated[None, Only(False)] = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs: true")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) == 2:
            raise InvalidRequest(
                "max_tokens",
                f"{self.max_tokens} contradicts max_completion_tokens ({self.max_completion_tokens}); set "
                "only one",
            )
        return self

    @property
    def chat(self) -> Conversation:
        """The conversation to continue. Raises InvalidRequest for a field that contradicts others; the error names the
        field's path in the body."""
        tools = tools_of(self.tools)
        options = self.chat_template_kwargs or {}
        check_template_options("chat_template_kwargs", options)
        return Conversation(
            chat_messages_of(self.messages),
            tools,
            tool_choice_of(self.tool_choice, tools),
            self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool),
            reasoning_of(self.reasoning_effort, self.thinking_token_budget),
            options,
        )

    @property
    def client_names(self) -> dict[str, str]:
        names = super().client_names | dict.fromkeys(("prompt", "chat", "token_ids"), "messages")
        names |= {"logprobs": "top_logprobs", "template_options": "chat_template_kwargs"}
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        effort, budget = self.reasoning_effort, self.thinking_token_budget
        is_about_budget = effort is None or (effort != "none" and budget is not None)
        names["reasoning"] = "thinking_token_budget" if is_about_budget else "reasoning_effort"
        return names

    def sampling(self) -> SamplingParams:
        """The sampling parameters. Raises InvalidRequest for a field that contradicts another field."""
        max_tokens = self.max_completion_tokens or self.max_tokens or UNLIMITED
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(max_tokens, logprobs, self.prompt_logprobs)
