"""Hypothesis without deadlines, since kernels compile on first use; the same examples every run."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for the samples beside this file

settings.register_profile("codec", deadline=None, derandomize=True)
settings.load_profile("codec")
