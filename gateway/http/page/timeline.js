// Converts the times of a finished request, which its workers and the gateway measured, to spans on one axis. Pure.

const AXIS_SHARE = 0.45; // if decoding takes much longer, what comes before it has this share of the axis

// `end` is the data of the event `end`. Times are in seconds since the request's arrival. Workers' times are those of
// the latest attempt.
export function timeline(end) {
  const { timing, placement } = end;
  const transfers = end.transfers.filter((transfer) => transfer.attempt === end.num_attempts);
  const isHandedOver = placement.prefill !== null;
  const tokens_s = tokenTimes(timing);
  const last_s = tokens_s.length ? tokens_s[tokens_s.length - 1] : timing.total_s;
  const earlier_s = tokens_s.slice(0, timing.num_tokens_before);
  const queued_s = earlier_s.length ? timing.attempt_began_s : 0;
  const first_s = tokens_s[earlier_s.length] ?? timing.total_s;
  const producer = lastOf(transfers, "producer");
  const consumer = lastOf(transfers, "consumer");
  const prefilled_s = Math.min(at(producer, "prefilled") ?? first_s, first_s);
  const began_s = Math.max(queued_s, prefilled_s - timing.prefill_s);
  const spans = earlier_s.length ? untilMoved(timing, earlier_s) : { queue: [], prefill: [], transfer: [], decode: [] };
  spans.queue.push([queued_s, began_s, "solid"]);
  spans.prefill.push([began_s, prefilled_s, "solid"]);
  let decoding_s = first_s;
  if (isHandedOver && consumer) {
    const [asked_s, first_piece_s, verified_s] = ["asked", "first_piece", "verified"].map((name) => at(consumer, name));
    if (asked_s !== null && first_piece_s !== null) spans.transfer.push([asked_s, first_piece_s, "thin"]);
    if (first_piece_s !== null && verified_s !== null) spans.transfer.push([first_piece_s, verified_s, "solid"]);
    decoding_s = Math.max(verified_s ?? 0, prefilled_s);
  }
  if (tokens_s.length > earlier_s.length + 1) spans.decode.push([Math.min(decoding_s, last_s), last_s, "solid"]);
  return { spans, until_s: axis(timing, decoding_s, last_s), tokens_s };
}

// The spans of earlier attempts, which brought the tokens at `earlier_s`.
function untilMoved({ ttft_s, ttft_parts }, earlier_s) {
  const began_s = ttft_s - (ttft_parts?.prefill_s ?? 0);
  const decode = earlier_s.length > 1 ? [[ttft_s, earlier_s.at(-1), "solid"]] : [];
  return { queue: [[0, began_s, "solid"]], prefill: [[began_s, ttft_s, "solid"]], transfer: [], decode };
}

function tokenTimes({ ttft_s: ttft, itl_s: gaps }) {
  const times = [ttft];
  for (const gap of gaps) times.push(times[times.length - 1] + gap);
  return times;
}

// The length of the axis: the whole time, unless the answer takes so long that the earlier stages would be invisible.
function axis(timing, decoding_s, last_s) {
  return Math.min(Math.max(last_s, timing.ttft_s), decoding_s / AXIS_SHARE);
}

const lastOf = (transfers, role) => transfers.filter((transfer) => transfer.role === role).at(-1) ?? null;

const at = (transfer, name) => transfer?.events.find((event) => event.name === name)?.at_s ?? null;
