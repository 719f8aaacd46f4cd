"""Words of a command on both sides of its options, which argparse takes only when asked to, and never of a subcommand.

Knows argparse; knows no command.
"""

from __future__ import annotations

import argparse
from typing import Any


def parse_intermixed(parser: argparse.ArgumentParser) -> None:
    """Make a subcommand's parser take its words wherever they stand. It must have no subcommands of its own."""
    parser.parse_known_args = _Intermixed(parser)  # type: ignore[method-assign,assignment]


class _Intermixed:
    """Parses a command whose words may stand on both sides of its options, which argparse does only when asked to."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._plain = parser.parse_known_args
        self._within = False

    def __call__(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        if self._within:  # older versions of the library come back here for each of its two rounds
            return self._plain(args, namespace)
        self._within = True
        try:
            return self._parser.parse_known_intermixed_args(args, namespace)
        finally:
            self._within = False
