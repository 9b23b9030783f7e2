"""Training that goes wrong in its numbers."""

from trainfit.watch.rules.learning import loss, loss_scale

RULES = (loss.RULE, loss_scale.RULE)
