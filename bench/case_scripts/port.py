import socket

import torch.distributed as dist

taken = socket.socket()
taken.bind(("127.0.0.1", 0))
taken.listen()
port = taken.getsockname()[1]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
