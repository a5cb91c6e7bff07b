"""Hypothesis without deadlines, since kernels compile on first use; the same examples every run."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("codec", deadline=None, derandomize=True)
settings.load_profile("codec")
