"""What DataLoader workers copy: open files, random generators, a data set that each iterates whole.

`trainfit loader` finds it by trying, where it is critical: no setting with workers gives what the
script means. `trainfit watch` finds it in the first batches of a run, which goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainfit.findings import fixes
from trainfit.results.findings import Confidence, Evidence, Finding, Fix, Severity
from trainfit.results.runs.watched import GLOBAL_GENERATORS


def shared_handle(
    handles: Mapping[str, str], severity: Severity = "critical", confidence: Confidence = "certain"
) -> Finding:
    """The finding on ``handles``, files and connections that were open before the workers: path →
    type."""
    path, kind = next(iter(handles.items()))
    others = len(handles) - 1
    more = f" and {others} more are" if others else " is"
    return Finding(
        "shared_handle",
        severity,
        f"{path} ({kind}){more} opened before the workers start",
        (Evidence("open files and connections", float(len(handles))),),
        f"{', '.join(f'{path} ({kind})' for path, kind in handles.items())}: forked workers share "
        "its position and caches, so that one reads what another asked for; spawned ones cannot be "
        "given it",
        (Fix(fixes.OPEN_IN_WORKER),),
        confidence,
    )


def generator_copied(
    paths: Sequence[str],
    severity: Severity = "critical",
    *,
    by_workers: bool,
    by_epochs: bool = False,
) -> Finding:
    """The finding on generators, by their paths, that workers begin with in one state, or two
    epochs do."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    is_global = paths[0] in GLOBAL_GENERATORS
    begins = "is seeded alike by worker_init_fn" if is_global else "is copied into the workers"
    what = "each epoch draws the same random numbers again"
    if by_workers:
        what = "each worker draws the same random numbers"
        what += ", and each epoch again" if by_epochs else ""
    return Finding(
        "generator_copied",
        severity,
        f"{paths[0]}{more} {begins}: {what}",
        (),
        f"{', '.join(paths)}: two workers{'' if by_workers else ' of two epochs'} began with one "
        "state and drew from it",
        (Fix(fixes.SEED_OF_WORKER if is_global else fixes.GENERATOR_IN_WORKER),),
    )


def not_sharded(
    cause: str, severity: Severity = "critical", confidence: Confidence = "certain"
) -> Finding:
    """The finding on an iterable data set that does not ask which worker it is; ``cause``: what was
    seen."""
    return Finding(
        "iterable_not_sharded",
        severity,
        "Each worker yields all samples: an epoch repeats them once per worker",
        (),
        cause,
        (Fix(fixes.SHARD_BY_WORKER),),
        confidence,
    )


def too_few_shards(
    kind: str,
    fed: int,
    workers: int,
    severity: Severity = "critical",
    confidence: Confidence = "certain",
) -> Finding:
    """The finding on a data set that has samples for ``fed`` of so many workers."""
    return Finding(
        kind,
        severity,
        f"{fed} of {workers} workers get samples: the data set has no more shards",
        (Evidence("workers that ended without a sample", float(workers - fed)),),
        f"{workers - fed} workers came to their end without a sample; such a worker makes no "
        "batch, and needs memory",
        (Fix(fixes.MORE_SHARDS, settings={"num_workers": str(fed)}),),
        confidence,
        subject=str(fed),
    )
