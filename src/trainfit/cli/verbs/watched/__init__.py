"""Verbs and options about watched runs: two compared, a change that is tried."""
