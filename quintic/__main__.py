"""`python -m quintic` is the command line."""

import sys

from quintic.cli import main

sys.exit(main())
