"""Random requests that are certainly wrong: JSON, HTTP and protobuf, with every fault that we thought of."""

import json
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from baton.v1 import generation_service_pb2 as pb
from baton.v1 import sampling_pb2

PROMPT = {"prompt": "The cache is the baton."}
CHAT = {"messages": [{"role": "user", "content": "What is the baton?"}]}
TOOLS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "include_reasoning": True,
}
SAMPLING: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 7,
    "stop": ["zzz"],
    "logit_bias": {"5": -1.0},
    "presence_penalty": 0.1,
    "routing_mode": "local",
}
GOOD_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": PROMPT | SAMPLING,
    "/v1/chat/completions": CHAT | SAMPLING | TOOLS,
    "/v1/messages": CHAT
    | {
        "model": "tiny",
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 5,
        "seed": 7,
        "stop_sequences": ["zzz"],
    },
    "/v1/messages/count_tokens": CHAT | {"model": "tiny"},
    "/cluster/try": PROMPT | {"max_tokens": 3, "temperature": 0.5, "mode": "local"},
    "/tokenize": PROMPT,
    "/detokenize": {"tokens": [5, 6, 7]},
}
NEEDED = {"prompt", "messages", "tokens", "model"}
"""Fields that are required in every body that may have them."""

WRONG_EVERYWHERE = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e400", "1" * 30, "-" + "9" * 25, "9" * 5000, "0x10", "01", "+1", "1.",
    "nul", "True", "'x'", '"\\ud800"', '"\\udc00\\ud800"', '"\\x41"', '"\n"', '"\\u12"', "-1e308", "-1099511627776",
    "[" * 100 + "]" * 100, '{"a":' * 80 + "1" + "}" * 80, "[" * 100_000, '{"":[{"":[]}]}', "[[[]]]", "[{}]",
    '{"a":1,"a":1}', "[null]", "[1.5]", '[{"role":"user"}]', '{"5":"x"}', "",
]  # fmt: skip
"""Values, JSON or nearly JSON, that are wrong in every field, with the exceptions below."""
WRONG_INSTEAD = {("tokens", "[null]"): "null", ("seed", "-1099511627776"): "1.5"}

BAD_HEADS = [
    b"GET /health\r\n\r\n",
    b"GET  /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /%ff%fe%00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET http:// HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"BREW /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"DELETE /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1e3\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nna me: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nname: \x00\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n folded\r\n\tmore: x\r\nx\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 9000 + b"\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"\x00" * 200 + b"\r\n\r\n",
]


def http_request(rng: random.Random) -> bytes:
    """The bytes of a random request that must be answered with a 4xx."""
    return rng.choice([_wrong_value, _wrong_value, _wrong_fields, _broken_json, _wrong_kind, _bad_head])(rng)


def grpc_call(rng: random.Random) -> tuple[str, bytes]:
    """The full name of a method and a random request, which must end with a status other than OK."""
    draw = rng.choice([_wrong_message, _wrong_message, _broken_message, _unknown_method])
    return draw(rng)


def good_http_request() -> bytes:
    """A request that must be answered with 200."""
    return _post("/v1/completions", json.dumps(GOOD_BODIES["/v1/completions"]).encode())


def good_grpc_message() -> pb.GenerateRequest:
    """A request that must be answered."""
    params = sampling_pb2.SamplingParams(max_tokens=3, temperature=0.5, stop=["zzz"], logit_bias={5: -1.0})
    return pb.GenerateRequest(
        text="The cache is the baton.", sampling_params=params, routing_mode=pb.ROUTING_MODE_LOCAL
    )


def _post(path: str, body: bytes, content_type: bytes = b"application/json") -> bytes:
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (path.encode(), content_type, len(body)) + body


def _wrong_value(rng: random.Random) -> bytes:
    path, body = rng.choice(list(GOOD_BODIES.items()))
    field, wrong = rng.choice(list(body)), rng.choice(WRONG_EVERYWHERE)
    wrong = WRONG_INSTEAD.get((field, wrong), wrong)
    fields = [f"{json.dumps(name)}: {wrong if name == field else json.dumps(body[name])}" for name in body]
    return _post(path, ("{" + ", ".join(fields) + "}").encode("utf-8", "surrogatepass"))


def _wrong_fields(rng: random.Random) -> bytes:
    path, body = rng.choice(list(GOOD_BODIES.items()))
    body = dict(body)
    if rng.random() < 0.3:
        del body[rng.choice([name for name in body if name in NEEDED])]
    else:
        name = "".join(rng.choices("abcxyz_é\u2028\u0000'\"<", k=rng.randint(1, 12)))
        body["x" + name] = rng.choice([None, 1, "x", [], {}])
    return _post(path, json.dumps(body, ensure_ascii=rng.random() < 0.5).encode())


def _broken_json(rng: random.Random) -> bytes:
    path, fields = rng.choice(list(GOOD_BODIES.items()))
    body = json.dumps(fields).encode()
    at = rng.randrange(1, len(body))
    broken = rng.choice(
        [
            body[:at],
            body[:at] + rng.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5"]) + body[at:],
            b"\xef\xbb\xbf" + body,
            body + body,
            body.decode().encode("utf-16"),
            b"[" + body + b"]",
            rng.randbytes(rng.randint(1, 200)),
            b"\x1f\x8b\x08" + rng.randbytes(50),
        ]
    )
    return _post(path, broken)


def _wrong_kind(rng: random.Random) -> bytes:
    path, body = rng.choice(list(GOOD_BODIES.items()))
    kinds = [
        b"text/plain",
        b"application/x-www-form-urlencoded",
        b"multipart/form-data",
        b"\xff\xfe",
        b"json",
        b"",
    ]
    kinds += [b"application/jsonp", b"application/json5", b"text/json", b"application/grpc", b"*/*", b";;;"]
    return _post(path, json.dumps(body).encode(), rng.choice(kinds))


def _bad_head(rng: random.Random) -> bytes:
    return rng.choice(BAD_HEADS)


def _wrong_message(rng: random.Random) -> tuple[str, bytes]:
    """A message that can be read, but contains an impossible request."""
    message = good_grpc_message()
    rng.choice(WRONGS)(message, rng)
    return "baton.v1.GenerationService/Generate", message.SerializeToString()


def _float_of(rng: random.Random) -> float:
    return rng.choice([float("nan"), float("inf"), float("-inf"), -1e30, 1e30, -3.0])


def _set_float(message: pb.GenerateRequest, rng: random.Random) -> None:
    names = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
    setattr(message.sampling_params, rng.choice(names), _float_of(rng))


def _set_ids(message: pb.GenerateRequest, rng: random.Random) -> None:
    message.token_ids.ids.extend(rng.choice([[2**32 - 1], [1] * 1000, [5, 10**6]]))


def _set_text(message: pb.GenerateRequest, rng: random.Random) -> None:
    message.text = rng.choice(["", "x" * 5000, "x " * 400])


def _set_chat(message: pb.GenerateRequest, rng: random.Random) -> None:
    message.chat.Clear()
    if rng.random() < 0.5:
        message.chat.messages.add(role="user", content="x" * 5000)
    message.chat.SetInParent()


def _set_other(message: pb.GenerateRequest, rng: random.Random) -> None:
    params = message.sampling_params
    match rng.randrange(10):
        case 0:
            params.max_tokens = 0
        case 1:
            params.min_tokens = 2**32 - 1
        case 2:
            params.logit_bias[rng.choice([10**6, 2**32 - 1])] = 1.0
        case 3:
            params.logit_bias[5] = _float_of(rng) * 1000
        case 4:
            params.stop.extend(rng.choice([[""], ["x"] * 100, ["x" * 2000]]))
        case 5:
            params.logprobs = rng.choice([21, 2**31 - 1])
        case 6:
            params.stop_token_ids.extend([2**32 - 1])
        case 7:
            params.prompt_logprobs = rng.choice([21, 2**32 - 1])
        case 8:
            message.max_model_len = rng.choice([0, 2**32 - 1])
        case _:
            params.json_schema = rng.choice(["", "x" * 200_000])


WRONGS: list[Callable[[pb.GenerateRequest, random.Random], None]] = [
    _set_float,
    _set_ids,
    _set_text,
    _set_chat,
    _set_other,
]


def _broken_message(rng: random.Random) -> tuple[str, bytes]:
    """A message that cannot be read, or that has no prompt."""
    whole = good_grpc_message().SerializeToString()
    at = rng.randrange(1, len(whole) - 1)
    text = whole.index(b"The cache")
    broken = rng.choice(
        [
            b"\xff" * rng.randint(1, 50),
            b"\x0a\xff\xff\xff\xff\x0f" + whole,  # a string of 4 GiB
            b"\x12\x04\xff\xfe\xfd\xfc",  # a text that is not UTF-8
            whole[:text] + b"\xff" + whole[text + 1 :],
            b"\x22" * 5000,
            b"\x0b" * 1000,  # nested groups without an end
            b"\x08" + b"\xff" * 11,  # a number of more than 64 bits
            whole[: text + at % 10],
            b"",
        ]
    )
    return "baton.v1.GenerationService/Generate", broken


def _unknown_method(rng: random.Random) -> tuple[str, bytes]:
    names = [
        "baton.v1.GenerationService/Nothing",
        "x/y",
        "grpc.health.v1.Health/Nothing",
        "baton.v2.Generation/Generate",
    ]
    return rng.choice(names), rng.randbytes(rng.randint(0, 50))


def serialized(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
