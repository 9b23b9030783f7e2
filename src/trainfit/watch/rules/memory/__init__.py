"""Memory that runs short or grows: the GPU's, RAM, /dev/shm."""

from trainfit.watch.rules.memory import gpu_growth, gpu_limit, host_memory, reserved

RULES = (gpu_limit.RULE, reserved.RULE, gpu_growth.RULE, host_memory.RULE)
