"""TensorFlow's clusters: how a process joins one, and values that all read."""

import contextlib
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import context

__all__ = [
    "ERRORS",
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
