"""Notes what a script can see of how it is run, and how it ends: argv[1] is the file."""

import atexit
import json
import os
import pickle
import sys

import torch
from widths import hidden_width

seen = {
    "name": __name__,
    "file": __file__,
    "argv": sys.argv,
    "package": __package__,
    "spec": __spec__ and __spec__.name,
    "doc": __doc__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "path": sys.path[0],
    "sibling": hidden_width(3),
    "stdin": sys.stdin.read(),
    "cwd": os.getcwd(),
}


def note(**more):
    seen.update(more)
    with open(sys.argv[1], "w") as stream:
        json.dump(seen, stream)


class Thing:
    """Pickled by reference to ``__main__``."""


if __name__ == "__main__":
    atexit.register(lambda: note(atexit=True))
    note(pickled=type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    try:
        while True:
            try:
                model(torch.randn(4, 8, device="cuda")).sum().backward()
                optimizer.step()
            except Exception:
                note(exception=True)
    finally:
        note(final=True)
