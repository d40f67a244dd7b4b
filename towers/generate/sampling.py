"""Draws tokens of a language model, one after the other.

The model reads its whole window for each token. It keeps no keys and values of earlier
ones: any Keras model can be sampled from so, a long text takes longer.
"""

from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.predict.trained import Trained

# Tokens that are read at once, where the model takes any number.
_WINDOW = 256
# Logits that are divided by less are no numbers any more.
_COLD = 1e-30


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
    length = known.shape[0] or _WINDOW
    ids = tokens(
        trained.model,
        # A document follows on the end of another.
        begun or [tokenizer.end],
        length,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        from_logits=known.from_logits,
    )
    for _, token in zip(range(max_tokens), ids, strict=False):
        if token == tokenizer.end:
            break
        begun.append(token)
    return tokenizer.decode(begun)


def tokens(
    model: keras.Model,
    begun: Sequence[int],
    length: int,
    *,
    temperature: float,
    top_k: int | None = None,
    seed: int = 0,
    from_logits: bool = True,
) -> Iterator[int]:
    """Yields tokens for ever, each drawn by the model's probabilities.

    Args:
        model: From tokens [1, length] to logits [1, length, vocabulary].
        begun: The tokens to go on from, at least one; as many of the last ones as the
            model takes are read.
        length: How many that is.
        temperature: What logits are divided by; 0 takes the likeliest token.
        top_k: From how many of the likeliest tokens to draw; None for all.
        seed: Of what is drawn.
        from_logits: Whether the model returns logits, or probabilities.
    """

    @tf.function(
        input_signature=[
            tf.TensorSpec([1, length], tf.int32),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([2], tf.int32),
        ],
        autograph=False,
    )
    def draw(window, last, at):
        # Behind the last token is padding, which a token that looks back does not see.
        logits = tf.cast(model(window, training=False), tf.float32)[:, last]
        if not from_logits:
            logits = tf.math.log(logits)
        # Padding is no token.
        logits = tf.concat([tf.fill([1, 1], -np.inf), logits[:, 1:]], axis=1)
        if temperature < _COLD:
            return tf.argmax(logits, axis=-1)[0]
        if top_k is not None:
            best, _ = tf.math.top_k(logits, min(top_k, logits.shape[-1]))
            logits = tf.where(logits < best[:, -1:], -np.inf, logits)
        return tf.random.stateless_categorical(logits / temperature, 1, at)[0, 0]

    read = [*begun][-length:]
    # Seeds are int32; these are as many as --seed may be.
    number, step = np.uint32(seed).astype(np.int32), 0
    while True:
        window = [*read, *[0] * (length - len(read))]
        token = int(draw([window], len(read) - 1, [number, step]))
        yield token
        read, step = [*read, token][-length:], step + 1
