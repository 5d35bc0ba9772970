# SPDX-License-Identifier: Apache-2.0
"""The model over the tokens of a step, whose block tables are on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_kv.metadata import AttentionMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from paged_kv._core import KVCacheConfig
    from paged_kv.block_table import BlockTables
    from paged_kv.engine.step_inputs import StepTensors
    from paged_kv.kv_cache import KVCache
    from paged_kv.models import DecoderForCausalLM

__all__ = ["ForwardPass"]


class ForwardPass:
    """Finds the tokens of a step in the caches, and runs the model over them.

    Args:
        model: The decoder.
        layer_names: Its layers, in order.
        kv_cache_config: The same by KV cache group.
        kv_caches: Caches by layer. Mutated by each pass.
        block_tables: Of the running requests. Its ``input_block_tables`` and ``slot_mappings`` are
            filled by each pass.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        layer_names: Sequence[str],
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, KVCache],
        block_tables: BlockTables,
    ) -> None:
        self._model = model
        self._block_tables = block_tables
        group_of = {
            name: group
            for group, spec in enumerate(kv_cache_config.kv_cache_groups)
            for name in spec.layer_names
        }
        self._kv_caches = [kv_caches[name] for name in layer_names]
        self._group_of_layer = [group_of[name] for name in layer_names]

    def __call__(
        self,
        step: StepTensors,
        *,
        max_query_len: int,
        max_seq_len: int,
        last_tokens_only: bool = False,
    ) -> Tensor:
        """Compute the hidden states of a step's tokens, ``[num_tokens, hidden_size]``.

        Looks at no value of a tensor, so that it can be recorded or captured.

        Args:
            step: The tokens and where their requests begin.
            max_query_len: At least the tokens of each request.
            max_seq_len: At least the length of each request.
            last_tokens_only: Whether to compute those of each request's last token only,
                ``[num_seqs, hidden_size]``.
        """
        metadata = [
            AttentionMetadata(
                query_start_loc=step.query_start_loc,
                seq_lens=step.seq_lens,
                block_tables=block_table,
                slot_mapping=slot_mapping,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
            )
            for block_table, slot_mapping in zip(*self._locate_tokens(step), strict=True)
        ]
        per_layer = [metadata[group] for group in self._group_of_layer]
        hidden: Tensor = self._model(
            step.input_ids,
            step.positions,
            self._kv_caches,
            per_layer,
            check_token_ids=False,  # those of requests have been
            last_tokens_only=last_tokens_only,
        )
        return hidden

    def _locate_tokens(self, step: StepTensors) -> tuple[tuple[Tensor, ...], Tensor]:
        """The block tables of the step's requests and the slots of its tokens, by group."""
        tables = self._block_tables
        block_tables = tables.gather_block_tables(step.rows, len(step.rows))
        slots = tables.compute_slot_mappings(
            step.rows, step.query_start_loc, step.positions, len(step.positions)
        )
        return block_tables, slots
