"""Why a run failed or hangs, what habits of scripts cost, and the fix: every verb asks here."""
