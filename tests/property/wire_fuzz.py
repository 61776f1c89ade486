"""Hostile bytes for any length of time: into every decoder, and into a live end of many hand-overs.

    python -m tests.property.wire_fuzz --seconds 600 [--seed N]

Decoders raise WireError and nothing else, take little memory and time, and what they accept encodes back to an equal
value. An endpoint raises nothing, whatever it receives. A failure names the seed that replays it.
"""

import argparse
import logging
import random
import sys
import time
import tracemalloc
from collections import Counter
from contextlib import suppress
from typing import Any

from baton.errors import WireError
from tests.factories.endpoint_under_fire import EndpointUnderFire
from tests.factories.wire_values import CODECS, hostile_frame, valid_frame

BYTES_PER_BYTE = 100
"""What a decoder may take for each byte of a frame: an empty map is one byte there, and 72 and its place here."""

BYTES_AT_LEAST = 50_000
SECONDS_AT_MOST = 5.0
ROUNDS_PER_ENDPOINT = 150


def check_decoder(codec: Any, frame: bytes) -> Any | None:
    """The message in the frame; None if the frame contains none."""
    try:
        message = codec.decode(frame)
    except WireError:
        return None
    again = codec.decode(codec.encode(message))
    assert again == message or repr(again) == repr(message), (
        f"{message} comes back as {again}"
    )  # repr: for NaN
    return message


def check_cost(codec: Any, frame: bytes) -> None:
    """Checks that decoding takes little time, and memory in proportion to the frame's size."""
    begun_at = time.process_time()
    check_decoder(codec, frame)
    elapsed_s = time.process_time() - begun_at
    tracemalloc.start()  # separate from the rest, since tracing makes everything slow
    try:
        with suppress(WireError):
            codec.decode(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= BYTES_AT_LEAST + BYTES_PER_BYTE * len(frame), f"{peak} bytes for a frame of {len(frame)}"
    assert elapsed_s <= SECONDS_AT_MOST, f"{elapsed_s:.1f} s for a frame of {len(frame)} bytes"


def fuzz_decoders(seed: int) -> Counter[str]:
    """Decodes some frames with every decoder. Returns how many were tried, and how many were accepted."""
    rng, counts = random.Random(seed), Counter[str]()
    for name, codec in CODECS.items():
        assert check_decoder(codec, valid_frame(codec, rng)) is not None
        for _ in range(20):
            counts[f"{name} tried"] += 1
            counts[f"{name} accepted"] += check_decoder(codec, hostile_frame(codec, rng)) is not None
        check_cost(codec, hostile_frame(codec, rng))
    return counts


def fuzz_endpoint(seed: int) -> Counter[str]:
    """Runs an endpoint among hostile peers, to its end."""
    under_fire = EndpointUnderFire(random.Random(seed))
    for _ in range(ROUNDS_PER_ENDPOINT):
        under_fire.round()
    under_fire.end()
    return under_fire.counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    logging.disable()
    counts, begun_at = Counter[str](), time.monotonic()
    seed = options.seed
    while (elapsed_s := time.monotonic() - begun_at) < options.seconds:
        try:
            counts += fuzz_decoders(seed)
            counts += fuzz_endpoint(seed)
        except BaseException:
            print(f"replay: python -m tests.property.wire_fuzz --seconds 0.001 --seed {seed}")
            raise
        seed += 1
    for name, number in sorted(counts.items()):
        print(f"{name:<40} {number:>12,}")
    decoded = sum(number for name, number in counts.items() if name.endswith("tried"))
    for what, number in (("frames decoded", decoded), ("endpoint rounds", counts["rounds"])):
        print(f"{what}: {number:,}, {number / elapsed_s:,.0f} a second")
    print(f"seeds {options.seed} to {seed - 1}: nothing raised, nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
