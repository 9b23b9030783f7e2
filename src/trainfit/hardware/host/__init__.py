"""The seam to the machine: files, commands, mounts, cgroups, under an injectable root."""
