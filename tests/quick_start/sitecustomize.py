"""On PYTHONPATH of the processes that tests start: they import PyTorch and end in two thirds of the
CPU time.

An import of PyTorch and of what its optimizers need makes half a million objects. Python looks
through them for cyclic garbage again and again meanwhile, and takes each apart at the end.
"""

import atexit
import gc

gc.set_threshold(200_000, 10, 10)
atexit.register(gc.freeze)
