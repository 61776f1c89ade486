"""Flags of commands that call a running gateway; cli/target.py reads them."""

import argparse
from pathlib import Path


def add_target_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds the flags that choose the gateway, the credentials for it, and how to check its identity."""
    parser.add_argument(
        "--target", default=default, metavar="HOST:PORT", help="gateway to call; default %(default)s"
    )
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the API key")
    key.add_argument(
        "--api-key",
        metavar="KEY",
        help="the API key itself, visible to other users of this machine; default $BATON_API_KEY",
    )
    parser.add_argument("--tls", action="store_true", help="use TLS; implied by the flags below")
    parser.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="trust only these certificate authorities"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="present this certificate (mTLS)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of the certificate")
