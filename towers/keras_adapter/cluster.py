"""TensorFlow's clusters: how a process joins one, collectives, values that all read."""

import contextlib
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import context

__all__ = [
    "ERRORS",
    "all_gather",
    "all_reduce",
    "configure",
    "is_initialized",
    "lost",
    "read",
    "remove",
    "report",
    "start",
    "write",
]

_JOB = "worker"
ERRORS = (
    *(tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError),
    *(tf.errors.DeadlineExceededError, tf.errors.InternalError),
    *(tf.errors.FailedPreconditionError, tf.errors.NotFoundError),
)
"""The errors of TensorFlow after another task of the cluster has failed."""


def is_initialized() -> bool:
    """Returns whether TensorFlow has its devices, so that it can join no cluster."""
    return context.context()._initialized


def configure(
    addresses: Sequence[str], index: int, silent_s: float
) -> tf.train.ServerDef:
    """Has TensorFlow join a cluster when it initialises.

    The tasks of the cluster run collectives together. None runs operations on another
    task's devices.

    Args:
        addresses: Address "host:port" of each task's server.
        index: Index of this task.
        silent_s: Seconds without a sign of life after which a task counts as dead.

    Returns:
        The task's server, for `start`.
    """
    ctx, leader = context.context(), f"/job:{_JOB}/replica:0/task:0"
    job = context.coordination_config_pb2.CoordinatedJob(
        name=_JOB, num_tasks=len(addresses)
    )
    ctx.configure_collective_ops(
        collective_leader=leader,
        scoped_allocator_enabled_ops=(),
        device_filters=(f"/job:{_JOB}/task:{index}",),
    )
    ctx.configure_coordination_service(
        "standalone",
        service_leader=leader,
        heartbeat_timeout_in_ms=int(1000 * silent_s),
        coordinated_jobs=[job],
    )
    server = tf.train.ServerDef(job_name=_JOB, task_index=index, protocol="grpc")
    server.cluster.job.add(name=_JOB).tasks.update(enumerate(addresses))
    ctx.enable_collective_ops(server)
    return server


def start(server: tf.train.ServerDef) -> None:
    """Initialises TensorFlow; waits until all tasks of its cluster have done so.

    Args:
        server: The result of `configure`.
    """
    ctx = context.context()
    # The server makes the devices: logical ones, too, that were set up meanwhile.
    server.default_session_config.CopyFrom(ctx.config)
    ctx.ensure_initialized()


def lost(tasks: int) -> list[int]:
    """Returns the tasks of a cluster that are silent, or have ended by an error."""
    states = context.context().get_task_states([(_JOB, tasks)])
    return [task for task, error in enumerate(states) if error is not None]


def all_reduce(
    tensor: tf.Tensor, tasks: int, key: tf.Tensor | int, order: tf.Variable
) -> tf.Tensor:
    """Adds a tensor over the tasks of a cluster, with the same bits on all.

    Args:
        tensor: A tensor in the host's memory of the same type and shape on all tasks:
            float16, bfloat16, float32, float64, int32 or int64.
        tasks: Number of tasks.
        key: An int32 for one type and one shape; TensorFlow keeps it for ever.
        order: Collectives with the same variable run one after another.
    """
    return tf.raw_ops.CollectiveReduceV2(
        input=tensor,
        instance_key=key,
        merge_op="Add",
        final_op="Id",
        # By default the ring sends the whole tensor from one task to the next.
        max_subdivs_per_device=8,
        **_common(tasks, order),
    )


def all_gather(
    tensor: tf.Tensor, tasks: int, key: tf.Tensor | int, order: tf.Variable
) -> tf.Tensor:
    """Concatenates the rows of all tasks, which have the same number of rows.

    Args:
        tensor: float16, float32, float64, int32 or int64; see `all_reduce`.
        tasks: Number of tasks.
        key: See `all_reduce`.
        order: See `all_reduce`.
    """
    return tf.raw_ops.CollectiveGatherV2(
        input=tensor, instance_key=key, **_common(tasks, order)
    )


def _common(tasks: int, order: tf.Variable) -> dict:
    return {
        "group_size": tasks,
        "group_key": 1,
        "ordering_token": [order.handle],
        "communication_hint": "ring",
    }


def write(key: str, value: str) -> bool:
    """Writes a value for all tasks; returns False if the key has a value already."""
    try:
        context.context().set_config_key_value(key, value)
    except tf.errors.AlreadyExistsError:
        return False
    return True


def read(key: str, seconds: float) -> str | None:
    """Waits for a value of `write`; returns `None` if it does not come in time."""
    try:
        return context.context().get_config_key_value(key, int(1000 * seconds))
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return None


def remove(key: str) -> None:
    """Removes a value of `write`."""
    context.context().delete_config_key_value(key)


def report(message: str) -> None:
    """Ends the collectives of all tasks, which raise the message; for any thread."""
    # TensorFlow may have ended them before.
    with contextlib.suppress(*ERRORS):
        context.context().report_error_to_cluster(tf.errors.ABORTED, message)
