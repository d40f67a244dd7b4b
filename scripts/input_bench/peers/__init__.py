"""The contenders: a module each, with a function `batches`."""
