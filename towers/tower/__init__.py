"""Parts of a step beside its graph: preprocessing, variables, error messages."""
