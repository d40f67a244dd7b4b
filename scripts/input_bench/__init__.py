"""The parts of `scripts/bench_input.py`.

`data` makes what is read, `works` and `contenders` say what is read by whom, `results`
starts the contenders' processes and sums up what they measured. Each kind of contender
is a module of its own in `peers`, run by `worker`: a function
`batches(contender, work, folder)` yields its images and labels, for ever.
"""
