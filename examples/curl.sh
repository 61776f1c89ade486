#!/bin/sh
# A conversation over HTTP with curl: one answer as a whole, then one as a stream of events.
#
#   [BASE_URL=http://127.0.0.1:8000/v1] [MODEL=smollm2] [BATON_API_KEY=...] sh examples/curl.sh
set -eu

BASE_URL="${BASE_URL:-http://127.0.0.1:8000/v1}"
MODEL="${MODEL:-smollm2}"

chat() {
    curl --silent --show-error --fail-with-body --no-buffer "$BASE_URL/chat/completions" \
        -H "Content-Type: application/json" \
        -H "Authorization: Bearer ${BATON_API_KEY:-none}" \
        -d "$1"
}

chat '{"model": "'"$MODEL"'", "max_tokens": 32, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
echo

chat '{"model": "'"$MODEL"'", "max_tokens": 32, "stream": true, "stream_options": {"include_usage": true},
       "messages": [{"role": "system", "content": "Answer in verse."}, {"role": "user", "content": "Why is the sky blue?"}]}'
