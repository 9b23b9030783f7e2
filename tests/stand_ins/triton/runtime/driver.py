"""``DriverConfig``: without a GPU there is no active driver."""

from typing import Any


class DriverConfig:
    def __init__(self) -> None:
        self._active: Any = None

    @property
    def active(self) -> Any:
        if self._active is None:
            raise RuntimeError("0 active drivers ([]). There should only be one.")
        return self._active


driver = DriverConfig()
