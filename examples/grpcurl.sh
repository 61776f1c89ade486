#!/bin/sh
# The gRPC API from a shell, with grpcurl, or with `buf curl` if grpcurl is not installed. Both ask the gateway for its
# services and messages (reflection), so they need no .proto file.
#
#   [TARGET=127.0.0.1:50051] [BATON_API_KEY=...] sh examples/grpcurl.sh
set -eu

TARGET="${TARGET:-127.0.0.1:50051}"

call() { # METHOD BODY
    if command -v grpcurl > /dev/null; then
        grpcurl -plaintext -H "authorization: Bearer ${BATON_API_KEY:-none}" -d "$2" "$TARGET" "baton.v1.$1"
    else
        buf curl --protocol grpc --http2-prior-knowledge -H "authorization: Bearer ${BATON_API_KEY:-none}" \
            --reflect-header "authorization: Bearer ${BATON_API_KEY:-none}" -d "$2" "http://$TARGET/baton.v1.$1"
    fi
}

call GenerationService/GetModelInfo '{}'
call GenerationService/Generate '{
    "chat": {"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
    "sampling_params": {"max_tokens": 16, "temperature": 0}
}'
