"""Writes text with a language model that towers.train has trained.

    python -m towers.generate runs/text_python_transformer_lm --prompt='def '

Each token is drawn by the model's probabilities, and is then read as what has come
before the next one. With --num_samples, a line before each text has its seed.
Exit codes: 0 done; 1 error; 130 stopped by Ctrl-C.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.generate import arguments
    from towers.program import startup

    _options = startup.begin(
        "towers.generate", lambda argv: arguments.read(argv, __doc__)
    )


from towers.generate.arguments import GenerateOptions
from towers.generate.sampling import generate_samples, seeds_of
from towers.predict.trained import load_model
from towers.program import ending, startup

_PROGRAM = "towers.generate"


def run(options: GenerateOptions) -> None:
    """Writes texts to standard output.

    Raises:
        ValueError: If the model is not as expected.
    """
    seeds = seeds_of(options.seed, options.num_samples)
    texts = generate_samples(
        load_model(options.local_dir, options.checkpoint, options.model),
        options.prompt,
        seeds=seeds,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
    )
    for seed, text in zip(seeds, texts, strict=True):
        if len(texts) > 1:
            print(f"--- seed {seed}")
        print(text)


if __name__ == "__main__":
    startup.leave(ending.run(_PROGRAM, lambda: run(_options)))
