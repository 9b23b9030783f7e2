"""Why a run failed or hangs, and how to fix it, from plain facts: every verb asks here."""
