"""trainfit's version, and where its faults are reported: the only place that says them
(pyproject.toml reads the version here)."""

__version__ = "0.1.0"
#: The project's issue page, as in pyproject.toml's [project.urls].
ISSUES = "https://github.com/trainfit/trainfit/issues"
