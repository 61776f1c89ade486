"""Flags of commands that ask a running gateway; what they mean, cli/target.py knows."""

import argparse
from pathlib import Path


def add_target_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Which gateway a command asks, what it shows there, and how it knows that it is the right one."""
    parser.add_argument("--target", default=default, metavar="HOST:PORT", help="default %(default)s")
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the key to show there")
    key.add_argument(
        "--api-key",
        metavar="KEY",
        help="the key itself, which others on this machine can see; default $BATON_API_KEY",
    )
    parser.add_argument("--tls", action="store_true", help="speak TLS; implied by the flags below")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="trust these authorities, and no others")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="show this certificate (mTLS)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
