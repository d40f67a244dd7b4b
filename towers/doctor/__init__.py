"""What is wrong with this machine, if training does not start or is slow.

`python -m towers.doctor` says it. A check is a function that returns a `Finding`.
TensorFlow is imported in a process of its own alone (`probe.py`), which may fail, crash
or hang.
"""
