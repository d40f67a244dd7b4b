"""Places the variables of a model: finds their home, makes the plan, and moves them."""

import keras

from towers.collectives.world import World
from towers.devices.names import HOST, is_gpu
from towers.devices.resolved import resolve
from towers.keras_adapter.models import already, before_training
from towers.layers import tables, variables
from towers.layers.pipeline import LayerPlacement, Pipeline
from towers.model.options import CPU, GPU, Config, Layout, Replicated, Sharded
from towers.plan import Plan
from towers.program.features import feature


def pipeline_of(model: keras.Model, config: Config) -> Pipeline:
    """Returns how the devices of a tower share a model, as a `Pipeline`.

    Raises:
        ValueError: A layer has no stage, or a stage no layer.
    """
    stages = config.stages
    apart = {} if config.tables == "none" else {"apart": tables.of}
    placement = LayerPlacement(model, stages.count, stages.placement, **apart)
    pipeline = Pipeline(
        stages.count,
        config.micro_batches,
        stages.schedule,
        config.recompute,
        placement,
    )
    if model.built:
        # Raises if the placement does not fit the model.
        _ = pipeline.layers
    return pipeline


def find_home(model: keras.Model, config: Config, layout: Layout) -> str | None:
    """Returns the device of the variables; `None` for that of any layout's first tower.

    Raises:
        ValueError: The device does not exist, or cannot hold the variables.
    """
    first, device = layout.firsts[0], config.device
    if isinstance(config.variable_update, Replicated | Sharded):
        if config.cpu_relocation and first != HOST:
            raise ValueError(
                "Received cpu_relocation=True with variable_update="
                f"'{config.variable_update.name}', where the variables are on the "
                "towers; expected one of them, so leave cpu_relocation out."
            )
        return None
    if device == GPU or (device is None and config.stages.count > 1):
        return None
    if device is None:
        device = _present_home(model, first)
    elif device == CPU:
        device = HOST
    (home,) = resolve([device], "device")
    return None if is_gpu(home) and home == first else home


def plan_of(
    config: Config,
    pipeline: Pipeline,
    layout: Layout,
    home: str | None,
    hosts: World,
) -> Plan:
    """Makes the plan for a layout.

    Args:
        config: The options.
        pipeline: How the devices of a tower share the model.
        layout: The towers of this host.
        home: The device of the variables; `None` for that of the first tower.
        hosts: The hosts that train together.
    """
    first = layout.firsts[0]
    on_towers = home is None or home == first
    homes = layout.towers[0] if on_towers else (home,) * pipeline.stages
    merges = None
    if config.merges_on_cpu is False:
        merges = layout.towers[0]
    elif config.merges_on_cpu and is_gpu(home or first):
        merges = (HOST,) * pipeline.stages
    return Plan.of(
        layout.towers,
        layout.split_ratios,
        homes,
        merges,
        config.variable_update.packed,
        hosts,
        pipeline,
    )


def place(model: keras.Model, plan: Plan, config: Config, copied: bool) -> None:
    """Moves the variables of a model to the devices of a plan.

    Args:
        model: The model.
        plan: The plan.
        config: The options.
        copied: Whether each tower has a copy.
    """
    way = config.tables
    if config.divides_variables:
        # Keras's own loop needs whole variables.
        before_training(model, lambda: tables.bring_home(model, plan.home_of))
    bring_home(model, plan, config)
    if way != "none" and model.built:
        divided = ()
        if plan.hosts.count > 1:
            # Before other variables move, as a table may not fit on their device.
            divided = feature("collectives.spread.tables").divide(model, plan, way)
        stage_places = plan.places_of(copied)
        placed = tables.layout(
            model, plan.table_devices, way, stage_places, apart=divided
        )
        with variables.replacing(model):
            tables.put(placed, None)
    variables.move(model, plan.home_of)


def bring_home(model: keras.Model, plan: Plan, config: Config) -> None:
    """Joins variables in parts, unless this configuration divides variables.

    Another `TowerModel` of the same variables may have cut them.
    """
    if not config.divides_variables:
        tables.bring_home(model, plan.home_of)


def _present_home(model, first):
    """Returns the device of a model's variables, or of those it will create."""
    if own := already(model, "trainable_variables") or already(model, "variables"):
        return own[0].value.device
    return first if is_gpu(first) else HOST
