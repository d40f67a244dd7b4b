"""TensorFlow's runtime: devices, clusters, determinism, NCCL, the profiler's files."""

from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import context
from tensorflow.python.framework import config
from tensorflow.python.ops import nccl_ops
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

__all__ = [
    "ReductionOverHosts",
    "XSpace",
    "abort_collectives",
    "collective_sum",
    "device_memory_limits",
    "is_collective_error",
    "is_deterministic",
    "is_initialized",
    "join_cluster",
    "nccl_sums",
    "own_devices",
    "random_seed",
    "read_key",
    "wait_for_all",
    "write_key",
]

_JOB = "worker"


def is_deterministic() -> bool:
    """Tells whether `tf.config.experimental.enable_op_determinism` was called."""
    return config.is_op_determinism_enabled()


def device_memory_limits() -> dict[str, int]:
    """Returns the bytes that TensorFlow may allocate on each device.

    For a device without a limit of the user's, no public function tells.

    Returns:
        The limits, by device string such as "/device:GPU:0".
    """
    context.ensure_initialized()
    found = pywrap_tfe.TFE_ContextListDevices(context.context()._handle)
    try:
        return {
            f"/{pywrap_tf_session.TF_DeviceListName(found, i).rpartition('/')[2]}": (
                pywrap_tf_session.TF_DeviceListMemoryBytes(found, i)
            )
            for i in range(pywrap_tf_session.TF_DeviceListCount(found))
        }
    finally:
        pywrap_tf_session.TF_DeleteDeviceList(found)


class ReductionOverHosts(tf.distribute.ReductionToOneDevice):
    """Adds what replicas have, and what those of other hosts have."""

    def __init__(self, hosts: int, add: Callable[[Sequence[tf.Tensor]], tf.Tensor]):
        """Takes the number of hosts, and what adds the replicas' values."""
        super().__init__(accumulation_fn=add)
        self._hosts = hosts

    @property
    def _num_between_graph_workers(self):
        # With 1, the value of a single replica would be the sum.
        return self._hosts


def nccl_sums(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sum of tensors on different GPUs, on each of these GPUs."""
    return nccl_ops.all_sum(tensors)


def own_devices() -> list[str]:
    """Returns the names of this process's logical devices, not those of a cluster."""
    ctx = context.context()
    names = [device.name for device in tf.config.list_logical_devices()]
    server = ctx._collective_ops_server_def
    if server is None:
        return names
    own = f"/job:{server.job_name}/replica:0/task:{server.task_index}/"
    return [name for name in names if name.startswith(own)]


def is_initialized() -> bool:
    """Tells whether TensorFlow has its devices, so that it can join no cluster."""
    return context.context()._initialized


def random_seed() -> int | None:
    """Returns what `tf.random.set_seed` was told last, if anything."""
    return context.global_seed()


def join_cluster(addresses: Sequence[str], index: int, heartbeat_s: float) -> None:
    """Joins a cluster, and waits until all have; TensorFlow is initialised then.

    The tasks run collectives together. None places operations on another one's devices.

    Args:
        addresses: Of the server of each task, as "name:port".
        index: Which of them this process is.
        heartbeat_s: A task that is silent for so long is taken for dead.
    """
    ctx, leader = context.context(), f"/job:{_JOB}/replica:0/task:0"
    service = context.coordination_config_pb2
    job = service.CoordinatedJob(name=_JOB, num_tasks=len(addresses))
    ctx.configure_collective_ops(
        collective_leader=leader,
        scoped_allocator_enabled_ops=(),
        device_filters=(f"/job:{_JOB}/task:{index}",),
    )
    ctx.configure_coordination_service(
        "standalone",
        service_leader=leader,
        heartbeat_timeout_in_ms=int(1000 * heartbeat_s),
        coordinated_jobs=[job],
    )
    server = tf.train.ServerDef(
        job_name=_JOB,
        task_index=index,
        protocol="grpc",
        default_session_config=ctx.config,
    )
    tasks = server.cluster.job.add(name=_JOB).tasks
    tasks.update(enumerate(addresses))
    ctx.enable_collective_ops(server)
    ctx.ensure_initialized()


def collective_sum(
    tensor: tf.Tensor, tasks: int, key: tf.Tensor | int, after: tf.Tensor
) -> tf.Tensor:
    """Adds a tensor over the tasks of a cluster; all of them get the same bits.

    Args:
        tensor: Of the same type and shape everywhere: float16, bfloat16, float32,
            float64, int32 or int64. It is in the host's memory.
        tasks: Number of tasks.
        key: An int32 that belongs to one type and one shape for ever.
        after: A resource: sums that have the same one run one after another.
    """
    return tf.raw_ops.CollectiveReduceV2(
        input=tensor,
        group_size=tasks,
        group_key=1,
        instance_key=key,
        ordering_token=[after],
        merge_op="Add",
        final_op="Id",
        communication_hint="ring",
        # By default the ring sends the whole tensor from one task to the next.
        max_subdivs_per_device=8,
    )


def write_key(key: str, value: str) -> None:
    """Writes a value for the other tasks of the cluster to read, once for each key."""
    context.context().set_config_key_value(key, value)


def read_key(key: str, timeout_s: float) -> str:
    """Waits for a value of `write_key`; raises a `tf.errors.OpError` if none comes."""
    value = context.context().get_config_key_value(key, int(1000 * timeout_s))
    return value.decode() if isinstance(value, bytes) else value


def wait_for_all(name: str, timeout_s: float) -> None:
    """Waits until all tasks of the cluster do, once for each name."""
    context.context().wait_at_barrier(name, int(1000 * timeout_s))


def is_collective_error(error: BaseException) -> bool:
    """Tells whether TensorFlow raises it where another task has failed."""
    kinds = (
        *(tf.errors.UnavailableError, tf.errors.AbortedError),
        *(tf.errors.DeadlineExceededError, tf.errors.CancelledError),
        *(tf.errors.InternalError, tf.errors.FailedPreconditionError),
    )
    return isinstance(error, kinds)


def abort_collectives(message: str) -> None:
    """Ends this task's collectives with a message; may be called from any thread."""
    context.context().abort_collective_ops(tf.errors.ABORTED, message)
