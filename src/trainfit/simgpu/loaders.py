"""Which DataLoader feeds the training step, and what if its batch size were another?"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from torch.utils.data import DataLoader

from trainfit.simgpu.patching import PatchSet


class LoaderTracker:
    """Numbers the DataLoaders in the order of their construction.

    ``override`` is (index, batch size) for the one that gets another batch size.
    """

    def __init__(self, override: tuple[int, int] | None = None) -> None:
        self._override = override
        self._made: list[tuple[weakref.ref[Any], weakref.ref[Any] | None]] = []
        self._latest: weakref.ref[Any] | None = None
        self.count = 0

    def install(self, patches: PatchSet) -> None:
        construct, iterate = DataLoader.__init__, DataLoader.__iter__
        signature = inspect.signature(construct)
        tracker = self

        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            if tracker._override is not None and tracker._override[0] == tracker.count:
                bound = signature.bind(loader, *args, **kwargs)
                if bound.arguments.get("batch_sampler") is None:
                    bound.arguments["batch_size"] = tracker._override[1]
                args, kwargs = bound.args[1:], bound.kwargs
            tracker.count += 1
            construct(loader, *args, **kwargs)
            sampler = getattr(loader, "batch_sampler", None)
            tracker._made.append(
                (weakref.ref(loader), weakref.ref(sampler) if sampler is not None else None)
            )

        def __iter__(loader: Any) -> Any:
            tracker._latest = weakref.ref(loader)
            return iterate(loader)

        patches.set(DataLoader, "__init__", __init__)
        patches.set(DataLoader, "__iter__", __iter__)

    def feeding(self) -> dict[str, Any] | None:
        """The loader iterated last, described; ``None`` if there was none.

        A loader that another was rebuilt from (Accelerate's ``prepare``) shares its batch
        sampler; the original is meant, for its batch size is the one the user gave.
        """
        loader = self._latest() if self._latest is not None else None
        if loader is None:
            return None
        sampler = getattr(loader, "batch_sampler", None)
        batch_size = loader.batch_size
        if batch_size is None:
            batch_size = getattr(sampler, "batch_size", None)
        index = next(
            (
                number
                for number, (made, of_sampler) in enumerate(self._made)
                if made() is loader
                or (sampler is not None and of_sampler is not None and of_sampler() is sampler)
            ),
            None,
        )
        return {
            "index": index,
            "batch_size": batch_size,
            "dataset_samples": _length(getattr(loader, "dataset", None)),
            "num_workers": loader.num_workers,
        }


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
