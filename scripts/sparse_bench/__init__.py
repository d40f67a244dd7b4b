"""The parts of `scripts/bench_block_sparse.py`.

`contenders` says who multiplies, `case` what, and which results are right; `race` runs
the processes of frameworks in turn. `worker` is what these processes share. Each has a
module: `keras_layers`, `torch_bsr` or `scipy_bsr`.
"""
