"""Writes text with a language model that towers.train has trained.

    python -m towers.generate runs/text_python_transformer_lm --prompt='def '

Each token is drawn by the model's probabilities, and is then read as what has come
before the next one.
Exit codes: 0 done; 1 error; 130 stopped by Ctrl-C.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.generate import arguments
    from towers.program import startup

    _options = startup.begin(
        "towers.generate", lambda argv: arguments.read(argv[1:], __doc__)
    )

import argparse

from towers.generate.sampling import generate
from towers.predict.trained import load_model
from towers.program import ending, startup

_PROGRAM = "towers.generate"


def run(options: argparse.Namespace) -> None:
    """Writes a text to standard output.

    Raises:
        ValueError: If the model is not as expected.
    """
    text = generate(
        load_model(options.model_dir, options.checkpoint, options.model),
        options.prompt,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(text)


if __name__ == "__main__":
    startup.leave(ending.run(_PROGRAM, lambda: run(_options)))
