"""The conformance kit finds what it should: methods with one planted fault each, and the rule that must fail.

The faults are of the kinds that other caches have shown in public, see docs/design/cases.md.
"""

import importlib.util
import sys
from pathlib import Path

import attrs
import mlx.core as mx
import pytest

from veloxquant import ByteCount
from veloxquant import PositionedRows
from veloxquant import Snapshot
from veloxquant import VeloxQuantError
from veloxquant import hookimpl
from veloxquant import safefile
from veloxquant import store
from veloxquant.attention import attention
from veloxquant.batch import BatchLayerCache
from veloxquant.batch import MergeableLayerCache
from veloxquant.cache import LayerCache
from veloxquant.registry import Registry
from veloxquant.testing import check_method
from veloxquant.testing import rule_names
from veloxquant.testing.rules import rewinds
from veloxquant.threads import threads_compute


def _toys():
    # Test folders are no packages, so a plain import would not find a sibling.
    spec = importlib.util.spec_from_file_location("core_test_kit_toys", Path(__file__).with_name("kit_toys.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


toys = _toys()
Keeper, KeeperState, Rounder, RounderRows = toys.Keeper, toys.KeeperState, toys.Rounder, toys.RounderRows
Streamer = toys.Streamer
FAULTS = {}
DENSE = {"budget": 10**6}


def caught_by(*rules):
    """Say which rules must fail for a faulty method."""

    def add(kind):
        FAULTS[kind.__name__] = (kind, rules)
        return kind

    return add


def check(kind, rules=None):
    registry = Registry(entry_points=[], blocked=[])
    dense = DENSE if issubclass(kind, Keeper) else None
    return {one.rule: one for one in check_method(kind(), dense_config=dense, registry=registry, rules=rules)}


# ------------------------------------------------------------------ positions and counts


@caught_by("trim_forgets")
class PositionsAreRowNumbers(Keeper):
    def place(self, state, count, heads):
        new = mx.broadcast_to(mx.arange(state.count, state.count + count, dtype=mx.int32), (*heads, count))
        state.positions = toys.joined(state.positions, new)
        state.seen += count


@caught_by("mask_array_fits", "held_rows_first")
class ReportsTokensAsRows(Keeper):
    def account(self, state):
        return attrs.evolve(super().account(state), rows=state.seen)


@caught_by("counts_are_tokens")
class CountsRowsOfAllHeads(Keeper):
    def account(self, state):
        heads = 1 if state.keys is None else state.keys.shape[0] * state.keys.shape[1]
        return attrs.evolve(super().account(state), rows=state.count * heads)


@caught_by("eviction_declared")
class EvictsWithoutSayingSo(Keeper):
    evicts = False


# ------------------------------------------------------------------ what is returned


@caught_by("own_rows_exact", "first_block_exact")
class EvictsBeforeReturning(Keeper):
    def prompt_rows(self, state, keys, values):
        super().prompt_rows(state, keys, values)
        if state.layer.routed and state.count > state.config.budget:
            # The queries have not come yet.
            queries, state.queries = state.queries, keys
            self.evict(state, state.config.budget)
            state.queries = queries
        return state.keys, state.values


@caught_by("prompt_attended_whole")
class EvictsBeforeThePromptIsAttended(Keeper):
    def prompt_rows(self, state, keys, values):
        if state.count > state.config.budget and state.queries is not None:
            self.evict(state, state.config.budget)
        return super().prompt_rows(state, keys, values)


@caught_by("own_rows_exact")
class QuantizesTheRowsJustReturned(Keeper):
    def later_rows(self, state, keys, values):
        return super().later_rows(state, mx.round(keys * 8) / 8, mx.round(values * 8) / 8)


@caught_by("dtype_kept")
class ReturnsHalfPrecision(Keeper):
    def store(self, state, keys, values):
        return tuple(rows.astype(mx.float16) for rows in super().store(state, keys, values))


@caught_by("dtype_kept")
class PromotesToFullPrecision(Keeper):
    def store(self, state, keys, values):
        return super().store(state, keys * mx.array(1.0), values * mx.array(1.0))


@caught_by("half_precision")
class StoresFullPrecision(Keeper):
    def store(self, state, keys, values):
        result = super().store(state, keys.astype(mx.float32), values.astype(mx.float32))
        return tuple(rows.astype(keys.dtype) for rows in result)


@caught_by("results_final")
class EvictsInPlace(Keeper):
    def evict(self, state, budget):
        whole = state.keys
        super().evict(state, budget)
        whole[:, :, :budget] = state.keys


@caught_by("short_prompts")
class StoresPadding(Keeper):
    def later_rows(self, state, keys, values):
        return self.padded(state, *super().later_rows(state, keys, values))

    def prompt_rows(self, state, keys, values):
        return self.padded(state, *super().prompt_rows(state, keys, values))

    def padded(self, state, keys, values):
        missing = -state.count % 8
        if missing:
            self.store(state, mx.zeros_like(keys[:, :, :1]), mx.zeros_like(values[:, :, :1]))
        return keys, values


@caught_by("mask_array_honoured")
class IgnoresMaskArrays(Keeper):
    def attend(self, state, queries, keys, values, scale, mask, sinks):
        super().attend(state, queries, keys, values, scale, None, sinks)
        return attention(queries, keys, values, scale, "causal", sinks)


# ------------------------------------------------------------------ which rows are kept


@caught_by("budget_with_chunks", "chunk_parity")
class GivesEachChunkABudget(Keeper):
    def attend(self, state, queries, keys, values, scale, mask, sinks):
        result = super().attend(state, queries, keys, values, scale, mask, sinks)
        before = state.count - queries.shape[2]
        if state.collecting and queries.shape[2] > state.config.budget:
            self.evict(state, before + state.config.budget)
        return result

    def finish(self, state):
        state.collecting, state.queries = False, None


@caught_by("chunk_parity", "budget_with_chunks")
class TakesTheBudgetFromKeptRows(Keeper):
    def attend(self, state, queries, keys, values, scale, mask, sinks):
        result = super().attend(state, queries, keys, values, scale, mask, sinks)
        if state.collecting and queries.shape[2] > state.config.window:
            self.evict(state, max(20, state.count // 2))
        return result

    def finish(self, state):
        state.collecting, state.queries = False, None


@caught_by("chunk_parity")
class ForgetsTheQueriesOfEarlierChunks(Keeper):
    def observe(self, state, queries):
        if queries.shape[2] > 1:
            state.queries = None
        super().observe(state, queries)


@caught_by("newest_row_held")
class EvictsTheNewestRow(Keeper):
    def later_rows(self, state, keys, values):
        result = super().later_rows(state, keys, values)
        for name in ("keys", "values", "positions"):
            array = getattr(state, name)
            setattr(state, name, mx.concatenate([array[:, :, :-2], array[:, :, -1:]], axis=2))
        state.keys, state.values = result[0][:, :, : state.count], result[1][:, :, : state.count]
        return result


@caught_by("newest_row_held", "block_rows_held")
class DoesNotStoreDecodedRows(Keeper):
    def later_rows(self, state, keys, values):
        state.seen += keys.shape[2]
        return toys.joined(state.keys, keys), toys.joined(state.values, values)


@caught_by("sinks_held")
class DropsTheSinks(Keeper):
    def protected(self, state, votes):
        return mx.where(mx.arange(state.count) >= state.count - state.config.window, mx.inf, votes)


@caught_by("short_prompts")
class RoundsTheBudgetDownToNothing(Keeper):
    def budget(self, state):
        return int(state.seen * 0.2)

    def protected(self, state, votes):
        return votes


@caught_by("held_rows_in_order")
class KeepsRowsInTheOrderOfTheirVotes(Keeper):
    def evict(self, state, budget):
        self.take(state, mx.argsort(-self.protected(state, self.votes(state)), axis=-1)[..., :budget])


@caught_by("keys_fit_values")
class TakesValuesByAnotherHeadsChoice(Keeper):
    def evict(self, state, budget):
        values = state.values[:, ::-1]
        state.values = values
        super().evict(state, budget)
        state.values = state.values[:, ::-1]


@caught_by("keys_fit_values")
class TakesOtherValuesThoughItsKeysMayBeTurned(TakesValuesByAnotherHeadsChoice):
    @hookimpl
    def veloxquant_method(self):
        return attrs.evolve(super().veloxquant_method(), needs=("rope",))


@caught_by("batch_rows_independent")
class VotesForAllSequencesTogether(Keeper):
    def votes(self, state):
        votes = super().votes(state)
        return mx.broadcast_to(votes.sum(axis=0, keepdims=True), votes.shape)


@caught_by("first_token_alone")
class FreezesTheScaleOfTheFirstBlock(Rounder):
    class rows(RounderRows):
        first = None

        def scales(self, wide):
            if self.first is None:
                self.first = mx.abs(wide).max(axis=2, keepdims=True).max(axis=3, keepdims=True)
            return mx.broadcast_to(self.first, (*wide.shape[:3], 1))


@caught_by("streamed_like_prompt", "odd_lengths", "store_writes")
class SharesAScaleWithinEachCall(Rounder):
    class rows(RounderRows):
        def scales(self, wide):
            whole = mx.abs(wide).max(axis=(2, 3), keepdims=True)
            return mx.broadcast_to(whole, (*wide.shape[:3], 1))


# ------------------------------------------------------------------ while decoding


@caught_by("sinks_held")
class DropsTheSinksWhileDecoding(Streamer):
    def left(self, state):
        return mx.arange(state.count - state.config.budget, state.count)


@caught_by("newest_row_held")
class DropsTheNewestRowsWhileDecoding(Streamer):
    def left(self, state):
        left = super().left(state)
        return mx.where(left < state.config.sinks, left, left - 3)


@caught_by("block_rows_held", "newest_row_held")
class DropsRowsBehindTheirBlockWhileDecoding(Streamer):
    def later_rows(self, state, keys, values):
        result = super().later_rows(state, keys, values)
        if state.seen > 300:
            self.take(state, mx.broadcast_to(mx.arange(state.count - 1), (*keys.shape[:2], state.count - 1)))
        return result


@caught_by("held_rows_in_order")
class ReversesRowsWhileDecoding(Streamer):
    def left(self, state):
        return super().left(state)[::-1]


@caught_by("keys_fit_values")
class TakesOtherValuesWhileDecoding(Streamer):
    def drop(self, state):
        values, due = state.values, self.due(state)
        super().drop(state)
        if due:
            state.values = values[:, :, -state.count :]


@caught_by("long_rewind")
class CountsPositionsOneTooHighWhileDecoding(Streamer):
    ERROR = 1

    def drop(self, state):
        due = self.due(state)
        super().drop(state)
        if due:
            state.positions = state.positions + self.ERROR


@caught_by("long_rewind")
class CountsPositionsOneTooLowWhileDecoding(CountsPositionsOneTooHighWhileDecoding):
    ERROR = -1


@caught_by("long_rewind")
class RefusesARewindOverAnEvictionWhileDecoding(Streamer):
    def rewind(self, state, count):
        if state.count - count < state.config.budget and state.seen > 300:
            raise VeloxQuantError("streamer cannot rewind that far")
        super().rewind(state, count)


@caught_by("no_host_sync")
class EvaluatesWhileDecoding(Streamer):
    def drop(self, state):
        due = self.due(state)
        super().drop(state)
        if due:
            mx.eval(state.positions)


@caught_by("no_host_sync")
class ReadsPositionsBackWhileDecoding(Streamer):
    def drop(self, state):
        if self.due(state) and state.positions.max().item() > 0:
            super().drop(state)


# ------------------------------------------------------------------ later prompts


@caught_by("later_prompt_evicts")
class TakesALaterPromptForAnAnswer(Keeper):
    def finish(self, state):
        if state.positions.shape[2] == state.seen:
            super().finish(state)
        state.collecting, state.queries = False, None


@caught_by("later_prompt_whole", "later_prompt_stored")
class EvictsAfterTheFirstPartOfALaterPrompt(Keeper):
    def attend(self, state, queries, keys, values, scale, mask, sinks):
        result = super().attend(state, queries, keys, values, scale, mask, sinks)
        if state.collecting and state.count < state.seen and state.count > state.config.budget:
            self.evict(state, state.config.budget)
        return result


@caught_by("later_prompt_whole", "later_prompt_stored")
class EvictsWithinALaterPromptAsWhileDecoding(Streamer):
    def due(self, state):
        return state.count < state.seen and state.count >= state.config.budget + self.SPARE


@caught_by("later_prompt_stored")
class VotesWithTheFirstPartOfALaterPrompt(Keeper):
    def observe(self, state, queries):
        if state.queries is None or state.count == state.seen:
            super().observe(state, queries)


@caught_by("sinks_held")
class DropsTheSinksInALaterPrompt(Keeper):
    def protected(self, state, votes):
        if state.count == state.seen:
            return super().protected(state, votes)
        return mx.where(mx.arange(state.count) >= state.count - state.config.window, mx.inf, -votes)


# ------------------------------------------------------------------ attention


@caught_by("scale_honoured", "attention_exact")
class AttendsWithAScaleOfItsOwn(Keeper):
    def attend(self, state, queries, keys, values, scale, mask, sinks):
        super().attend(state, queries, keys, values, scale, mask, sinks)
        return attention(queries, keys, values, queries.shape[3] ** -0.5, mask, sinks)


@caught_by("sinks_honoured", "attention_exact")
class IgnoresSinkLogits(Keeper):
    def attend(self, state, queries, keys, values, scale, mask, sinks):
        super().attend(state, queries, keys, values, scale, mask, sinks)
        return attention(queries, keys, values, scale, mask, None)


@caught_by("sinks_honoured", "attention_exact")
class TakesSinkLogitsOfAnotherHead(Keeper):
    def attend(self, state, queries, keys, values, scale, mask, sinks):
        super().attend(state, queries, keys, values, scale, mask, sinks)
        return attention(queries, keys, values, scale, mask, None if sinks is None else sinks[::-1])


@caught_by("block_causal", "attention_exact")
class LooksAheadInShortBlocks(Keeper):
    def attend(self, state, queries, keys, values, scale, mask, sinks):
        super().attend(state, queries, keys, values, scale, mask, sinks)
        return attention(queries, keys, values, scale, mask if state.collecting else None, sinks)


@caught_by("attention_exact")
class AttendsToTheLatestRowsOnly(Keeper):
    def attend(self, state, queries, keys, values, scale, mask, sinks):
        super().attend(state, queries, keys, values, scale, mask, sinks)
        if state.collecting:
            return None
        return attention(queries, keys[:, :, -20:], values[:, :, -20:], scale, mask, sinks)


# ------------------------------------------------------------------ other layers


@caught_by("layers_alike")
class KeepsFewerRowsInLaterLayers(Keeper):
    def budget(self, state):
        return state.config.budget - 8 * (state.layer.index > 0)


@caught_by("layers_alike")
class KeepsOtherRowsInLaterLayers(Keeper):
    def votes(self, state):
        return super().votes(state) if state.layer.index == 0 else -super().votes(state)


@caught_by("newest_row_held")
class StoresNoDecodedRowsInLaterLayers(Keeper):
    def later_rows(self, state, keys, values):
        if state.layer.index == 0:
            return super().later_rows(state, keys, values)
        state.seen += keys.shape[2]
        return toys.joined(state.keys, keys), toys.joined(state.values, values)


@caught_by("own_rows_exact", "first_block_exact")
class RoundsWhatItReturnsInLaterLayers(Rounder):
    class rounded(RounderRows):
        lossless = True

    @hookimpl
    def veloxquant_create(self, config, layer):
        rows = self.rounded if layer.index else self.rows
        return PositionedRows(rows(config.levels))


# ------------------------------------------------------------------ rewinds


@caught_by("trim_count")
class ReturnsNothingFromTrim(Keeper):
    @hookimpl
    def veloxquant_trim(self, state, count):
        self.rewind(state, count)


@caught_by("trim_count")
class ReturnsTheRowsDroppedFromTrim(Keeper):
    @hookimpl
    def veloxquant_trim(self, state, count):
        before = state.count
        self.rewind(state, count)
        return before - state.count


@caught_by("trim_forgets", "deep_rewind")
class MovesOnlyACounter(Keeper):
    def rewind(self, state, count):
        state.seen -= count


@caught_by("trim_forgets")
class FinishesAgainInTrim(Keeper):
    def rewind(self, state, count):
        super().rewind(state, count)
        if not state.collecting and state.count > state.config.budget - 4:
            state.queries = state.keys[:, :, -state.config.window :]
            self.evict(state, state.config.budget - 4)
            state.queries = None


@caught_by("deep_rewind")
class RefusesADeepRewindAfterDroppingRows(Keeper):
    def rewind(self, state, count):
        super().rewind(state, count)
        if state.ragged:
            raise VeloxQuantError("keeper cannot rewind into the evicted prompt")


@caught_by("deep_rewind")
class HidesRewoundRowsBehindHugeKeys(Keeper):
    def attend(self, state, queries, keys, values, scale, mask, sinks):
        if state.collecting:
            self.observe(state, queries)
        dead = (state.positions < 0)[..., None]
        return attention(queries, mx.where(dead, -1e5, keys).astype(keys.dtype), values, scale, "causal", sinks)


@attrs.define(eq=False)
class StateWithNorm(KeeperState):
    norm: mx.array | None = None


@caught_by("trim_state")
class KeepsForgottenTokensInASummary(Keeper):
    state = StateWithNorm

    def store(self, state, keys, values):
        total = mx.abs(keys.astype(mx.float32)).sum(axis=(2, 3))
        state.norm = total if state.norm is None else state.norm + total
        return super().store(state, keys, values)

    def account(self, state):
        count = super().account(state)
        return attrs.evolve(count, auxiliary=count.auxiliary + (0 if state.norm is None else state.norm.nbytes))

    def serialize(self, state):
        snapshot = super().serialize(state)
        return snapshot if state.norm is None else Snapshot({**snapshot.arrays, "norm": state.norm}, snapshot.values)


@caught_by("trim_in_prompt")
class KeepsTheQueriesOfForgottenTokens(Keeper):
    def rewind(self, state, count):
        queries = state.queries
        super().rewind(state, count)
        state.queries = queries


class Stepper(Keeper):
    """Takes a token of all sequences in one call."""

    @hookimpl
    def veloxquant_step(self, states, queries, keys, values, scale, sinks):
        outputs = []
        for place, state in enumerate(states):
            own = [array[place : place + 1] for array in (queries, keys, values)]
            result = self.store(self.chosen(states, state), *own[1:])
            output = self.attend(state, own[0], *result, scale, None, sinks)
            outputs.append(attention(own[0], *result, scale, None, sinks) if output is None else output)
        return mx.concatenate(outputs)

    def chosen(self, states, state):
        return state


def test_a_token_of_several_sequences_may_be_taken_at_once():
    outcomes = {one.outcome for one in check(Stepper).values()}
    assert "failed" not in outcomes


@caught_by("batch_steps", "batch_join_and_leave")
class StepsOneSequenceForAll(Stepper):
    def chosen(self, states, state):
        return states[0]


# ------------------------------------------------------------------ copies and states


@attrs.define(eq=False)
class StateThatIsItsOwnCopy(KeeperState):
    def __deepcopy__(self, memo):
        return self


@caught_by("deepcopy_independent")
class SharesTheStateBetweenCopies(Keeper):
    state = StateThatIsItsOwnCopy


@caught_by("dropped_caches_freed")
class KeepsEveryStateInAGlobal(Keeper):
    states = ()

    @hookimpl
    def veloxquant_create(self, config, layer):
        type(self).states += (self.state(config, layer),)
        return self.states[-1]


@caught_by("dropped_caches_freed")
class KeepsEveryRestoredStateToo(Keeper):
    @attrs.define(eq=False)
    class state(KeeperState):
        made = ()

        def __attrs_post_init__(self):
            type(self).made += (self,)


@attrs.define(eq=False)
class StateWithDtype(KeeperState):
    dtype: mx.Dtype | None = mx.float32


@caught_by("deepcopy_independent", "deepcopy_memory")
class StoresAnMLXDtype(Keeper):
    state = StateWithDtype


@caught_by("interleaved")
class KeepsQueriesInAGlobal(Keeper):
    latest = None

    def observe(self, state, queries):
        if state.queries is None:
            self.latest = None
        state.queries = self.latest
        super().observe(state, queries)
        self.latest = state.queries


@caught_by("handover")
class SaysThatEveryStepReadsAll(Keeper):
    @hookimpl
    def veloxquant_unread(self, state):
        return []


@caught_by("restored_goes_on")
class SnapshotMissesTheQueries(Keeper):
    def serialize(self, state):
        snapshot = super().serialize(state)
        return Snapshot({n: a for n, a in snapshot.arrays.items() if n != "queries"}, snapshot.values)


@caught_by("restored_goes_on")
class SnapshotMissesTheTokensSeen(Keeper):
    def serialize(self, state):
        snapshot = super().serialize(state)
        return Snapshot(snapshot.arrays, {n: v for n, v in snapshot.values.items() if n != "seen"})


@caught_by("state_final")
class RestoreKeepsAReference(Keeper):
    def restore(self, config, layer, snapshot):
        return self.state(config, layer, **snapshot.arrays, **snapshot.values)

    def store(self, state, keys, values):
        if state.positions is not None:
            state.positions += 0 * state.positions - (state.positions == 1)
        return super().store(state, keys, values)


@caught_by("state_flat")
class ChangesItsStateWhenSerialized(Keeper):
    def serialize(self, state):
        state.seen += 0 if state.keys is None else 1
        return super().serialize(state)


@attrs.frozen(kw_only=True)
class CarelessConfig(toys.KeeperConfig):
    budget: int = attrs.field(default=40, eq=False)


@caught_by("other_config_refused")
class AcceptsAFileOfOtherOptions(Keeper):
    config = CarelessConfig


@attrs.define(kw_only=True)
class ThawedConfig(toys.KeeperConfig.__base__):
    budget: int = 40
    window: int = 8
    sinks: int = 4


@caught_by("name")
class ConfigCanBeChanged(Keeper):
    config = ThawedConfig


# ------------------------------------------------------------------ bytes


@caught_by("bytes_held")
class BytesByFormula(Keeper):
    def account(self, state):
        if state.keys is None:
            return ByteCount(rows=0)
        size = state.keys.size * 2
        return ByteCount(keys=size, values=size, rows=state.count)


@attrs.define(eq=False)
class StateWithTotal(KeeperState):
    total: int = 0


@caught_by("bytes_held")
class AddsBytesAtEveryCall(Keeper):
    state = StateWithTotal

    def store(self, state, keys, values):
        state.total += keys.nbytes
        return super().store(state, keys, values)

    def account(self, state):
        return attrs.evolve(super().account(state), keys=state.total)


@caught_by("bytes_held", "store_bytes")
class ForgetsTheScalesInTheBytes(Rounder):
    class rows(RounderRows):
        def account(self):
            return ByteCount() if self.parts is None else ByteCount(keys=self.parts[0].nbytes, values=0)


@caught_by("queries_freed")
class NeverFreesTheQueries(Keeper):
    def finish(self, state):
        queries = state.queries
        super().finish(state)
        state.queries = queries


@caught_by("memory_held")
class KeepsAViewOfTheWholePrompt(Keeper):
    def evict(self, state, budget):
        for name in ("keys", "values", "positions"):
            whole = getattr(state, name)
            setattr(state, name, whole[:, :, -budget:])


@attrs.define(eq=False)
class StateWithSpareRows(KeeperState):
    spare: mx.array | None = None


@caught_by("spare_rows")
class HoldsHundredsOfSpareRows(Keeper):
    state = StateWithSpareRows

    def store(self, state, keys, values):
        state.spare = mx.zeros((*keys.shape[:2], 256, keys.shape[3]), keys.dtype)
        return super().store(state, keys, values)

    def account(self, state):
        count = super().account(state)
        return count if state.spare is None else attrs.evolve(count, keys=count.keys + state.spare.nbytes)


# ------------------------------------------------------------------ shapes and numbers


@caught_by("value_dim")
class TreatsValuesWithTheWidthOfKeys(Keeper):
    def store(self, state, keys, values):
        return super().store(state, keys, values.reshape(*keys.shape))


@caught_by("head_dims")
class NeedsHeadDimsOf64(Keeper):
    def store(self, state, keys, values):
        groups = keys.reshape(*keys.shape[:3], -1, min(64, keys.shape[3] // 8 * 8))
        return super().store(state, groups.reshape(keys.shape), values)

    def observe(self, state, queries):
        super().observe(state, queries.reshape(*queries.shape[:3], -1, 32).reshape(queries.shape))


@caught_by("query_groups")
class TakesOneQueryHeadForEachKVHead(Keeper):
    def votes(self, state):
        return (state.queries[:, :, -1:] @ state.keys.swapaxes(2, 3))[:, :, 0]


@caught_by("deterministic")
class BreaksTiesByChance(Keeper):
    def votes(self, state):
        votes = super().votes(state)
        return votes + mx.random.uniform(shape=votes.shape)


@caught_by("nan_visible")
class HidesNaN(Keeper):
    def store(self, state, keys, values):
        return super().store(state, mx.nan_to_num(keys), mx.nan_to_num(values))


@caught_by("extreme_values")
class SquaresInHalfPrecision(Rounder):
    class rows(RounderRows):
        def scales(self, wide):
            half = wide.astype(mx.float16)
            return mx.sqrt((half * half).sum(axis=-1, keepdims=True)).astype(mx.float32)


@caught_by("no_host_sync")
class ReadsAnArrayBack(Keeper):
    def later_rows(self, state, keys, values):
        if mx.isnan(keys).any().item():
            raise VeloxQuantError("a key is NaN")
        return super().later_rows(state, keys, values)


@caught_by("store_reads")
class GathersFromTheWrongHead(Rounder):
    class rows(RounderRows):
        def gather(self, index):
            return super().gather(mx.broadcast_to(index[:, :1], index.shape))


@caught_by("store_round_trip")
class LoadsByReference(Rounder):
    class rows(RounderRows):
        def load(self, arrays):
            super().load(arrays)
            self.parts = tuple(arrays.values()) or None

        def append(self, keys, values):
            if self.parts is not None:
                self.parts[1][...] = self.parts[1] * 2
            super().append(keys, values)


@caught_by("observers")
class BehavesDifferentlyWhenWatched(Keeper):
    @hookimpl
    def veloxquant_finish_prompt(self, state):
        if "pluggy" in sys._getframe(1).f_code.co_filename:
            state.config = attrs.evolve(state.config, budget=30)
        self.finish(state)


# ------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def clean():
    """What the whole kit says of the clean methods."""
    return {kind: check(kind) for kind in (Keeper, Rounder)}


def test_a_clean_method_that_evicts_while_decoding_passes_the_rules_that_find_faults_in_it():
    rules = {rule for kind, rules in FAULTS.values() if issubclass(kind, Streamer) for rule in rules}
    found = check(Streamer, rules | {"attention_exact", "deep_rewind", "prompt_end_once", "trim_forgets", "trim_state"})
    assert {name: one.message for name, one in found.items() if one.outcome != "passed"} == {}


@pytest.mark.parametrize("kind", [Keeper, Rounder])
def test_a_clean_method_passes_every_rule(clean, kind):
    assert list(clean[kind]) == rule_names()
    assert {name: one.message for name, one in clean[kind].items() if one.outcome == "failed"} == {}


def test_every_rule_that_needs_no_installation_applies_to_one_of_the_clean_methods(clean):
    applied = {name for found in clean.values() for name, one in found.items() if one.outcome != "not applicable"}
    elsewhere = {"from_state", "file_in_new_process"}
    assert set(rule_names()) - applied == elsewhere | (set() if threads_compute() else {"threads"})


@pytest.mark.parametrize(("kind", "rules"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found_by_name(kind, rules):
    found = check(kind, rules)
    assert {name: one.outcome for name, one in found.items()} == dict.fromkeys(rules, "failed")
    assert all(one.message for one in found.values())


def offset_is_rows(monkeypatch):
    whole = LayerCache.update_and_fetch

    def update_and_fetch(self, keys, values):
        result = whole(self, keys, values)
        self.offset = self.rows
        return result

    monkeypatch.setattr(LayerCache, "update_and_fetch", update_and_fetch)


def trim_layer_by_layer(caches, count):
    counts = [cache.trim(count) for cache in caches]
    return counts[0]


def every_row(self, rows):
    return [rows] * len(self.sequences)


def finish_twice(self):
    for _ in range(2):
        self._prompt_open = False
        if self.method.ops.finish_prompt is not None:
            self.method.ops.finish_prompt(self.method_state)


def finish_for_good(self):
    finish_twice(self)
    self._window = 10**6


def mask_of_any_window(self, N, **_):
    return None if N == 1 else "causal"


def lazy_trim(self, n):
    whole = mx.async_eval
    mx.async_eval = lambda *_: None
    try:
        return whole_trim(self, n)
    finally:
        mx.async_eval = whole


whole_trim = LayerCache.trim


def rebuilt_around(cache, state):
    other = type(cache)(cache.method, cache.config, cache.layer, state)
    other._resume(cache._session())
    return other


# What a method cannot get wrong by itself: a name, what to put in its place, and the rules that must fail.
CORE_FAULTS = {
    "padding is stored": (BatchLayerCache, "_take", every_row, ["batch_like_alone"]),
    "extract hands out the live cache": (
        BatchLayerCache, "extract", lambda self, idx: self.sequences[idx], ["batch_join_and_leave"]
    ),
    "merge takes the caches themselves": (
        MergeableLayerCache, "merge", staticmethod(lambda caches: BatchLayerCache(caches)), ["batch_join_and_leave"]
    ),
    "proxy caches offer merge": (LayerCache, "merge", lambda caches: None, ["merge_offered"]),
    "copies share the state": (
        LayerCache,
        "__deepcopy__",
        lambda self, memo: rebuilt_around(self, self.method_state),
        ["deepcopy_independent", "batch_steps"],
    ),
    "the state is left lazy": (
        LayerCache, "_computing_state", lambda self, output, in_prompt: output, ["handover"]
    ),
    "a rewind is left lazy": (LayerCache, "trim", lazy_trim, ["handover"]),
    "an attribute bits": (LayerCache, "bits", 4, ["members", "restored_goes_on"]),
    "kv_bits does nothing": (LayerCache, "to_quantized", lambda self, **_: self, ["kv_bits_refused"]),
    "windows are ignored": (
        LayerCache, "make_mask", mask_of_any_window, ["window_refused", "mask_array_fits"]
    ),
    "the end of a prompt is told twice": (LayerCache, "_finish_prompt", finish_twice, ["prompt_end_once"]),
    "a later prompt is an answer": (
        LayerCache, "_finish_prompt", finish_for_good, ["prompt_end_once", "later_prompt_evicts"]
    ),
    "trim goes layer by layer": (
        rewinds, "trim_prompt_cache", trim_layer_by_layer, ["trim_all_or_none"]
    ),
    "files of other options are taken": (store, "_check_expected", lambda *_: None, ["other_config_refused"]),
    "files of other models are taken": (store, "_check_model", lambda *_: None, ["other_model_refused"]),
    "altered files are taken": (safefile, "_digest", lambda *_: "0" * 64, ["damaged_file_refused"]),
}  # fmt: skip


@pytest.mark.parametrize(("target", "name", "fault", "rules"), CORE_FAULTS.values(), ids=CORE_FAULTS)
def test_a_fault_of_the_core_is_found_too(monkeypatch, target, name, fault, rules):
    monkeypatch.setattr(target, name, fault, raising=False)
    found = check(Keeper, rules)
    assert {name: one.outcome for name, one in found.items()} == dict.fromkeys(rules, "failed")


def test_an_offset_that_counts_rows_is_found(monkeypatch):
    offset_is_rows(monkeypatch)
    found = check(Keeper, ["offset", "counts_are_tokens"])
    assert {one.outcome for one in found.values()} == {"failed"}


def test_there_are_enough_faults():
    assert len(FAULTS) >= 75
