"""Remedies that lower a job's memory: trials and costs."""
