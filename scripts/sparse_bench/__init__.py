"""The parts of `scripts/bench_block_sparse.py`.

`contenders` says who multiplies, `case` what, and which results are right; `results`
starts the processes of frameworks and sums up what they measured. `worker` is what
these processes share. Each has a module: `keras_layers`, `torch_bsr` or `scipy_bsr`.
"""
