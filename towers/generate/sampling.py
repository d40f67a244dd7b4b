"""Draws tokens of a language model, one after the other.

A model that `cached.build` knows reads each token once, until the text is longer than
its window. Any other Keras model, and a text that is longer, costs a whole window for
each token.
"""

import itertools
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.generate import cached
from towers.predict.trained import Trained

# Tokens that are read at once, where the model takes any number.
_WINDOW = 256
# Logits that are divided by less are no numbers any more.
_COLD = 1e-30
_SEEDS = 2**32


def generate(
    trained: Trained,
    prompt: str = "",
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Writes on from a text, to the end of a document at most.

    Args:
        trained: A language model and its tokenizer, as `towers.load_model` returns it.
        prompt: The text; without one, a document begins.
        max_tokens: Most tokens to write.
        temperature: What logits are divided by; 0 takes the likeliest token.
        top_k: From how many of the likeliest tokens to draw; None for all.
        seed: Of what is drawn.

    Returns:
        The prompt, and what follows.

    Raises:
        ValueError: It is no language model.
    """
    (text,) = generate_samples(
        trained,
        prompt,
        seeds=[seed],
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
    )
    return text


def seeds_of(seed: int, num_samples: int) -> list[int]:
    """Returns a seed for each sample: `seed`, and those that follow."""
    return [(seed + number) % _SEEDS for number in range(num_samples)]


def generate_samples(
    trained: Trained,
    prompt: str = "",
    *,
    seeds: Sequence[int],
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
) -> list[str]:
    """Writes several texts from one prompt, as one batch.

    Args:
        trained: As for `generate`.
        prompt: As for `generate`.
        seeds: One for each text, which is the one that `generate` writes with it.
        max_tokens: As for `generate`.
        temperature: As for `generate`.
        top_k: As for `generate`.

    Returns:
        The prompt, and what follows, for each seed.

    Raises:
        ValueError: It is no language model.
    """
    known, tokenizer = trained.preprocessing, trained.tokenizer
    if known.task != "language_model" or tokenizer is None:
        raise ValueError(
            f"Received a model of the task {known.task}; expected a language_model, "
            "whose outputs tell the next token."
        )
    # A prompt of the command line may be in no encoding.
    given = prompt.encode("utf-8", "surrogateescape")
    if fault := tokenizer.fault(given):
        raise ValueError(f"The prompt {fault}.")
    begun = tokenizer.encode(tf.constant([given]))[0].numpy().tolist()
    drawn = tokens(
        trained.model,
        # A document follows on the end of another.
        begun or [tokenizer.end],
        known.shape[0] or _WINDOW,
        seeds=seeds,
        temperature=temperature,
        top_k=top_k,
        from_logits=known.from_logits,
        has_padding=tokenizer.has_padding,
    )
    columns, has_ended = [], np.zeros(len(seeds), bool)
    for column in itertools.islice(drawn, max_tokens):
        columns.append(column)
        has_ended |= column == tokenizer.end
        if has_ended.all():
            break
    return [
        tokenizer.decode(
            [*begun, *itertools.takewhile(lambda token: token != tokenizer.end, row)]
        )
        for row in np.stack(columns, axis=1).tolist()
    ]


def tokens(
    model: keras.Model,
    begun: Sequence[int],
    length: int,
    *,
    seeds: Sequence[int],
    temperature: float,
    top_k: int | None = None,
    from_logits: bool = True,
    has_padding: bool = True,
) -> Iterator[np.ndarray]:
    """Yields the next token of each text for ever, drawn by the model's probabilities.

    Args:
        model: From tokens [texts, length] to logits [texts, length, vocabulary].
        begun: The tokens that all texts go on from, at least one; as many of the last
            ones as the model takes are read.
        length: How many that is.
        seeds: One for each text.
        temperature: What logits are divided by; 0 takes the likeliest token.
        top_k: From how many of the likeliest tokens to draw; None for all.
        from_logits: Whether the model returns logits, or probabilities.
        has_padding: Whether id 0 is padding, which is never drawn.
    """
    rows, reader = len(seeds), None
    # Until it is full, a window begins where it did: what was computed stays.
    if len(begun) < length:
        start = tf.Variable(0, trainable=False)
        reader = cached.build(model, rows, length, start)

    def draw(logits, at):
        logits = tf.cast(logits, tf.float32)
        if not from_logits:
            logits = tf.math.log(logits)
        if has_padding:
            logits = tf.concat([tf.fill([rows, 1], -np.inf), logits[:, 1:]], axis=1)
        if temperature < _COLD:
            return tf.argmax(logits, axis=-1)
        if top_k is not None:
            best, _ = tf.math.top_k(logits, min(top_k, logits.shape[-1]))
            logits = tf.where(logits < best[:, -1:], -np.inf, logits)
        # One by one: what a text draws does not depend on the others.
        return tf.map_fn(
            lambda one: tf.random.stateless_categorical(one[0][None], 1, one[1])[0, 0],
            (logits / temperature, at),
            fn_output_signature=tf.int64,
        )

    @tf.function(
        input_signature=[
            tf.TensorSpec([rows, length], tf.int32),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([rows, 2], tf.int32),
        ],
        autograph=False,
    )
    def draw_after_window(window, last, at):
        # Behind the last token is padding, which a token that looks back does not see.
        return draw(model(window, training=False)[:, last], at)

    @tf.function(
        input_signature=[
            tf.TensorSpec([rows, None], tf.int32),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([rows, 2], tf.int32),
        ],
        autograph=False,
    )
    def draw_after_new(new, first, at):
        start.assign(first)
        return draw(reader(new, training=False)[:, -1], at)

    read, cached_count = np.tile(np.array(begun[-length:], np.int32), (rows, 1)), 0
    # Seeds are int32; these are as many as --seed may be.
    numbers = np.array(seeds, np.uint32).astype(np.int32)
    for step in itertools.count():
        at = np.stack([numbers, np.full(rows, step, np.int32)], axis=1)
        count = read.shape[1]
        if reader is not None:
            drawn = draw_after_new(read[:, cached_count:], cached_count, at).numpy()
            cached_count = count
        else:
            window = np.pad(read, ((0, 0), (0, length - count)))
            drawn = draw_after_window(window, count - 1, at).numpy()
        yield drawn
        read = np.concatenate([read, drawn[:, None].astype(np.int32)], axis=1)
        if count == length:
            # The first token leaves, and with it what others have read of it.
            read, reader = read[:, 1:], None
