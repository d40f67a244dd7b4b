"""What TensorBoard shows of a run."""
