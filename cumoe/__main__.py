"""``python -m cumoe``."""

import sys

from cumoe.cli import main

sys.exit(main())
