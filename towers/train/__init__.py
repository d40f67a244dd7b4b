"""Trains a model on towers: python -m towers.train.

flags.py reads the command line into one frozen `Settings`, and checks.py checks it,
both before TensorFlow is imported. `job.assemble` makes a `Job` of it, from the pieces
in parts/. `run.run` trains, evaluates and saves; outputs/ has what it writes and says.
"""
