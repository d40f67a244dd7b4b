"""Every private name of Keras and TensorFlow that Towers uses, and one way to patch.

Each module gives public names to the private ones of a topic, with a docstring that
states what the rest of Towers relies on. Nothing else in the project touches a private
name. The tests in `tests/towers/keras_adapter/` hold one contract for each name: if a
new version breaks it, the failure names the contract and the modules that rely on it.

`docs/reference/versions.md` lists the supported versions, and their differences.
"""
