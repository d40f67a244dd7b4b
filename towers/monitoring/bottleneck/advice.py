"""What to do about the slowest stage of an input: in words that its author knows."""

from collections.abc import Mapping, Sequence

from towers.monitoring.bottleneck.tfdata_stats import Stage

_MORE_CORES = "give the input more CPU cores, here or by tf.data's service"
_FASTER = "keep the data on a faster disk or in memory (.cache())"

# By tf.data's word for a transformation; each names only arguments that it has. Those
# below "in parallel" have several threads already.
_OF_TF_DATA = {
    "map": "pass it num_parallel_calls=tf.data.AUTOTUNE, .cache() what it makes, or do "
    "less in it",
    "map in parallel": "do less in it, .cache() what it makes, or " + _MORE_CORES,
    "batch": "make the examples smaller, or pass it num_parallel_calls",
    "batch in parallel": "make the examples smaller",
    "padded_batch": "make the examples smaller, or pad them in a .map() with "
    "num_parallel_calls and then .batch() them",
    "shuffle": "take a smaller buffer_size, and shuffle before decoding",
    "filter": "compute what it asks for in a .map() with num_parallel_calls before it, "
    "or .cache() what it leaves",
    "flat_map": "use .interleave() in its place, with num_parallel_calls",
    "interleave": "pass it num_parallel_calls=tf.data.AUTOTUNE",
    "interleave in parallel": "begin fewer data sets in it, of larger files or longer "
    "epochs",
    "scan": "move what needs no state to a .map() with num_parallel_calls",
    "unbatch": "leave the examples in their batches, in a .map() of whole batches",
    "memory_cache": "put .batch() before it, so that it hands over less often",
    "file_cache": "leave out its filename, to keep the data in memory, or name one on "
    "a faster disk",
    "data_service": "start more workers",
}
_OF_OTHERS = "put .batch() before it, so that it has less to do, or .cache() its result"

# By what is read.
_FILES = f"{_FASTER}, in fewer and larger files, or .interleave() several with "
_FILES += "num_parallel_calls"
_FILES_IN_PARALLEL = f"{_FASTER}, or in fewer and larger files"
_IN_MEMORY = "let it begin with whole batches in place of single examples"
_GENERATOR = (
    "make a keras.utils.PyDataset of it, which has workers, or write its data to "
    "TFRecord files once and for all"
)
_KINDS_IN_MEMORY = (
    *("FromTensor", "Tensor", "TensorSlice", "SparseTensorSlice"),
    *("Range", "Random", "Window"),
)

# Keras cuts arrays by functions of this name.
_OF_KERAS = "grab_batch", "slice_batch_indices"
_ARRAYS = "give fit a tf.data.Dataset of batches, or a larger batch_size"


def advise(
    stage: Stage, stages: Sequence[Stage], own: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Names a stage of the input, and says what to do about it.

    Args:
        stage: One of `stages`.
        stages: Of the input, the last one first.
        own: What to do about a stage, by its label, if the pipeline has words of its
            own; those that it has no word for bring the records: "read".
    """
    if own:
        return _on_own(stage, own)
    if any(each.label in _OF_KERAS for each in stages):
        return "Keras's own, which cuts the arrays into batches", _ARRAYS
    if stage.kind == "flat_map":
        # `Dataset.from_generator`, which Keras uses as well, is made of both.
        after = stages[stages.index(stage) + 1 :][:1]
        stage = next((each for each in after if _generates(each)), stage)
    return str(stage), _of_tf_data(stage)


def _on_own(stage, own):
    if stage.label in own and stage.label != "read":
        return str(stage), own[stage.label]
    word = {"data_service": "service"}.get(stage.kind, stage.kind)
    word = word if word in own else "read"
    return f"`{word}`", own.get(word) or _of_tf_data(stage)


def _of_tf_data(stage):
    parallel = stage.threads > 1
    if _generates(stage):
        return _GENERATOR
    if stage.label == "read":
        if stage.kind in _KINDS_IN_MEMORY:
            return _IN_MEMORY
        return _FILES_IN_PARALLEL if parallel else _FILES
    kind = stage.kind.removesuffix("_impl")
    found = _OF_TF_DATA.get(f"{kind} in parallel") if parallel else None
    return found or _OF_TF_DATA.get(kind, _OF_OTHERS)


def _generates(stage):
    return "generator" in stage.kind.lower()
