"""Sends Python's file calls to a scratch layer, where the kernel allows no overlay."""

from __future__ import annotations

from trainfit.scripts.sandbox.redirection.enter import Redirected, enter

__all__ = ["Redirected", "enter"]
