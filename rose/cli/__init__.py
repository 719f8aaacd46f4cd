"""The command line: reads arguments, calls one room, prints.

Every command imports what it needs when it runs, so that `rose --help` is quick and the front's commands load no torch.
Knows options and exit statuses; knows nothing of the work itself.
"""

from rose.cli.entry import build_parser, main

__all__ = ["build_parser", "main"]
