"""Every private name of Keras and TensorFlow that Towers uses, and one way to patch.

Each module gives a topic's private names public ones, with a docstring that says what
the rest of Towers relies on. Nothing else in the project touches a private name. The
tests in `tests/towers/keras_adapter/` hold one contract for each name: if a new version
breaks it, the failure says what broke and which modules rely on it.

`docs/versions.md` says which versions are supported, and where they differ.
"""
