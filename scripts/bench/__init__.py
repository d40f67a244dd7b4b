"""The parts of `scripts/bench_towers.py`.

`contenders` and `works` say who trains what, `race` runs the contenders' processes in
turn, `report` makes tables of what they measured. Each contender is a module of its own
in `peers`, run by `race`; `worker` is what they share.
"""
