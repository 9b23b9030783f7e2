"""What keeps a GPU below its speed: clocks, precision, small batches, uneven ranks."""

from trainfit.watch.rules.gpu import clocks, precision, ranks, sharing, utilization

RULES = (clocks.RULE, precision.RULE, utilization.RULE, ranks.RULE, sharing.RULE)
