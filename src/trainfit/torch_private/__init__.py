"""Every private name of PyTorch that trainfit uses, checked when it is imported.

The rest of the package takes them from here, by names of ours. A module of this room imports what
it needs of PyTorch inside ``needed()``; a PyTorch without it is refused in one line that names it.
"""
