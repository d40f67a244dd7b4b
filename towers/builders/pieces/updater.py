"""Applies the optimizer: at home, to each copy of the variables, or part by part."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.builders.context import Context
from towers.builders.pieces.copies import Copies
from towers.collectives import packing, placing, reduce
from towers.collectives.parts import part_of, whole_of
from towers.devices.names import HOST
from towers.keras_adapter import optimizers
from towers.keras_adapter.patching import patched
from towers.layers import fused, sharded
from towers.tower.errors import ModelError


@dataclasses.dataclass
class Updater:
    """Applies the optimizer to the model's variables, and to their copies, if any."""

    context: Context
    copies: Copies

    def update_weights(self, sums: Sequence[Sequence[reduce.Gradient]]) -> None:
        """Applies the optimizer, with the summed gradients for each copy."""
        _check_some(self.context.model, sums[:1])
        update = functools.partial(
            _apply, self.context, self.context.model.trainable_variables
        )
        plan = self.context.plan
        with placing.updates(plan.home, plan.pipeline.stages), tf.name_scope("apply"):
            update(sums[0])
        self.copies.update([functools.partial(update, each) for each in sums[1:]])


@dataclasses.dataclass
class ShardedUpdater:
    """Has each owner update its part of the parameters, and send it to the others.

    The first stage of ZeRO (Rajbhandari et al. 2020).
    """

    context: Context
    copies: Copies

    def update_weights(self, sums: Sequence[Sequence[reduce.Gradient]]) -> None:
        """Applies the optimizer, with the sums of what each copy's tower owns."""
        shards, model = self.copies.shards, self.context.model
        _check_some(model, [[*shards.with_gradients], *sums])
        copies = [self._by_target(self.copies.of_tower(k)) for k in range(len(sums))]
        values = [tf.convert_to_tensor(each.value) for each in shards.shared]
        with self._looking_at_all(sums, copies):
            updated = []
            for k, owner in enumerate(shards.owners):
                with tf.device(owner.device), tf.name_scope(f"apply_{k}"):
                    if k > 0:
                        _assign(shards.scalars(k), values)
                    mine = sums[owner.copy], copies[owner.copy]
                    updated.append(self._update(k, owner, *mine))
        self._share(updated)
        with tf.name_scope("gather"):
            if shards.across_hosts:
                self._gather_over_hosts(copies)
            else:
                self._gather(sums, copies)

    def _by_target(self, copy):
        variables = self.context.model.trainable_variables
        each = zip(copy, variables, strict=True)
        return [mine for mine, variable in each for _ in sharded.targets([variable])]

    def _update(self, k, owner, gradients, copy):
        """Updates an owner's part; returns the ids of optimizers that did something."""
        shards, model = self.copies.shards, self.context.model
        variables, optimizer = shards.targets, model.optimizer
        for i in owner.owned:
            if (cut := shards.slice_of(i, owner.copy)) is not None:
                cut.assign(part_of(copy[i], shards.parts[i][owner.copy]))
        leaves = {i: self._leaf(i) for i in owner.owned}
        some = {id(leaves[i]) for i in leaves if gradients[i] is not None}
        idle = [i for i in leaves if id(leaves[i]) not in some]
        averages = [optimizers.average(leaves[i], variables[i]) for i in idle]
        chosen = [i for i in leaves if i not in idle]
        with shards.behind(k, copy):
            for i, average in zip(idle, averages, strict=True):
                if average is not None:
                    # Nobody else keeps it, and the variable stays as it is.
                    average.assign(variables[i])
            if chosen:
                # A table's shards have a gradient each.
                of_chosen = {id(variables[i]): variables[i] for i in chosen}.values()
                of_chosen = [*of_chosen]
                only = optimizers.updating_only(optimizer, {*map(id, of_chosen)})
                # For tables, each device sees to that.
                with only if owner.others else contextlib.nullcontext():
                    _apply(self.context, of_chosen, [gradients[i] for i in chosen])
        return some

    def _leaf(self, i):
        """The optimizer that updates a trainable variable."""
        target = self.copies.shards.targets[i]
        return optimizers.updating_one(self.context.model.optimizer, target)

    @contextlib.contextmanager
    def _looking_at_all(self, sums, copies):
        """Inside, what an optimizer makes of all gradients is made of those of all."""
        optimizer, patches = self.context.model.optimizer, []
        norms = {
            id(leaf): self._norm(leaf, sums, copies)
            for leaf in optimizers.updating(optimizer)
            if leaf.global_clipnorm
        }

        def clip(keras_clip, leaf, gradients):
            if (norm := norms.get(id(leaf))) is None:
                return keras_clip(leaf, gradients)
            with patched(optimizers.GLOBAL_NORM, lambda *_: norm):
                return keras_clip(leaf, gradients)

        if norms:
            patches.append(patched(optimizers.CLIP_GRADIENTS, clip))
            patches.append(sharded.clipping_by(norms))
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            finite = self._finite(optimizer, sums)
            patches.append(patched(optimizers.CHECK_FINITE, lambda *_: finite))
        with contextlib.ExitStack() as stack:
            for each in patches:
                stack.enter_context(each)
            yield

    def _finite(self, optimizer, sums):
        """Whether all gradients are finite, each looked at where it is."""
        found = []
        for owner in self.copies.shards.owners:
            mine = [self._where_it_is(sums[owner.copy][i], i) for i in owner.owned]
            with tf.device(owner.device):
                mine = [gradient for gradient in mine if gradient is not None]
                found += [optimizer.check_finite(mine)] if mine else []
        with tf.device(HOST):
            bad = tf.cast(~tf.reduce_all(found or [True]), tf.float32)
            bad = self.context.plan.hosts.all_reduce(
                bad, "whether gradients are finite"
            )
            return tf.equal(bad, 0)

    def _where_it_is(self, gradient, i):
        """A gradient, or for a shard's, which lies elsewhere, its norm."""
        cut = sharded.of(self.copies.shards.targets[i]) is not None
        return sharded.norm(gradient) if cut else gradient

    def _norm(self, leaf, sums, copies):
        """The norm of all gradients that an optimizer is about to clip."""
        model = self.context.model
        scale, squares = optimizers.loss_scale(model.optimizer), []
        for k, owner in enumerate(self.copies.shards.owners):
            if not owner.others and self.context.plan.hosts.index > 0:
                continue  # Each host has all tables, and the first one counts them.
            mine = {
                i: self._where_it_is(sums[owner.copy][i], i)
                for i in owner.owned
                if self._leaf(i) is leaf and not self._is_overwritten(i)
            }
            found = []
            for i, gradient in mine.items():
                if gradient is None:
                    continue
                target = self.copies.shards.targets[i]
                kept, steps = optimizers.accumulated(leaf, target)
                with (
                    tf.device(owner.device),
                    self.copies.shards.behind(k, copies[owner.copy]),
                ):
                    if scale is not None:
                        gradient = keras.ops.divide(gradient, scale)
                    if kept is not None:
                        gradient = (gradient + kept) / steps
                    found.append(gradient)
            with tf.device(owner.device):
                squares += [tf.square(optimizers.global_norm(found))] if found else []
        with tf.device(HOST):
            total = tf.add_n(squares) if squares else tf.zeros([])
            return tf.sqrt(
                self.context.plan.hosts.all_reduce(total, "squares of gradients")
            )

    def _is_overwritten(self, i):
        return self.copies.shards.targets[i].overwrite_with_gradient

    def _share(self, updated):
        """Gives the optimizer what others made of its scalars, if it did nothing.

        That is so where the first owner has no part that has a gradient.
        """
        shards, optimizer = self.copies.shards, self.context.model.optimizer
        leaves = optimizers.updating(optimizer)
        of_leaves = {
            id(variable): {id(leaf)}
            for leaf in leaves
            for variable in optimizers.all_variables(leaf)
        }
        every = set().union(*updated)
        for n, variable in enumerate(shards.shared):
            using = of_leaves.get(id(variable), every)
            owners = [k for k, did in enumerate(updated) if did & using]
            if owners and owners[0] > 0:
                variable.value.assign(shards.scalars(owners[0])[n])
        if shards.across_hosts:
            self._share_over_hosts(of_leaves)

    def _share_over_hosts(self, of_leaves):
        """Gives the scalars of another host to those whose towers did nothing."""
        shards, hosts = self.copies.shards, self.context.plan.hosts
        did = [
            {
                id(self._leaf(i))
                for i in shards.with_gradients
                if shards.parts_of_hosts[i][k]
            }
            for k in range(hosts.count)
        ]
        every, given = set().union(*did), []
        for variable in shards.shared:
            using = of_leaves.get(id(variable), every)
            who = [k for k, leaves in enumerate(did) if leaves & using]
            if who and len(who) < hosts.count:
                given.append((variable, who[0]))
        values = [
            variable.value if k == hosts.index else tf.zeros_like(variable.value)
            for variable, k in given
        ]
        values = hosts.all_reduce(values, "scalars of the optimizer") if values else ()
        for (variable, _), value in zip(given, values, strict=True):
            variable.value.assign(value)

    def _gather_over_hosts(self, copies):
        """Sends what the owners of each host have updated to all copies of all."""
        shards, plan, mine = self.copies.shards, self.context.plan, []
        changed = sorted(shards.with_gradients)
        like = [[] for _ in range(plan.hosts.count)]
        for i in changed:
            dtype = copies[0][i].dtype
            for of_host, parts in zip(like, shards.parts_of_hosts[i], strict=True):
                of_host += [tf.TensorSpec(part.shape, dtype) for part in parts]
            for copy, part in shards.parts[i].items():
                cut = shards.slice_of(i, copy)
                value = tf.convert_to_tensor(copies[copy][i] if cut is None else cut)
                mine.append(tf.ensure_shape(value, part.shape))
                if cut is not None:
                    cut.assign(tf.zeros([0, *cut.shape[1:]], cut.dtype))
        every = plan.hosts.gather_parts(mine, like, "updated parameters")
        every, wholes = [*map(iter, every)], {}
        with tf.device(HOST):
            for i in changed:
                parts = [
                    next(received)
                    for received, of_host in zip(
                        every, shards.parts_of_hosts[i], strict=True
                    )
                    for _ in of_host
                ]
                wholes[i] = whole_of(parts, copies[0][i].shape)
        for places, devices in shards.stages:
            places = [i for i in places if i in wholes]
            values = [wholes[i] for i in places]
            packs = any(map(plan.packs, devices))
            with tf.device(HOST):
                buffers = packing.pack(values) if packs else []
            for copy, device in zip(copies, devices, strict=True):
                with tf.device(device):
                    got = packing.unpack(buffers, values) if packs else values
                    for i, value in zip(places, got, strict=True):
                        copy[i].assign(value)

    def _gather(self, sums, copies):
        """Sends what each owner has updated to the other copies."""
        shards, plan = self.copies.shards, self.context.plan
        received = collections.defaultdict(dict)
        for owner in shards.owners:
            if not owner.others:
                continue  # Tables stay where they are.
            places = [i for i in owner.owned if sums[owner.copy][i] is not None]
            cuts = [shards.slice_of(i, owner.copy) for i in places]
            with tf.device(owner.device):
                values = []
                for i, cut in zip(places, cuts, strict=True):
                    value = copies[owner.copy][i] if cut is None else cut
                    values.append(tf.convert_to_tensor(value))
                    values[-1].set_shape(shards.parts[i][owner.copy].shape)
                packs = any(map(plan.packs, owner.others))
                buffers = packing.pack(values) if packs else []
                for cut in cuts:
                    if cut is not None:
                        cut.assign(tf.zeros([0, *cut.shape[1:]], cut.dtype))
            for copy, device in enumerate(owner.others):
                with tf.device(device):
                    got = values
                    if packs and copy != owner.copy:
                        got = packing.unpack(buffers, values)
                for i, value in zip(places, got, strict=True):
                    received[copy, device, i][owner.copy] = value
        for (copy, device, i), parts in received.items():
            if [*shards.parts[i]] != [copy]:
                target = copies[copy][i]
                with tf.device(device):
                    in_order = [parts[owner] for owner in shards.parts[i]]
                    target.assign(whole_of(in_order, target.shape))


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _check_some(model, sums):
    if all(gradient is None for each in sums for gradient in each):
        raise ModelError(
            f"No variable of model '{model.name}' has a gradient; expected a loss "
            "that depends on one, so look for integers, argmax or stop_gradient "
            "between the variables and the outputs."
        )


def _apply(context, variables, gradients):
    """Applies the model's optimizer where it is called."""

    def update(gradients):
        with fused.updates():
            sharded.apply(context.model.optimizer, gradients, variables)

    # XLA compiles for one device.
    wanted = context.xla or context.compiles_update
    wanted = wanted and not sharded.devices(variables)
    if wanted and (context.xla or _may_compile(context, gradients)):
        update = tf.function(update, autograph=False, jit_compile=True)
    update(gradients)


def _may_compile(context, gradients):
    """Whether XLA may compile an update that nobody asked it for."""
    sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    if sparse:
        line = (
            f"XLA does not compile the update of model '{context.model.name}', as it "
            "would do so anew for each size of its sparse gradients."
        )
        context.say([line])
    return not sparse
