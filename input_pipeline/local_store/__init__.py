"""A local store of parts of files that lie far away."""
