"""Makes the corpus importable, and keeps it out of runs that did not ask for it."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
