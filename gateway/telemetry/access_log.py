"""The access log: one line for each request that has ended, with its caller, outcome and duration."""

import logging

from gateway.requests.record import RequestRecord

logger = logging.getLogger(__name__)


def log_request(record: RequestRecord) -> None:
    """Logs the request at level INFO, without prompt, answer or key. Of an error, it logs only the kind,
    since the error's text may quote the client."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields = fields_of(record)
    shown = " ".join(f"{key}={value}" for key, value in fields.items() if value not in (None, ""))
    logger.info("request %s", shown, extra=fields)


def fields_of(record: RequestRecord) -> dict[str, str | int | float | None]:
    """The fields of a log line. Times are in seconds. Workers are those of the latest attempt."""
    placement = record.attempts[-1].placement if record.attempts else None
    ttft_s = record.ttft_s
    return {
        "request_id": record.request_id,
        "caller": record.caller.name,
        "api": record.api,
        "outcome": record.outcome.value,
        "error": record.error_kind,
        "finish_reason": None if record.finish is None else record.finish.reason.value,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": None if record.finish is None else record.finish.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "ttft_s": None if ttft_s is None else round(ttft_s, 6),
        "total_s": round(record.ended_at - record.arrived_at, 6),
        "attempts": record.num_attempts,
        "path": record.path,
        "prefill_worker": None if placement is None else placement.prefill,
        "decode_worker": None if placement is None else placement.decode,
    }
