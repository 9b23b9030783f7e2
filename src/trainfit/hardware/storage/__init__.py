"""Storage below a path: mounts, disks, read rate."""
