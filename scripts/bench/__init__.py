"""The parts of `scripts/bench_towers.py`.

`contenders` and `works` say who trains what, `results` starts the contenders' processes
and sums up what they measured, `report` makes tables of that. Each contender is a
module of its own in `peers`; `worker` is what they share.
"""
