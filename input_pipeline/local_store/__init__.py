"""A local store of parts of remote files: ``--local_store``."""

from towers.input_pipeline.local_store.store import LocalStore, StoredFiles

__all__ = ["LocalStore", "StoredFiles"]
