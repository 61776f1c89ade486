"""/tokenize and /detokenize: convert text to the model's tokens and back, with vLLM's field names."""

from dataclasses import dataclass
from typing import Annotated, Self

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from baton.errors import InvalidRequest
from gateway.auth.callers import Caller
from gateway.conversation import Conversation
from gateway.conversation.template import check_template_options
from gateway.http.body import Body, NotSupported, Only, TokenId
from gateway.http.description import ERRORS
from gateway.http.errors import in_terms_of
from gateway.http.json_route import JsonRoute
from gateway.http.openai.chat_request import TemplateOptions
from gateway.http.openai.messages import Messages, chat_messages_of
from gateway.http.openai.tools import Tools, tools_of
from gateway.model import ServedModel
from gateway.text import TokenizerPool

CLIENT_NAMES = {"chat": "messages", "template_options": "chat_template_kwargs"}

MODEL = Field(None, description="Optional; a name from GET /v1/models.")


class TokenizeRequest(Body):
    """A text, or a conversation."""

    model: str | None = MODEL
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = Field(None, description="Functions that the model is told of; only with messages.")
    chat_template_kwargs: TemplateOptions | None = Field(
        None, description="Further variables of the model's chat template; only with messages."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Special tokens that the model expects around a text. Default true for a "
        "prompt, false for messages.",
    )
    add_generation_prompt: bool | None = Field(
        None, description="Add the start of the assistant's turn. Default true; only with messages."
    )
    return_token_strs: bool | None = Field(
        None, description="Also return the tokens as written in the vocabulary; default false."
    )

    # vLLM's fields that Baton does not have
    chat_template: NotSupported = None
    continue_final_message: Annotated[None, Only(False)] = None
    media_io_kwargs: NotSupported = None
    mm_processor_kwargs: NotSupported = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "set either prompt or messages")
        for name in ("add_generation_prompt", "tools", "chat_template_kwargs"):
            if getattr(self, name) is not None and self.messages is None:
                raise InvalidRequest(name, "needs messages")
        return self

    @property
    def chat(self) -> Conversation:
        """The conversation. Raises InvalidRequest for a field that contradicts others; the error names its path in the
        body."""
        options = self.chat_template_kwargs or {}
        check_template_options("chat_template_kwargs", options)
        messages = chat_messages_of(self.messages or ())
        return Conversation(messages, tools_of(self.tools), template_options=options)


@dataclass(frozen=True, slots=True)
class TokenizeAnswer:
    """The tokens, and the model's limit."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Tokens of the model, to be turned into text."""

    model: str | None = MODEL
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text; default false."
    )


@dataclass(frozen=True, slots=True)
class DetokenizeAnswer:
    """The tokens' text. Bytes that form no character become U+FFFD."""

    prompt: str


def tokenize_routes(pool: TokenizerPool, model: ServedModel) -> APIRouter:
    """The routes of both calls. They need no worker."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/tokenize", summary="Tokenize a text or a conversation", responses=ERRORS)
    async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeAnswer:
        model.check_name(body.model)
        caller: Caller = request.state.caller
        adds = body.add_special_tokens
        if body.prompt is not None:
            token_ids = await pool.encode(caller.name, body.prompt, add_special_tokens=adds is not False)
        else:
            with in_terms_of(CLIENT_NAMES):
                token_ids = await pool.encode_chat(
                    caller.name,
                    body.chat,
                    add_generation_prompt=body.add_generation_prompt is not False,
                    add_special_tokens=adds is True,
                )
        return TokenizeAnswer(
            count=len(token_ids),
            max_model_len=model.max_model_len,
            tokens=list(token_ids),
            token_strs=await pool.pieces(caller.name, token_ids) if body.return_token_strs else None,
        )

    @routes.post("/detokenize", summary="Detokenize tokens", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeAnswer:
        model.check_name(body.model)
        model.check_token_ids("tokens", body.tokens)
        caller: Caller = request.state.caller
        text = await pool.decode(caller.name, body.tokens, bool(body.skip_special_tokens))
        return DetokenizeAnswer(prompt=text)

    return routes
