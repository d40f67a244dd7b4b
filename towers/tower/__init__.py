"""Parts of a step beside its graph: preprocessing, eager calls, error messages."""
