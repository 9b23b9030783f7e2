"""``python -m trainfit`` is the command ``trainfit``."""

import sys

from trainfit.cli.main import main

sys.exit(main())
