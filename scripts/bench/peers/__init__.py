"""The contenders: a module each, with a function `run` of a job and a clock."""
