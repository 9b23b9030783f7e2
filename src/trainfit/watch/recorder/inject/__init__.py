"""The folder that a watched command has on PYTHONPATH: Python imports its sitecustomize."""
