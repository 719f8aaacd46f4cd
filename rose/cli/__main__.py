"""`python -m rose.cli`: the same as the console script `rose`."""

import sys

from rose.cli import main

sys.exit(main())
