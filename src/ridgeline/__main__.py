"""`python -m ridgeline` is the `ridgeline` command."""

import sys

from ridgeline.cli import main

sys.exit(main())
