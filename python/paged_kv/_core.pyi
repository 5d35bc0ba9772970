"""
Host core of paged_kv: block pool, prefix cache and block tables.
"""
from __future__ import annotations
import collections.abc
import enum
import numpy
import numpy.typing
import paged_kv.block_table
import typing
__all__: list[str] = ['AllBlocksCleared', 'AllocStatus', 'AttentionSpec', 'BlockDevice', 'BlockHashList', 'BlockHashToBlockMap', 'BlockPool', 'BlockRemoved', 'BlockSpaceManager', 'BlockStored', 'BlockTable', 'CachedBlocksView', 'ChunkedLocalAttentionSpec', 'FreeKVCacheBlockQueue', 'FreePlace', 'FreeQueueView', 'FullAttentionSpec', 'InvariantError', 'KVCacheBlock', 'KVCacheBlocks', 'KVCacheConfig', 'KVCacheEvictionEvent', 'KVCacheGroupSpec', 'KVCacheManager', 'KVCacheMetricsCollector', 'KVCacheSpec', 'KVCacheTensor', 'NoHitReason', 'NoHitReport', 'OutOfBlocksError', 'PrefixCacheStats', 'Request', 'RequestBatch', 'RequestStatus', 'SlidingWindowSpec', 'UniformTypeKVCacheSpecs', 'build_info', 'estimate_max_model_len', 'generate_block_hash_extra_keys', 'generate_scheduler_kv_cache_config', 'get_block_hash', 'get_block_table_width', 'get_group_id', 'get_kv_cache_configs', 'get_kv_cache_groups', 'get_max_concurrency_for_kv_cache_config', 'hash_block_tokens', 'hash_full_blocks', 'make_block_hash_with_group_id', 'num_prefix_contents', 'sha256', 'sha256_backends', 'sha256_cbor', 'unify_kv_cache_spec_page_size', 'xxh3_128', 'xxhash_cbor']
class OutOfBlocksError(ValueError):
    pass
class InvariantError(AssertionError):
    pass
class BlockHashList:
    """
    The block hashes of a request, in one buffer.
    
    Behaves like a list of ``bytes``. `BlockPool` reads it without a copy, so it is what a request
    should keep its hashes in.
    
    Example:
        >>> hashes = BlockHashList([bytes(32)])
        >>> hashes.append(bytes(31) + b"x")
        >>> len(hashes), hashes[-1][-1:]
        (2, b'x')
    """
    __hash__: typing.ClassVar[None] = None
    def __eq__(self, other: typing.Any) -> bool:
        ...
    @typing.overload
    def __getitem__(self, index: int) -> bytes:
        ...
    @typing.overload
    def __getitem__(self, index: slice) -> BlockHashList:
        ...
    def __init__(self, hashes: collections.abc.Iterable[bytes] = ()) -> None:
        ...
    def __iter__(self) -> collections.abc.Iterator[bytes]:
        ...
    def __len__(self) -> int:
        ...
    def __repr__(self) -> str:
        ...
    def append(self, block_hash: bytes) -> None:
        """
        Add a hash at the end.
        """
    def extend(self, block_hashes: collections.abc.Iterable[bytes]) -> None:
        """
        Add hashes at the end.
        """
    def truncate(self, num_hashes: int) -> None:
        """
        Drop all but the first `num_hashes`, e.g. from an edited block on.
        """
class KVCacheBlock:
    """
    Metadata of one block of the KV cache.
    
    A light handle to a place in a pool's (or queue's) storage, which it keeps alive. Two handles are
    equal if they are of the same place. The blocks of a `BlockPool` change through the pool alone.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_utils.py::KVCacheBlock.
    """
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __hash__(self) -> int:
        ...
    def __init__(self, block_id: int) -> None:
        ...
    def __repr__(self) -> str:
        ...
    def reset_hash(self) -> None:
        """
        Forget the name of the block's content.
        """
    def set_block_hash(self, block_hash: bytes, num_tokens: int) -> None:
        """
        Name the block's content. Refused if it has a name, or belongs to a pool.
        """
    @property
    def block_hash(self) -> bytes | None:
        """
        Key in the prefix cache (hash and group id), None while the block is not in it.
        """
    @property
    def block_hash_num_tokens(self) -> int | None:
        """
        Tokens of the prefix that `block_hash` names.
        """
    @property
    def block_id(self) -> int:
        """
        The block's row in the cache tensors.
        """
    @property
    def is_null(self) -> bool:
        """
        Whether it is the null block, block 0 of a pool.
        """
    @property
    def next_free_block(self) -> KVCacheBlock | None:
        """
        The block after it in its free queue, None at the back.
        """
    @property
    def num_hits(self) -> int:
        """
        How often it was found in the prefix cache since it was last handed out, up to 65535.
        """
    @property
    def prev_free_block(self) -> KVCacheBlock | None:
        """
        The block before it in its free queue, None at the front.
        """
    @property
    def ref_cnt(self) -> int:
        """
        How many hold the block; 0 in a pool: it is free.
        """
class FreeKVCacheBlockQueue:
    """
    Free blocks in the order of their reuse: a linked list through the blocks.
    
    The blocks must not belong to a pool or another queue; the queue becomes their owner. `BlockPool`
    has one of these inside.
    
    Raises:
        ValueError: a block that is not (or already) in the queue, or more blocks asked for than there
            are. The queue is then unchanged.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_utils.py::FreeKVCacheBlockQueue.
    
    Example:
        >>> queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(4)])
        >>> first = queue.popleft()
        >>> queue.append(first)
        >>> [block.block_id for block in queue.get_all_free_blocks()]
        [1, 2, 3, 0]
    """
    def __init__(self, blocks: collections.abc.Sequence[KVCacheBlock]) -> None:
        ...
    def append(self, block: KVCacheBlock) -> None:
        """
        Put a block to the back. O(1).
        """
    def append_n(self, blocks: collections.abc.Sequence[KVCacheBlock]) -> None:
        """
        Put blocks to the back, in order. O(n).
        """
    def check_integrity(self) -> None:
        """
        Raise InvariantError if the links are inconsistent. O(n), for tests.
        """
    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """
        All blocks of the queue, in order. O(n), for tests.
        """
    def popleft(self) -> KVCacheBlock:
        """
        Take the first block. O(1).
        """
    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """
        Take the first `n` blocks, in order. O(n).
        """
    def prepend_n(self, blocks: collections.abc.Sequence[KVCacheBlock]) -> None:
        """
        Put blocks to the front; blocks[0] is the next to be taken. O(n).
        """
    def remove(self, block: KVCacheBlock) -> None:
        """
        Take a block out of the middle. O(1).
        """
    @property
    def num_free_blocks(self) -> int:
        """
        Blocks in the queue.
        """
class BlockHashToBlockMap:
    """
    Prefix-cache index: key -> the blocks that hold this content.
    
    Several blocks may share a key; a lookup gives the one inserted first. `BlockPool` has one of these
    inside. Keys are made by `make_block_hash_with_group_id`. All methods are O(1).
    
    Source:
        vLLM 0.32 v1/core/block_pool.py::BlockHashToBlockMap.
    """
    def __init__(self) -> None:
        ...
    def __len__(self) -> int:
        """
        Number of distinct keys.
        """
    def contain(self, key: bytes, block_id: int) -> bool:
        """
        True if the block is there under `key`.
        """
    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        """
        The first inserted block with `key`, or None.
        """
    def insert(self, key: bytes, block: KVCacheBlock) -> None:
        """
        Add a block behind the others with `key`.
        """
    def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
        """
        Remove one block from `key` and return it; None, and no change, if it is not there.
        """
class FreePlace:
    """
    Where in the free queue a block goes that nobody holds any more.
    
    What the argument `eviction_policy` of `BlockPool` and `KVCacheManager` returns.
    
    
    Members:
    
      FRONT : It is reused next: what it holds is lost first.
    
      BACK : It is reused after all blocks that are free now.
    """
    BACK: typing.ClassVar[FreePlace]
    FRONT: typing.ClassVar[FreePlace]
    __members__: typing.ClassVar[dict[str, FreePlace]]
    @typing.overload
    def __eq__(self, other: FreePlace) -> bool:
        ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __int__(self) -> int:
        ...
    @typing.overload
    def __ne__(self, other: FreePlace) -> bool:
        ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class BlockPool:
    """
    Hands out blocks, counts their holders, and finds full blocks again by their content.
    
    Args:
        num_gpu_blocks: Number of blocks, including block 0, the null block, which is never handed out.
        enable_caching: Whether full blocks can be found again.
        hash_block_size: Tokens that one block hash of a request covers.
        eviction_policy: Called for each block that becomes free, with a copy of it; says whether it is
            reused next or last. None: the least recently used first, and before it what cannot be found.
            If it raises, `sys.unraisablehook` is told and the block goes where None would put it.
    
    Methods that take blocks accept an iterable of `KVCacheBlock` or of ids, or an int32 or int64 array
    of ids. All cost O(1) per block. A call that raises changes nothing.
    
    Source:
        vLLM 0.32 v1/core/block_pool.py::BlockPool.
    
    Example:
        >>> pool = BlockPool(num_gpu_blocks=11, enable_caching=True, hash_block_size=16)
        >>> blocks = pool.get_new_blocks(2)
        >>> [block.block_id for block in blocks], pool.get_num_free_blocks()
        ([1, 2], 8)
        >>> pool.free_blocks(reversed(blocks))
    """
    def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int, eviction_policy: collections.abc.Callable[[KVCacheBlock], FreePlace] | None = None) -> None:
        ...
    def cache_full_blocks(self, request: typing.Any, blocks: collections.abc.Iterable[KVCacheBlock] | collections.abc.Iterable[int], num_cached_blocks: int, num_full_blocks: int, block_size: int, kv_cache_group_id: int, block_mask: collections.abc.Sequence[bool] | None = None) -> None:
        """
        Make blocks [num_cached_blocks, num_full_blocks) of a request findable.
        
        Args:
            request: An object with `.block_hashes`, or a `BlockHashList` (not copied). One hash for every
                `hash_block_size` tokens. Those of `xxhash_cbor` must be a living `Request`'s.
            blocks: All blocks of the request.
            num_cached_blocks: Blocks that are cached already.
            num_full_blocks: Blocks that are full.
            block_size: Tokens per block: `hash_block_size`, or a multiple.
            kv_cache_group_id: Group of layers to which the blocks belong.
            block_mask: One bool for each block of the range; False leaves the block out.
        
        Null blocks are skipped; a block cached under the same key stays as it is. Without caching nothing
        happens.
        
        Raises:
            ValueError: a block that nobody holds or that is cached as another content, or counts that do
                not fit. Nothing has changed.
        """
    def check_integrity(self) -> None:
        """
        Raise InvariantError if the state is inconsistent. O(num_gpu_blocks), for tests.
        """
    def dump(self) -> tuple[list[int], dict[int, int], dict[str, list[int]]]:
        """
        The whole state: (free ids in order, {id: ref_cnt} where not 0, {hex key: sorted ids}).
        """
    def evict_blocks(self, block_ids: collections.abc.Iterable[KVCacheBlock] | collections.abc.Iterable[int]) -> None:
        """
        Remove blocks from the prefix cache; holders and queue positions stay.
        """
    def find_cached_prefix(self, block_hashes: collections.abc.Iterable[bytes], max_num_blocks: int, kv_cache_group_id: int = 0, block_size: int | None = None) -> numpy.typing.NDArray[numpy.int32]:
        """
        Ids of the cached blocks of a prefix, from the left up to the first miss.
        
        Args:
            block_hashes: A `BlockHashList` (not copied) or an iterable of bytes.
            max_num_blocks: Look no further. A request must compute its last token itself, so this is at
                most (num_tokens - 1) // block_size.
            kv_cache_group_id: Group of layers to look in.
            block_size: Tokens per block, a multiple of `hash_block_size`. Default: the same.
        
        Returns:
            int32 array. The blocks are not held yet: `touch` them before the next `get_new_blocks`.
        """
    def free_blocks(self, ordered_blocks: collections.abc.Iterable[KVCacheBlock] | collections.abc.Iterable[int]) -> None:
        """
        One holder less for each block.
        
        Blocks that nobody holds any more become free: those without a hash to the front of the queue,
        those with one to its back (an `eviction_policy` may differ), both in the given order. So a request's blocks should be given last
        block first: then a cached prefix is lost from its end.
        
        Raises:
            ValueError: an unknown block, or one freed more often than it is held. Nothing has changed.
        """
    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: collections.abc.Sequence[int]) -> list[KVCacheBlock] | None:
        """
        The cached block of each group, or None unless every group has one.
        
        Raises:
            ValueError: a hash of `xxhash_cbor`, which as bytes does not tell the content.
        """
    def get_new_block_ids(self, num_blocks: int) -> numpy.typing.NDArray[numpy.int32]:
        """
        `get_new_blocks`, as an int32 array of ids.
        """
    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """
        Take blocks from the front of the free queue.
        
        What they held leaves the prefix cache; each has ref_cnt 1 afterwards.
        
        Raises:
            OutOfBlocksError: fewer than `num_blocks` are free. Nothing has changed.
        """
    def get_num_free_blocks(self) -> int:
        """
        Blocks that nobody holds. Those whose content is cached count too.
        """
    def get_usage(self) -> float:
        """
        Share of the blocks, without the null block, that is held: 0.0 .. 1.0.
        """
    def reset_prefix_cache(self) -> bool:
        """
        Empty the prefix cache. False, and no change, while any block is held.
        """
    def touch(self, blocks: collections.abc.Iterable[KVCacheBlock] | collections.abc.Iterable[int]) -> None:
        """
        One more holder for each block; a free one leaves the queue and keeps its content.
        """
    @property
    def blocks(self) -> list[KVCacheBlock]:
        """
        All blocks by id. O(num_gpu_blocks), for tests.
        """
    @property
    def cached_block_hash_to_block(self) -> CachedBlocksView:
        """
        The prefix-cache index, to look at.
        """
    @property
    def enable_caching(self) -> bool:
        """
        Whether full blocks can be found again.
        """
    @property
    def free_block_queue(self) -> FreeQueueView:
        """
        The free queue, to look at.
        """
    @property
    def hash_block_size(self) -> int:
        """
        Tokens that one block hash of a request covers.
        """
    @property
    def null_block(self) -> KVCacheBlock:
        """
        Block 0, which stands in tables where nothing is held.
        """
    @property
    def num_gpu_blocks(self) -> int:
        """
        Number of blocks, the null block included.
        """
class KVCacheBlocks:
    """
    The blocks of one request: ``blocks[g][i]`` is block i of group g.
    
    All blocks must be of one pool.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_manager.py::KVCacheBlocks.
    
    Example:
        >>> pool = BlockPool(8, False, 16)
        >>> held = KVCacheBlocks((pool.get_new_blocks(2),)) + KVCacheBlocks((pool.get_new_blocks(1),))
        >>> held.get_block_ids()
        ([1, 2, 3],)
    """
    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """
        Group by group, these blocks and then the others.
        """
    def __init__(self, blocks: collections.abc.Sequence[collections.abc.Sequence[KVCacheBlock]]) -> None:
        ...
    def __repr__(self) -> str:
        ...
    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """
        The ids, as a tuple of lists; with `allow_none`, None if there are no blocks at all.
        """
    def get_unhashed_block_ids(self) -> list[int]:
        """
        Ids of the only group's blocks that are not in the prefix cache.
        """
    def new_empty(self) -> KVCacheBlocks:
        """
        As many groups, without blocks.
        """
    @property
    def blocks(self) -> tuple[list[KVCacheBlock], ...]:
        """
        A tuple with one list of blocks a group.
        """
class FreeQueueView:
    """
    The free queue of a `BlockPool`, to look at: only the pool changes it.
    """
    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """
        The blocks in the order of their reuse. O(free blocks), for tests.
        """
    @property
    def num_free_blocks(self) -> int:
        """
        Blocks in the queue.
        """
class CachedBlocksView:
    """
    The prefix-cache index of a `BlockPool`, to look at: only the pool changes it.
    
    Keys are made by `make_block_hash_with_group_id`. Those of `xxhash_cbor` are not looked up by
    ``get_one_block`` and ``contain``: as bytes they do not tell the content.
    """
    def __len__(self) -> int:
        """
        Number of distinct keys.
        """
    def contain(self, key: bytes, block_id: int) -> bool:
        """
        True if the block is there under `key`. O(1).
        """
    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        """
        The first inserted block with `key`, or None. O(1).
        """
    @property
    def _cache(self) -> dict[bytes, typing.Any]:
        """
        Key -> block, or {id: block} of several. A copy, for vLLM's tests.
        """
class AllocStatus(enum.Enum):
    """
    Whether something fits.
    
    OK: now. LATER: once others have freed blocks. NEVER: not even into an empty pool.
    """
    LATER: typing.ClassVar[AllocStatus]
    NEVER: typing.ClassVar[AllocStatus]
    OK: typing.ClassVar[AllocStatus]
    @classmethod
    def __new__(cls, value):
        ...
class BlockDevice(enum.Enum):
    """
    Whose blocks a sequence holds.
    
    See BlockSpaceManager.
    """
    CPU: typing.ClassVar[BlockDevice]
    GPU: typing.ClassVar[BlockDevice]
    @classmethod
    def __new__(cls, value):
        ...
class BlockSpaceManager:
    """
    Who holds which block, for sequences that branch: parallel sampling and beam search.
    
    Forked sequences share their blocks. Full blocks are shared for good; a block that is filled in part is
    copied before the first write by a sequence that is not its only holder (copy-on-write). Nothing here
    touches tensors: methods return the copies that the caller must run, before anything is written to the
    cache for a later call. The copies of one call are independent of each other.
    
    Sequences have numbers of the caller's choice. Methods that take several work as if called for one
    after the other, but change all or nothing.
    
    Args:
        block_size: Tokens per block.
        num_gpu_blocks: Blocks of the cache, block 0 (the null block, never handed out) included.
        num_cpu_blocks: Likewise of the swap space. 1: none.
        watermark: Share of `num_gpu_blocks` that `can_allocate` and `can_swap_in` leave free.
    
    Raises:
        ValueError: a sequence that does not exist, is given twice or lies on the wrong device. Nothing
            has changed.
    
    Source:
        vLLM 0.5 core/block_manager_v1.py::BlockSpaceManagerV1.
    
    Example:
        >>> manager = BlockSpaceManager(block_size=4, num_gpu_blocks=8)
        >>> manager.allocate([0], num_tokens=6)
        >>> manager.fork(0, 1)
        >>> manager.append_slots([0, 1]).tolist()
        [[2, 3]]
        >>> manager.get_block_table(0).tolist(), manager.get_block_table(1).tolist()
        ([1, 3], [1, 2])
    """
    def __contains__(self, seq_id: int) -> bool:
        ...
    def __init__(self, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int = 1, watermark: typing.SupportsFloat | typing.SupportsIndex = 0.01) -> None:
        ...
    def allocate(self, seq_ids: collections.abc.Sequence[int], num_tokens: int) -> None:
        """
        New sequences that share one prompt, e.g. the n samples of a request.
        
        Raises:
            ValueError: a sequence that exists already. Nothing has changed.
            OutOfBlocksError: too few blocks. Nothing has changed. The watermark is not enforced here.
        """
    def append_slots(self, seq_ids: collections.abc.Sequence[int], num_new_tokens: int = 1) -> numpy.typing.NDArray[numpy.int64]:
        """
        Room for `num_new_tokens` more tokens of each sequence.
        
        A part-filled last block that others hold too is replaced by a new block of the sequence's own.
        
        Returns:
            The copies that must run before the tokens are written: int64 ``[n, 2]`` of (source,
            destination), as `ops.copy_blocks` takes it.
        
        Raises:
            OutOfBlocksError: too few blocks. Nothing has changed.
        """
    def can_allocate(self, num_tokens: int) -> AllocStatus:
        """
        Whether a prompt of `num_tokens` fits, whatever the number of sequences that share it.
        
        Returns:
            OK, LATER (when others have freed blocks) or NEVER (not even into an empty pool).
        """
    def can_append_slots(self, seq_ids: collections.abc.Sequence[int], num_new_tokens: int = 1) -> bool:
        """
        Whether `append_slots` would succeed. Exact, copies on write included.
        """
    def can_swap_in(self, seq_ids: collections.abc.Sequence[int], num_new_tokens: int = 1) -> AllocStatus:
        """
        Whether `swap_in` and then `append_slots` would succeed: OK, LATER or NEVER.
        """
    def can_swap_out(self, seq_ids: collections.abc.Sequence[int]) -> bool:
        """
        Whether `swap_out` would succeed.
        """
    def check_integrity(self) -> None:
        """
        Raise InvariantError if the state is inconsistent. O(all blocks), for tests.
        """
    def fork(self, parent: int, child: int) -> None:
        """
        `child` becomes a sequence with the tokens and blocks of `parent`. O(blocks of it).
        """
    def free(self, seq_id: int) -> None:
        """
        Forget a sequence. One that does not exist is no error.
        
        Blocks that nobody else holds are handed out next, those of the end of the sequence first.
        """
    def get_block_table(self, seq_id: int) -> numpy.typing.NDArray[numpy.int32]:
        """
        The blocks of a sequence in order: int32 array, a copy.
        """
    def get_device(self, seq_id: int) -> BlockDevice:
        """
        Whose blocks a sequence holds.
        """
    def get_num_free_cpu_blocks(self) -> int:
        """
        Blocks of the CPU that nobody holds.
        """
    def get_num_free_gpu_blocks(self) -> int:
        """
        Blocks of the GPU that nobody holds.
        """
    def get_num_tokens(self, seq_id: int) -> int:
        """
        Tokens that a sequence has room for.
        """
    def get_seq_ids(self) -> list[int]:
        """
        All sequences, in no order.
        """
    def reset(self) -> None:
        """
        Forget all sequences.
        """
    def swap_in(self, seq_ids: collections.abc.Sequence[int]) -> numpy.typing.NDArray[numpy.int64]:
        """
        Move sequences back to blocks of the GPU.
        
        Returns:
            int64 ``[n, 2]`` of (cpu block, gpu block), as `ops.swap_blocks` takes it.
        
        Raises:
            OutOfBlocksError: too few blocks. Nothing has changed.
        """
    def swap_out(self, seq_ids: collections.abc.Sequence[int]) -> numpy.typing.NDArray[numpy.int64]:
        """
        Move sequences to blocks of the CPU.
        
        Those that share blocks go on sharing them with each other, not with sequences that stay.
        
        Returns:
            int64 ``[n, 2]`` of (gpu block, cpu block), as `ops.swap_blocks` takes it. Run it before
            anything else is written to the cache: the blocks may be handed out again at once.
        
        Raises:
            OutOfBlocksError: too few blocks. Nothing has changed.
        """
    @property
    def block_size(self) -> int:
        """
        Tokens per block.
        """
class BlockTable:
    """
    The block tables of a batch, one row a request, in one int32 buffer.
    
    Where kernels work on smaller blocks than the pool hands out, block b of the pool is split into
    ``ratio = block_size / kernel_block_size`` kernel blocks ``b * ratio + j``. Methods take blocks of
    the pool; rows hold kernel blocks. Entries after a row's blocks are 0, the null block.
    
    Args:
        block_size: Tokens per block of the pool.
        max_num_reqs: Number of rows.
        max_num_blocks_per_req: Blocks of the pool that fit in a row.
        max_num_batched_tokens: Length of `slot_mapping`.
        kernel_block_size: Tokens per kernel block; divides `block_size`. Default: the same.
        memory: int32 ``[max_num_reqs, width]``, contiguous: where the rows lie, e.g. pinned memory. Kept
            alive and set to 0. Default: the table's own.
    
    Raises:
        ValueError: blocks that do not fit in a row, or an id out of range. Nothing has changed.
        IndexError: no such row.
    
    Source:
        vLLM 0.32 v1/worker/block_table.py::BlockTable.
    
    Example:
        >>> table = BlockTable(16, max_num_reqs=2, max_num_blocks_per_req=4, max_num_batched_tokens=8)
        >>> table.append_row([3, 7], row_idx=1)
        >>> table.get_numpy_array()[1].tolist()
        [3, 7, 0, 0]
    """
    def __init__(self, block_size: int, max_num_reqs: int, max_num_blocks_per_req: int, max_num_batched_tokens: int, kernel_block_size: int | None = None, memory: numpy.typing.NDArray[numpy.int32] | None = None) -> None:
        ...
    def add_row(self, block_ids: collections.abc.Iterable[KVCacheBlock] | collections.abc.Iterable[int], row_idx: int) -> None:
        """
        Make `block_ids` the row.
        """
    def append_row(self, block_ids: collections.abc.Iterable[KVCacheBlock] | collections.abc.Iterable[int], row_idx: int) -> None:
        """
        Add blocks at the end of a row.
        """
    def check_add_row(self, block_ids: collections.abc.Iterable[KVCacheBlock] | collections.abc.Iterable[int], row_idx: int) -> None:
        """
        Raise what `add_row` would raise, and change nothing.
        """
    def check_append_row(self, block_ids: collections.abc.Iterable[KVCacheBlock] | collections.abc.Iterable[int], row_idx: int) -> None:
        """
        Raise what `append_row` would raise, and change nothing.
        """
    def check_integrity(self) -> None:
        """
        Raise InvariantError if the rows are inconsistent, for tests.
        """
    def clear(self) -> None:
        """
        Empty all rows.
        """
    def clear_row(self, row_idx: int) -> None:
        """
        Empty a row.
        """
    def commit_block_table(self, num_reqs: int, out: numpy.typing.NDArray[numpy.int32]) -> None:
        """
        Copy the first `num_reqs` rows, over the full width, to `out`.
        
        Args:
            num_reqs: Number of rows.
            out: int32 ``[>= num_reqs, width]``, contiguous; e.g. pinned memory. Mutated.
        """
    def commit_dirty(self, num_reqs: int, out: numpy.typing.NDArray[numpy.int32]) -> bool:
        """
        Bring the first `num_reqs` rows of a copy on the host up to date: `dirty`, `read_dirty`,
        the writes and `mark_clean` in one call.
        
        Args:
            num_reqs: Rows to look at.
            out: int32 ``[max_num_reqs, width]``, contiguous. Mutated where rows have changed.
        
        Returns:
            Whether anything had changed.
        """
    def compute_slot_mapping(self, num_reqs: int, query_start_loc: numpy.typing.NDArray[numpy.int32], positions: numpy.typing.NDArray[numpy.int64]) -> None:
        """
        Write the slots of a batch to `slot_mapping`, and -1 after its last token.
        
        Args:
            num_reqs: Row r of the table is request r of the batch.
            query_start_loc: int32 ``[num_reqs + 1]``, contiguous: tokens of request r are
                ``query_start_loc[r] .. query_start_loc[r + 1]``.
            positions: int64 ``[num_tokens]``, contiguous: position of each token in its sequence.
        
        Raises:
            ValueError: a position that the row's blocks do not cover. Nothing has changed.
        """
    def dirty(self, num_reqs: int) -> tuple[int, int]:
        """
        What has changed in the first `num_reqs` rows since `mark_clean`.
        
        Returns:
            (rows, entries in them). Entries written through `get_numpy_array` are not tracked.
        """
    def get_numpy_array(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        The rows: int32 ``[max_num_reqs, width]`` of kernel blocks. A view, not a copy.
        """
    def mark_clean(self, num_reqs: int) -> None:
        """
        Forget what has changed in the first `num_reqs` rows: the copy elsewhere has it.
        """
    def move_row(self, src: int, tgt: int) -> None:
        """
        Make row `tgt` what row `src` is, and empty `src`.
        """
    def read_dirty(self, num_reqs: int, out: numpy.typing.NDArray[numpy.int32]) -> None:
        """
        Read what has changed, in the form that `ops.apply_block_table_writes` takes.
        
        Args:
            num_reqs: Rows to look at.
            out: int32 ``[3 * rows + entries]``, as `dirty` counts them: the rows, the first changed column
                of each, the running sum of the lengths, the entries. Mutated.
        """
    def replace_blocks(self, block_ids: collections.abc.Iterable[KVCacheBlock] | collections.abc.Iterable[int], row_idx: int, start: int) -> None:
        """
        Put `block_ids` in the place of as many blocks of a row, from block `start` on.
        
        For a block that was copied before a write, or null blocks for those that have left a window.
        """
    def swap_row(self, src: int, tgt: int) -> None:
        """
        Exchange two rows.
        """
    @property
    def block_size(self) -> int:
        """
        Tokens per block of the pool.
        """
    @property
    def kernel_block_size(self) -> int:
        """
        Tokens per kernel block.
        """
    @property
    def max_num_blocks_per_req(self) -> int:
        """
        Blocks of the pool that fit in a row.
        """
    @property
    def max_num_reqs(self) -> int:
        """
        Number of rows.
        """
    @property
    def num_blocks_per_row(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        int32 ``[max_num_reqs]``, in kernel blocks. A copy.
        """
    @property
    def slot_mapping(self) -> numpy.typing.NDArray[numpy.int64]:
        """
        int64 ``[max_num_batched_tokens]``, from `compute_slot_mapping`. A view, not a copy.
        """
    @property
    def width(self) -> int:
        """
        Kernel blocks that fit in a row.
        """
class RequestStatus:
    """
    Where a request stands; everything after `PREEMPTED` is finished.
    
    Source:
        vLLM 0.32 v1/request.py::RequestStatus.
    
    
    Members:
    
      WAITING
    
      WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    
      WAITING_FOR_REMOTE_KVS
    
      WAITING_FOR_STREAMING_REQ
    
      RUNNING
    
      PREEMPTED
    
      FINISHED_STOPPED
    
      FINISHED_LENGTH_CAPPED
    
      FINISHED_ABORTED
    
      FINISHED_IGNORED
    
      FINISHED_ERROR
    
      FINISHED_REPETITION
    """
    FINISHED_ABORTED: typing.ClassVar[RequestStatus]
    FINISHED_ERROR: typing.ClassVar[RequestStatus]
    FINISHED_IGNORED: typing.ClassVar[RequestStatus]
    FINISHED_LENGTH_CAPPED: typing.ClassVar[RequestStatus]
    FINISHED_REPETITION: typing.ClassVar[RequestStatus]
    FINISHED_STOPPED: typing.ClassVar[RequestStatus]
    PREEMPTED: typing.ClassVar[RequestStatus]
    RUNNING: typing.ClassVar[RequestStatus]
    WAITING: typing.ClassVar[RequestStatus]
    WAITING_FOR_REMOTE_KVS: typing.ClassVar[RequestStatus]
    WAITING_FOR_STREAMING_REQ: typing.ClassVar[RequestStatus]
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: typing.ClassVar[RequestStatus]
    __members__: typing.ClassVar[dict[str, RequestStatus]]
    @typing.overload
    def __eq__(self, other: RequestStatus) -> bool:
        ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool:
        ...
    @typing.overload
    def __ge__(self, other: RequestStatus) -> bool:
        ...
    @typing.overload
    def __ge__(self, other: typing.Any) -> None:
        ...
    def __getstate__(self) -> int:
        ...
    @typing.overload
    def __gt__(self, other: RequestStatus) -> bool:
        ...
    @typing.overload
    def __gt__(self, other: typing.Any) -> None:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __int__(self) -> int:
        ...
    @typing.overload
    def __le__(self, other: RequestStatus) -> bool:
        ...
    @typing.overload
    def __le__(self, other: typing.Any) -> None:
        ...
    @typing.overload
    def __lt__(self, other: RequestStatus) -> bool:
        ...
    @typing.overload
    def __lt__(self, other: typing.Any) -> None:
        ...
    @typing.overload
    def __ne__(self, other: RequestStatus) -> bool:
        ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class Request:
    """
    The tokens of a request, the hashes of its full blocks, and how far it has come.
    
    `paged_kv.Request` adds vLLM's constructor.
    
    Source:
        vLLM 0.32 v1/request.py::Request.
    """
    def __init__(self, request_id: str, prompt_token_ids: collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.integer] | None, lora_request: typing.Any = None, mm_features: typing.Any = None, cache_salt: typing.Any = None, prompt_embeds: typing.Any = None, session_id: str | None = None, priority: int = 0, arrival_time: typing.SupportsFloat | typing.SupportsIndex = 0.0, skip_reading_prefix_cache: bool = False, reports_reused_blocks: bool = False) -> None:
        ...
    @typing.overload
    def append_output_token_ids(self, token_ids: int) -> None:
        """
        Append one token and hash a block that it fills.
        """
    @typing.overload
    def append_output_token_ids(self, token_ids: collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.integer]) -> None:
        """
        Append tokens and hash the blocks that they fill.
        """
    def is_finished(self) -> bool:
        """
        Whether `status` is one after `PREEMPTED`.
        """
    @typing.overload
    def set_block_hasher(self, block_hasher: collections.abc.Callable[[typing.Any], collections.abc.Iterable[bytes]]) -> None:
        """
        Hash blocks with ``block_hasher(request)``, which returns the hashes of the full blocks
        that are not in `block_hashes` yet. Blocks that are full already are hashed at once.
        """
    @typing.overload
    def set_block_hasher(self, hash_block_size: int, none_hash: bytes, algorithm: str = 'sha256_cbor') -> None:
        """
        Hash blocks of `hash_block_size` tokens without calling Python.
        
        Args:
            hash_block_size: Tokens per block.
            none_hash: The parent of the first block.
            algorithm: ``"sha256_cbor"`` or ``"xxhash_cbor"``.
        
        Raises:
            ValueError: another algorithm, or a request that has hashes of `xxhash_cbor`.
        """
    @property
    def all_token_ids(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        Prompt and output tokens, ``[num_tokens]`` int32. A copy.
        """
    @property
    def arrival_time(self) -> float:
        """
        When it came, in seconds.
        """
    @property
    def block_hashes(self) -> BlockHashList:
        """
        Hashes of the full blocks. A copy.
        """
    @property
    def cache_salt(self) -> str | None:
        """
        Only requests with the same salt share blocks.
        """
    @property
    def num_block_hashes(self) -> int:
        """
        How many `block_hashes` there are.
        """
    @property
    def num_computed_tokens(self) -> int:
        """
        Tokens whose KV is in the cache, or will be after the steps under way.
        """
    @num_computed_tokens.setter
    def num_computed_tokens(self, arg1: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def num_in_flight_tokens(self) -> int:
        """
        Of the computed tokens, those of steps whose output is not processed yet.
        """
    @num_in_flight_tokens.setter
    def num_in_flight_tokens(self, arg1: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def num_output_placeholders(self) -> int:
        """
        Output tokens that are scheduled but not known yet (asynchronous scheduling).
        """
    @num_output_placeholders.setter
    def num_output_placeholders(self, arg1: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def num_output_tokens(self) -> int:
        """
        Tokens that were appended.
        """
    @property
    def num_preemptions(self) -> int:
        """
        How often the request lost its blocks, to be computed again.
        """
    @num_preemptions.setter
    def num_preemptions(self, arg1: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def num_prompt_tokens(self) -> int:
        """
        Tokens of the prompt.
        """
    @property
    def num_tokens(self) -> int:
        """
        Prompt and output tokens.
        """
    @property
    def num_tokens_with_spec(self) -> int:
        """
        All tokens and the drafts.
        """
    @property
    def output_token_ids(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        Output tokens, ``[num_output_tokens]`` int32. A copy.
        """
    @property
    def priority(self) -> int:
        """
        Lower is served sooner.
        """
    @property
    def request_id(self) -> str:
        """
        Names the request.
        """
    @property
    def session_id(self) -> str | None:
        """
        The session that it belongs to, for events.
        """
    @property
    def shared_prefix_boundary(self) -> int:
        """
        Where a prefix ends that others share, in tokens; 0: none known.
        """
    @shared_prefix_boundary.setter
    def shared_prefix_boundary(self, arg1: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def skip_reading_prefix_cache(self) -> bool:
        """
        Cached blocks are not reused; own blocks are cached all the same.
        """
    @property
    def spec_token_ids(self) -> list[int]:
        """
        Draft tokens; no part of `all_token_ids`.
        """
    @spec_token_ids.setter
    def spec_token_ids(self, arg1: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None:
        ...
    @property
    def status(self) -> RequestStatus:
        """
        Where the request stands.
        """
    @status.setter
    def status(self, arg1: RequestStatus) -> None:
        ...
class KVCacheSpec:
    """
    What one layer keeps per token, and for how long. Immutable; compared by value.
    
    Source:
        vLLM 0.32 v1/kv_cache_interface.py::KVCacheSpec.
    """
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __hash__(self) -> int:
        ...
    def copy_with_new_block_size(self, block_size: int) -> KVCacheSpec:
        """
        The same with another number of tokens per block.
        """
    def max_memory_usage_bytes(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """
        Bytes that one request needs in one layer, at most.
        
        Args:
            max_model_len: Longest request, in tokens.
            max_in_flight_tokens: Most tokens that are scheduled and not processed yet.
        """
    @property
    def block_size(self) -> int:
        """
        Tokens per block.
        """
    @property
    def kind(self) -> str:
        """
        "full_attention", "sliding_window" or "chunked_local_attention".
        """
    @property
    def page_size_bytes(self) -> int:
        """
        Bytes of one block of one layer.
        """
class AttentionSpec(KVCacheSpec):
    """
    Keys and values of an attention layer.
    
    Source:
        vLLM 0.32 v1/kv_cache_interface.py::AttentionSpec.
    """
    @property
    def dtype(self) -> str:
        """
        Name of the element type, e.g. "bfloat16".
        """
    @property
    def head_size(self) -> int:
        """
        Elements of a key.
        """
    @property
    def head_size_v(self) -> int:
        """
        Elements of a value.
        """
    @property
    def num_kv_heads(self) -> int:
        """
        Heads of keys and values.
        """
    @property
    def page_size_padded(self) -> int | None:
        """
        Bytes of a block, if it is larger than its contents; else None.
        """
    @property
    def unpadded_page_size_bytes(self) -> int:
        """
        Bytes of the contents of a block.
        """
class FullAttentionSpec(AttentionSpec):
    """
    A layer that keeps every token until the request ends.
    
    Args:
        block_size: Tokens per block.
        num_kv_heads: Heads of keys and values.
        head_size: Elements of a key.
        dtype: Element type: a name, or a torch or NumPy dtype.
        head_size_v: Elements of a value; None: as a key.
        page_size_padded: Bytes of a block, if more than its contents.
        sliding_window: Tokens that a query sees, if it sees fewer than are kept.
        attention_chunk_size: Tokens of a chunk, if a query sees its own chunk alone.
    
    Raises:
        ValueError: a size out of range, an unknown dtype, or both a window and a chunk.
    
    Source:
        vLLM 0.32 v1/kv_cache_interface.py::FullAttentionSpec.
    
    Example:
        >>> FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16").page_size_bytes
        65536
    """
    def __init__(self, *, block_size: int, num_kv_heads: int, head_size: int, dtype: typing.Any, head_size_v: int | None = None, page_size_padded: int | None = None, sliding_window: int | None = None, attention_chunk_size: int | None = None) -> None:
        ...
    def __repr__(self) -> str:
        ...
    @property
    def attention_chunk_size(self) -> int | None:
        """
        Tokens of a chunk, if a query sees its own chunk alone; else None.
        """
    @property
    def sliding_window(self) -> int | None:
        """
        Tokens that a query sees, if fewer than are kept; else None.
        """
class SlidingWindowSpec(AttentionSpec):
    """
    A layer whose queries see the last `sliding_window` tokens; older ones are given back.
    
    Args:
        block_size, num_kv_heads, head_size, dtype, head_size_v, page_size_padded: As in
            `FullAttentionSpec`.
        sliding_window: Tokens that a query sees, its own included.
        extra_retained_tokens: Tokens kept before the window, which no query sees.
    
    Raises:
        ValueError: a size out of range, or an unknown dtype.
    
    Source:
        vLLM 0.32 v1/kv_cache_interface.py::SlidingWindowSpec.
    """
    def __init__(self, *, block_size: int, num_kv_heads: int, head_size: int, dtype: typing.Any, sliding_window: int, extra_retained_tokens: int = 0, head_size_v: int | None = None, page_size_padded: int | None = None) -> None:
        ...
    def __repr__(self) -> str:
        ...
    @property
    def extra_retained_tokens(self) -> int:
        """
        Tokens kept before the window.
        """
    @property
    def sliding_window(self) -> int:
        """
        Tokens that a query sees, its own included.
        """
class ChunkedLocalAttentionSpec(AttentionSpec):
    """
    A layer whose queries see the tokens of their own chunk; earlier chunks are given back.
    
    Args:
        block_size, num_kv_heads, head_size, dtype, head_size_v, page_size_padded: As in
            `FullAttentionSpec`.
        attention_chunk_size: Tokens of a chunk.
    
    Raises:
        ValueError: a size out of range, or an unknown dtype.
    
    Source:
        vLLM 0.32 v1/kv_cache_interface.py::ChunkedLocalAttentionSpec.
    """
    def __init__(self, *, block_size: int, num_kv_heads: int, head_size: int, dtype: typing.Any, attention_chunk_size: int, head_size_v: int | None = None, page_size_padded: int | None = None) -> None:
        ...
    def __repr__(self) -> str:
        ...
    @property
    def attention_chunk_size(self) -> int:
        """
        Tokens of a chunk.
        """
class KVCacheGroupSpec:
    """
    Layers that share one block table.
    
    Args:
        layer_names: The layers.
        kv_cache_spec: What each of them keeps.
        is_eagle_group: Whether layers of an EAGLE or MTP draft model are among them.
    
    Source:
        vLLM 0.32 v1/kv_cache_interface.py::KVCacheGroupSpec.
    """
    def __init__(self, layer_names: collections.abc.Sequence[str], kv_cache_spec: KVCacheSpec, is_eagle_group: bool = False) -> None:
        ...
    def __repr__(self) -> str:
        ...
    @property
    def is_eagle_group(self) -> bool:
        """
        Whether layers of a draft model are among them.
        """
    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """
        What each of them keeps.
        """
    @property
    def layer_names(self) -> list[str]:
        """
        The layers.
        """
class KVCacheTensor:
    """
    Where layers of one shape lie in the memory of the cache.
    
    Block ``b`` of ``layers[l]`` begins at byte ``offset + l * layer_stride + b * block_stride``.
    
    Args:
        size: Bytes of the whole allocation.
        layers: Names of the layers.
        layer_stride: Bytes from a layer to the next.
        block_stride: Bytes from a block to the next.
        offset: Where block 0 of the first layer begins, in bytes.
    
    Source:
        vLLM 0.32 v1/kv_cache_interface.py::KVCacheTensor.
    """
    def __init__(self, size: int, layers: collections.abc.Sequence[str], layer_stride: int, block_stride: int, offset: int = 0) -> None:
        ...
    def __repr__(self) -> str:
        ...
    @property
    def block_stride(self) -> int:
        """
        Bytes from a block to the next.
        """
    @property
    def layer_stride(self) -> int:
        """
        Bytes from a layer to the next.
        """
    @property
    def layers(self) -> list[str]:
        """
        Names of the layers.
        """
    @property
    def offset(self) -> int:
        """
        Where the first layer begins, in bytes.
        """
    @property
    def size(self) -> int:
        """
        Bytes of the whole allocation.
        """
class KVCacheConfig:
    """
    How the layers of a model share one pool of blocks.
    
    Args:
        num_blocks: Blocks of the pool, the null block included.
        kv_cache_tensors: Where the layers lie in memory; not read by `KVCacheManager`.
        kv_cache_groups: The groups of layers.
        prefix_cache_retention_interval: Which blocks of sliding-window groups are cached. None: all
            that a hit can need; 0: only those that a repeated prompt needs; n, a multiple of the
            scheduler's block size: also those before every n-th token.
    
    Source:
        vLLM 0.32 v1/kv_cache_interface.py::KVCacheConfig.
    """
    def __init__(self, num_blocks: int, kv_cache_tensors: collections.abc.Sequence[KVCacheTensor], kv_cache_groups: collections.abc.Sequence[KVCacheGroupSpec], prefix_cache_retention_interval: int | None = None) -> None:
        ...
    def __repr__(self) -> str:
        ...
    @property
    def kv_cache_groups(self) -> list[KVCacheGroupSpec]:
        """
        The groups of layers.
        """
    @property
    def kv_cache_tensors(self) -> list[KVCacheTensor]:
        """
        Where the layers lie in memory.
        """
    @property
    def num_blocks(self) -> int:
        """
        Blocks of the pool, the null block included.
        """
    @property
    def prefix_cache_retention_interval(self) -> int | None:
        """
        Which blocks of sliding-window groups are cached.
        """
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """
    Layers of one kind that need the same slots, but differ in the bytes of a token.
    
    Source:
        vLLM 0.32 v1/kv_cache_interface.py::UniformTypeKVCacheSpecs.
    """
    @property
    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """
        The spec of each layer.
        """
class BlockStored:
    """
    Blocks of one group became findable, or were reused by a request that reports that.
    
    Source:
        vLLM 0.32 distributed/kv_events.py::BlockStored.
    """
    @property
    def block_hashes(self) -> list[int | bytes]:
        """
        One hash for each block: its low 64 bits, or its bytes. Blocks that are left out of the cache have none.
        """
    @property
    def block_size(self) -> int:
        """
        Tokens per block.
        """
    @property
    def extra_keys(self) -> list[typing.Any] | None:
        """
        What besides tokens names each block, without the kinds of the keys.
        """
    @property
    def group_idx(self) -> int:
        """
        The cache group.
        """
    @property
    def kv_cache_spec_kind(self) -> str:
        """
        The group's kind of attention.
        """
    @property
    def kv_cache_spec_sliding_window(self) -> int | None:
        """
        Its window in tokens, or None.
        """
    @property
    def lora_id(self) -> int | None:
        """
        Id of the adapter, or None.
        """
    @property
    def lora_name(self) -> str | None:
        """
        Name of the adapter, or None.
        """
    @property
    def medium(self) -> str:
        """
        Where the blocks are.
        """
    @property
    def parent_block_hash(self) -> int | bytes | None:
        """
        Hash of the block before the first; None at the beginning.
        """
    @property
    def session_id(self) -> str | None:
        """
        The request's session, or None.
        """
    @property
    def token_ids(self) -> list[int]:
        """
        Tokens of the whole range of blocks, those left out included.
        """
class BlockRemoved:
    """
    A block can no longer be found under this hash.
    
    Source:
        vLLM 0.32 distributed/kv_events.py::BlockRemoved.
    """
    @property
    def block_hashes(self) -> list[int | bytes]:
        """
        One hash: its low 64 bits, or its bytes.
        """
    @property
    def group_idx(self) -> int:
        """
        The cache group.
        """
    @property
    def medium(self) -> str:
        """
        Where the block was.
        """
class AllBlocksCleared:
    """
    The prefix cache was emptied.
    
    Source:
        vLLM 0.32 distributed/kv_events.py::AllBlocksCleared.
    """
class KVCacheEvictionEvent:
    """
    The life of a block's content.
    
    Source:
        vLLM 0.32 v1/metrics/stats.py::KVCacheEvictionEvent.
    """
    @property
    def idle_seconds(self) -> float:
        """
        Since it was last found.
        """
    @property
    def lifetime_seconds(self) -> float:
        """
        From one allocation of the block to the next.
        """
    @property
    def reuse_gaps_seconds(self) -> list[float]:
        """
        Between the last times that it was found, at most three.
        """
class KVCacheMetricsCollector:
    """
    Watches a sample of a pool's blocks: how long content stays, how often it is used again.
    
    Args:
        sample_rate: Share of the allocations that is watched, in (0, 1].
        seed: Of the choice.
    
    Raises:
        ValueError: `sample_rate` out of range.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_metrics.py::KVCacheMetricsCollector.
    """
    def __init__(self, sample_rate: typing.SupportsFloat | typing.SupportsIndex = 0.01, seed: int = 0) -> None:
        ...
    def drain_events(self) -> list[KVCacheEvictionEvent]:
        """
        The watched blocks that were handed out again since the last call.
        """
    def reset(self) -> None:
        """
        Forget everything.
        """
    @property
    def sample_rate(self) -> float:
        """
        Share of the allocations that is watched.
        """
class PrefixCacheStats:
    """
    How much of the prompts the prefix cache gave, since the last report.
    
    Source:
        vLLM 0.32 v1/metrics/stats.py::PrefixCacheStats.
    """
    @property
    def hits(self) -> int:
        """
        Tokens found.
        """
    @property
    def preempted_hits(self) -> int:
        """
        Tokens found for them.
        """
    @property
    def preempted_queries(self) -> int:
        """
        Their tokens.
        """
    @property
    def preempted_requests(self) -> int:
        """
        Requests that looked and had been preempted.
        """
    @property
    def queries(self) -> int:
        """
        Their tokens.
        """
    @property
    def requests(self) -> int:
        """
        Requests that looked.
        """
    @property
    def reset(self) -> bool:
        """
        Whether the cache was emptied.
        """
class NoHitReason:
    """
    Why a request finds no more in the prefix cache.
    
    Members:
    
      CACHING_DISABLED : Prefix caching is off.
    
      REQUEST_SKIPS_CACHE : The request has `skip_reading_prefix_cache`.
    
      NO_BLOCK_HASHES : The request was made without a block hasher, or with one of another block size.
    
      NO_WHOLE_BLOCK_LEFT : All whole blocks were found; a part of a block never is.
    
      LAST_TOKEN : All was found but the block of the last token, which must be computed.
    
      EAGLE_DROP : The block is cached, but the draft model needs its tokens computed.
    
      NOT_CACHED : The block is not cached: never computed with these keys, or evicted.
    
      EVICTED : The block was cached and has been evicted; needs `num_remembered_evictions`.
    
      ONLY_IN_OTHER_GROUP : Another cache group has the block; this one keeps fewer, or has lost it.
    
      ONLY_WITHOUT_ADAPTER : The same tokens are cached without the request's adapter.
    
      ONLY_WITHOUT_SALT : The same tokens are cached without the request's `cache_salt`.
    
      ONLY_WITHOUT_MEDIA : The same tokens are cached without the request's media.
    
      ONLY_WITHOUT_EMBEDS : The same tokens are cached without the request's `prompt_embeds`.
    
      ONLY_WITHOUT_EXTRA_KEYS : The same tokens are cached with none of these.
    """
    CACHING_DISABLED: typing.ClassVar[NoHitReason]
    EAGLE_DROP: typing.ClassVar[NoHitReason]
    EVICTED: typing.ClassVar[NoHitReason]
    LAST_TOKEN: typing.ClassVar[NoHitReason]
    NOT_CACHED: typing.ClassVar[NoHitReason]
    NO_BLOCK_HASHES: typing.ClassVar[NoHitReason]
    NO_WHOLE_BLOCK_LEFT: typing.ClassVar[NoHitReason]
    ONLY_IN_OTHER_GROUP: typing.ClassVar[NoHitReason]
    ONLY_WITHOUT_ADAPTER: typing.ClassVar[NoHitReason]
    ONLY_WITHOUT_EMBEDS: typing.ClassVar[NoHitReason]
    ONLY_WITHOUT_EXTRA_KEYS: typing.ClassVar[NoHitReason]
    ONLY_WITHOUT_MEDIA: typing.ClassVar[NoHitReason]
    ONLY_WITHOUT_SALT: typing.ClassVar[NoHitReason]
    REQUEST_SKIPS_CACHE: typing.ClassVar[NoHitReason]
    __members__: typing.ClassVar[dict[str, NoHitReason]]
    @typing.overload
    def __eq__(self, other: NoHitReason) -> bool:
        ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __int__(self) -> int:
        ...
    @typing.overload
    def __ne__(self, other: NoHitReason) -> bool:
        ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class NoHitReport:
    """
    What `KVCacheManager.why_no_hit` found. ``str(report)`` says it in words.
    
    For operators: a report may tell what requests with another salt have computed.
    """
    def __repr__(self) -> str:
        ...
    def __str__(self) -> str:
        ...
    @property
    def block_index(self) -> int | None:
        """
        Its place in the group's blocks of the request.
        """
    @property
    def kv_cache_group_id(self) -> int | None:
        """
        Group of the first block that the next longer hit lacks; None if none is missing.
        """
    @property
    def num_group_hit_tokens(self) -> list[int]:
        """
        By group: the tokens of the hit if there were no other group, and no EAGLE.
        """
    @property
    def num_hit_blocks(self) -> list[int]:
        """
        By group: the blocks of the hit, null blocks not counted.
        """
    @property
    def num_hit_tokens(self) -> int:
        """
        Tokens that `get_computed_blocks` finds.
        """
    @property
    def num_tokens(self) -> int:
        """
        Tokens of the request.
        """
    @property
    def reason(self) -> NoHitReason:
        """
        Why the next longer hit is none.
        """
    @property
    def token_range(self) -> tuple[int, int]:
        """
        (start, end): the tokens of the missing block, or else all that are not found.
        """
class KVCacheManager:
    """
    Which blocks each request holds: prefix hits, allocation, caching, release.
    
    It holds ids and counters, never tensors. A request is known by its id. A call that raises changes
    nothing, `MemoryError` of the core included. Where there is no memory for an event, `take_events`
    gives `AllBlocksCleared` in place of all before it: who follows the events never believes in a block
    that is gone.
    
    Args:
        kv_cache_config: Blocks and cache groups.
        max_model_len: No request gets slots past this many tokens.
        scheduler_block_size: Every hit is a multiple of this many tokens: a multiple of every group's
            block size.
        hash_block_size: Tokens that one block hash of a request covers: a divisor of every group's block
            size.
        max_in_flight_tokens: Tokens that are scheduled and not processed yet, at most; None:
            `max_model_len`.
        enable_caching: Whether full blocks can be found again.
        use_eagle: Whether hits drop their last block: in the groups that say so, or in all if none does.
        num_prefill_lookahead: Tokens after a chunk of a prompt that the draft model looks at.
        log_stats: Whether `record_prefix_cache_stats` counts.
        enable_kv_cache_events: Whether `take_events` has something to give.
        metrics_collector: Watches a sample of the blocks.
        watermark: Share of the blocks that stays free when a request is admitted beside others.
        use_int_block_hashes: Whether events show the low 64 bits of hashes as integers, or all bytes.
        eviction_policy: Called for each block that becomes free, with a copy of it; says whether it is
            reused next or last. None: the least recently used first, and before it what cannot be found.
            If it raises, `sys.unraisablehook` is told and the block goes where None would put it.
        num_remembered_evictions: So many keys that left the cache last are known to `why_no_hit`; about
            150 bytes each.
    
    Raises:
        ValueError: arguments that do not fit together.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_manager.py::KVCacheManager.
    
    Example:
        >>> spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
        >>> config = KVCacheConfig(10, [], [KVCacheGroupSpec(["layer.0"], spec)])
        >>> manager = KVCacheManager(config, 64, scheduler_block_size=4, hash_block_size=4)
        >>> manager.usage
        0.0
    """
    def __init__(self, kv_cache_config: KVCacheConfig, max_model_len: int, scheduler_block_size: int, hash_block_size: int, max_in_flight_tokens: int | None = None, enable_caching: bool = True, use_eagle: bool = False, num_prefill_lookahead: int = 0, log_stats: bool = False, enable_kv_cache_events: bool = False, metrics_collector: KVCacheMetricsCollector = None, watermark: typing.SupportsFloat | typing.SupportsIndex = 0.0, use_int_block_hashes: bool = True, eviction_policy: collections.abc.Callable[[KVCacheBlock], FreePlace] | None = None, num_remembered_evictions: int = 0) -> None:
        ...
    def allocate_slots(self, request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0, new_computed_blocks: KVCacheBlocks = None, num_lookahead_tokens: int = 0, num_external_computed_tokens: int = 0, delay_cache_blocks: bool = False, full_sequence_must_fit: bool = False, reserved_blocks: int = 0, has_scheduled_reqs: bool = True) -> KVCacheBlocks | None:
        """
        Give a request slots for its next tokens.
        
        The hit is taken over before blocks are taken, so that taking blocks cannot evict it. Blocks that the
        tokens fill become findable at once, as far as the request's tokens are known: drafts are not cached.
        
        Args:
            request: `num_computed_tokens`, `num_in_flight_tokens` and `status` are read.
            num_new_tokens: Tokens to compute, drafts included.
            num_new_computed_tokens: Tokens of `new_computed_blocks`.
            new_computed_blocks: From `get_computed_blocks`, for a request that holds no blocks.
            num_lookahead_tokens: Slots for drafts to come.
            num_external_computed_tokens: Tokens computed elsewhere, to be loaded into blocks.
            delay_cache_blocks: Do not cache yet: `cache_blocks` follows when the tokens have arrived.
            full_sequence_must_fit: Refuse unless all tokens that the request has now would fit.
            reserved_blocks: Blocks that stay free for others.
            has_scheduled_reqs: Whether others run in this step: the watermark counts.
        
        Returns:
            The blocks that were taken for the new tokens, possibly none; None if too few are free. Then
            nothing has changed, except that blocks which the request no longer needs were given back.
        
        Raises:
            ValueError: nothing to allocate, a number out of range, a hit for a request that holds blocks, or
                a request without hashes to cache it by. Nothing has changed.
        
        Notes:
            Cost: linear in the blocks taken, adopted, cached or given back.
        """
    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """
        Make the full blocks of the first `num_computed_tokens` tokens findable.
        """
    def check_integrity(self) -> None:
        """
        Raise InvariantError if the state is inconsistent. O(num_blocks), for tests.
        """
    def estimate_cached_tokens(self, request: Request) -> int:
        """
        Tokens of the request that all groups have in the cache. O(blocks).
        """
    def evict_blocks(self, block_ids: collections.abc.Iterable[KVCacheBlock] | collections.abc.Iterable[int]) -> None:
        """
        Remove blocks from the prefix cache; holders keep them.
        """
    def fork(self, parent: Request, child: Request) -> list[tuple[int, int, int]] | None:
        """
        Let a request go on where another is, for parallel sampling and beam search.
        
        In every group the child shares the parent's blocks. A block that will be written again, as a rule the
        last if it is filled in part, is not shared: the child takes a new one, and its content is to be copied.
        Blocks after the computed tokens stay the parent's.
        
        Args:
            parent: Holds the blocks of its `num_computed_tokens` tokens; these must be final, no drafts.
            child: Holds no blocks, and begins with those tokens; without caching, it is for the caller to see
                that adapter and inputs are the parent's too. Its `num_computed_tokens` becomes the parent's.
        
        Returns:
            The copies, each ``(group, source block, destination block)``, at most one a group unless a draft
            model looks ahead (`num_prefill_lookahead`). They must run after the parent's steps under way and
            before the next step of either, in the layers of their group, e.g. with `ops.copy_blocks`. None,
            and no change, if too few blocks are free; the watermark does not count.
        
        Raises:
            ValueError: the parent has no computed tokens or lacks their blocks, the child holds blocks or
                differs from the parent in those tokens, or with caching in what else names their blocks.
                Nothing has changed.
        
        Notes:
            Cost: linear in the blocks of the computed tokens, which are compared. For metrics and eviction
            policies the shared blocks have been used once more; no event tells of them.
        
        Example:
            >>> spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
            >>> config = KVCacheConfig(10, [], [KVCacheGroupSpec(["layer.0"], spec)])
            >>> manager = KVCacheManager(config, 64, 4, 4, enable_caching=False)
            >>> first, second = Request("a", range(6)), Request("b", range(6))
            >>> _ = manager.allocate_slots(first, 6)
            >>> first.num_computed_tokens = 6
            >>> manager.fork(first, second)
            [(0, 2, 3)]
            >>> manager.get_block_ids("a"), manager.get_block_ids("b")
            (([1, 2],), ([1, 3],))
        """
    def free(self, request: Request) -> None:
        """
        Give back a request's blocks, the last first. One without blocks is left alone.
        """
    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """
        A request's block ids: a tuple with one list a group.
        """
    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """
        `get_block_ids` of the first `num_computed_tokens` tokens.
        """
    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """
        A request's blocks; none if it is unknown.
        """
    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """
        The longest cached prefix of a request that holds no blocks.
        
        At least one token is left to compute. Nothing changes, so `allocate_slots` must come before the
        next allocation.
        
        Returns:
            (blocks, num_tokens, shared_prefix_boundary): the blocks of the hit, null blocks where none is
            needed; its tokens; and where a prefix ends that others share but a sliding-window group has not
            kept, to be stored in the request (0: none).
        
        Notes:
            Cost: one lookup per block of the hit; with sliding windows, per block of the request at most.
        """
    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """
        The counts since the last call; None without `log_stats`.
        """
    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """
        Forget a request, whose blocks stay held.
        
        Returns:
            Its blocks, group after group. ``block_pool.free_blocks(reversed(blocks))`` must follow.
        """
    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """
        Whether cached blocks may be reused for the request.
        """
    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """
        Count a lookup, with `log_stats`: tokens asked for and found.
        """
    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int) -> None:
        """
        Give back blocks that no token after the first `processed_computed_tokens` needs.
        """
    def reset_prefix_cache(self) -> bool:
        """
        Empty the prefix cache. False, and no change, while any block is held.
        """
    def take_events(self) -> list[typing.Any]:
        """
        What happened to the prefix cache since the last call, in order: `BlockStored`, `BlockRemoved`, `AllBlocksCleared`.
        """
    def truncate_computed_blocks(self, blocks: KVCacheBlocks, num_computed_tokens: int) -> KVCacheBlocks:
        """
        The first blocks of a hit, for `num_computed_tokens` tokens: a multiple of every block size.
        """
    def why_no_hit(self, request: Request) -> NoHitReport:
        """
        Why `get_computed_blocks` finds no more than it does.
        
        Names the first block that the next longer hit lacks, and the reason. The next longer hit is that
        which all groups with full attention have, or else one block more than the hit. Nothing changes:
        no holders, statistics or events.
        
        Returns:
            The report.
        
        Notes:
            For operators: do not show a report to the request's sender, for it may tell what requests with
            another salt have computed. A block is said to be cached without an adapter, salt, medium or
            embedding if hashing the request without it (needs the native hasher) gives a hit; what is cached
            with *another* one cannot be told from what is not cached.
            Cost: the lookups of `get_computed_blocks`, once more for each group; and at most five times the
            hashing of the tokens up to the missing block.
        """
    @property
    def block_pool(self) -> BlockPool:
        """
        The pool of all groups.
        """
    @property
    def empty_kv_cache_blocks(self) -> KVCacheBlocks:
        """
        No blocks in any group.
        """
    @property
    def enable_caching(self) -> bool:
        """
        Whether full blocks can be found again.
        """
    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """
        The groups. A copy.
        """
    @property
    def max_model_len(self) -> int:
        """
        No request gets slots past this many tokens.
        """
    @property
    def num_kv_cache_groups(self) -> int:
        """
        Number of cache groups.
        """
    @property
    def usage(self) -> float:
        """
        Share of the pool that requests hold: 0.0 .. 1.0.
        """
class RequestBatch:
    """
    The requests that an engine runs, each with a row of the block tables: a step is one call.
    
    A request has its row from `add` to `remove` or `free`, the same in the table of every cache group.
    Meanwhile its blocks are given back, and its rows written, through the batch only; slots may be
    allocated through the manager too, the rows follow with the next `allocate_slots`. Blocks that have
    left a sliding window are null blocks (0) in the rows. A call that raises changes no request and no
    row, also if it is for want of memory or by a hasher of Python.
    
    Args:
        kv_cache_manager: The manager of all requests.
        block_tables: One table per cache group, with its block size and rows for `max_model_len` tokens:
            tables of this module, or of `paged_kv.block_table`, a `MultiGroupBlockTable` or the
            `host_tables` of a `BlockTables`. The ids of a step are then in the rows that the next commit
            sends to the device.
    
    Raises:
        ValueError: tables that do not fit the groups.
        TypeError: something else than tables.
    
    Example:
        >>> import numpy as np
        >>> spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
        >>> config = KVCacheConfig(10, [], [KVCacheGroupSpec(["layer.0"], spec)])
        >>> manager = KVCacheManager(config, 64, 4, 4, enable_caching=False)
        >>> table = BlockTable(4, max_num_reqs=8, max_num_blocks_per_req=16, max_num_batched_tokens=8)
        >>> batch = RequestBatch(manager, [table])
        >>> batch.add(Request("a", [1, 2, 3]), row_idx=5)
        >>> rows = np.array([5], np.int32)
        >>> batch.allocate_slots(rows, 3)
        array([], dtype=int32)
        >>> batch.append_output_token_ids(rows, np.array([7], np.int32))
        >>> table.get_numpy_array()[5, :2].tolist()
        [1, 0]
        >>> batch.free(rows)
        >>> manager.usage
        0.0
    """
    def __init__(self, kv_cache_manager: KVCacheManager, block_tables: collections.abc.Iterable[BlockTable | paged_kv.block_table.BlockTable]) -> None:
        ...
    def add(self, request: Request, row_idx: int) -> None:
        """
        Give a request an empty row, and write the blocks that it holds there.
        
        Raises:
            IndexError: no such row. Nothing has changed.
            ValueError: a row that is not empty, or a request that is in the batch. Nothing has changed.
        """
    @typing.overload
    def allocate_slots(self, rows: numpy.typing.NDArray[numpy.int32], num_new_tokens: numpy.typing.NDArray[numpy.int32], num_lookahead_tokens: int = 0, reserved_blocks: int = 0, stop_at_refusal: bool = False) -> numpy.typing.NDArray[numpy.int32]:
        """
        `num_new_tokens`: int32 ``[n]``, contiguous.
        """
    @typing.overload
    def allocate_slots(self, rows: numpy.typing.NDArray[numpy.int32], num_new_tokens: int, num_lookahead_tokens: int = 0, reserved_blocks: int = 0, stop_at_refusal: bool = False) -> numpy.typing.NDArray[numpy.int32]:
        """
        Do what `KVCacheManager.allocate_slots` does, for the requests of `rows` in this order.
        
        The new tokens count as computed from then on (`num_computed_tokens`), blocks that they fill become
        findable, and the new blocks are in the requests' rows of all tables.
        
        Args:
            rows: int32 ``[n]``, contiguous.
            num_new_tokens: Tokens to compute, drafts included: of every request.
            num_lookahead_tokens: Slots for drafts to come, for each.
            reserved_blocks: Blocks that stay free for others.
            stop_at_refusal: Leave the requests after the first refused one alone: a scheduler that makes
                room and goes on with ``rows[refused[0]:]`` takes the decisions that it would take request
                by request.
        
        Returns:
            int32: the places in `rows` of the requests that got no slots, ascending. They keep their blocks
            and tokens; blocks that had left their windows were given back.
        
        Raises:
            IndexError: no such row. Nothing has changed.
            ValueError: a row without a request or named twice, or what `KVCacheManager.allocate_slots`
                raises for any of the requests. Nothing has changed.
        
        Notes:
            Cost: O(n), and the blocks taken, cached or given back. The GIL is held: a step is shorter than
            it takes to get it back.
        """
    def append_output_token_ids(self, rows: numpy.typing.NDArray[numpy.int32], token_ids: numpy.typing.NDArray[numpy.int32], num_tokens: numpy.typing.NDArray[numpy.int32] | None = None) -> None:
        """
        Append tokens to the requests of `rows`, and hash the blocks that they fill.
        
        Args:
            rows: int32 ``[n]``, contiguous.
            token_ids: int32 ``[n]``, or those of all requests one after the other.
            num_tokens: int32 ``[n]``: how many are each request's. Default: one.
        
        Raises:
            IndexError: no such row. Nothing has changed.
            ValueError: a row without a request or named twice, or lengths that do not fit. Nothing has
                changed.
        """
    def check_integrity(self) -> None:
        """
        Raise InvariantError if the rows are inconsistent, for tests.
        """
    def free(self, rows: numpy.typing.NDArray[numpy.int32]) -> None:
        """
        Do what `KVCacheManager.free` and `remove` do, for the requests of `rows` in this order.
        
        Raises:
            IndexError: no such row. Nothing has changed.
            ValueError: a row without a request or named twice. Nothing has changed.
        """
    def remove(self, row_idx: int) -> None:
        """
        Take a request out and empty its row. It keeps its blocks.
        """
    @property
    def max_num_reqs(self) -> int:
        """
        Number of rows.
        """
    @property
    def num_reqs(self) -> int:
        """
        Requests in the batch.
        """
def build_info() -> dict[str, str]:
    """
    How the native code was built: compiler, build type, CUDA architectures and sanitizers, empty where there are none.
    """
def estimate_max_model_len(kv_cache_groups: collections.abc.Sequence[KVCacheGroupSpec], *, max_model_len: int, max_in_flight_tokens: int, available_memory: int) -> int:
    """
    The longest request that fits into memory, in tokens.
    
    Args:
        kv_cache_groups: The groups of the model.
        max_model_len: No longer than this.
        max_in_flight_tokens: Most tokens that are scheduled and not processed yet.
        available_memory: Bytes.
    
    Returns:
        At most `max_model_len`; 0 if not even one token fits.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_utils.py::_estimate_max_model_len_from_groups.
    """
def generate_block_hash_extra_keys(request: typing.Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int) -> tuple[tuple[tuple[typing.Any, ...], ...] | None, int]:
    """
    What besides its tokens goes into the hash of a block.
    
    Args:
        request: Any object; `lora_request`, `mm_features`, `cache_salt` and `prompt_embeds` are read
            where present, with vLLM's fields.
        start_token_idx: First token of the block.
        end_token_idx: One past its last token.
        start_mm_idx: First multimodal feature to look at; negative counts from the end.
    
    Returns:
        (keys, next_mm_idx): `keys` is None, or a tuple of ("lora", name, path),
        ("mm", identifier, offset in the block), ("cache_salt", salt) for the first block, and
        ("prompt_embeds", sha256 of the rows), in this order.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_utils.py::generate_block_hash_extra_keys.
    """
def generate_scheduler_kv_cache_config(kv_cache_configs: collections.abc.Sequence[KVCacheConfig]) -> KVCacheConfig:
    """
    What a scheduler needs of the workers' configs: one spec a group.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_utils.py::generate_scheduler_kv_cache_config.
    """
def get_block_hash(key: bytes) -> bytes:
    """
    The hash in a key of the prefix cache.
    """
def get_block_table_width(max_num_blocks: int, block_size: int, *, token_alignment: int | None = 128) -> int:
    """
    Blocks of a row, rounded up to hold a multiple of `token_alignment` tokens (None: not).
    
    Example:
        >>> get_block_table_width(5, 16)
        8
    """
def get_group_id(key: bytes) -> int:
    """
    The group id in a key of the prefix cache.
    """
def get_kv_cache_configs(kv_cache_specs: collections.abc.Sequence[dict[str, KVCacheSpec]], available_memory: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], *, max_model_len: int, max_in_flight_tokens: int, num_gpu_blocks_override: int | None = None, prefix_cache_retention_interval: int | None = None, num_prefill_lookahead_tokens: int = 0, disable_hybrid_kv_cache_manager: bool = False) -> list[KVCacheConfig]:
    """
    How many blocks each worker has, and where its layers lie in memory.
    
    All workers get the same groups, as far as they have their layers, and as many blocks as the smallest
    worker can have.
    
    Args:
        kv_cache_specs: For each worker, the spec of each of its layers.
        available_memory: Bytes of each worker.
        max_model_len: Longest request, in tokens.
        max_in_flight_tokens: Most tokens that are scheduled and not processed yet.
        num_gpu_blocks_override: This many blocks instead of what fits.
        prefix_cache_retention_interval: See `KVCacheConfig`.
        num_prefill_lookahead_tokens: Tokens after a chunk of a prompt that a draft model looks at.
        disable_hybrid_kv_cache_manager: See `get_kv_cache_groups`.
    
    Raises:
        ValueError: a request of `max_model_len` tokens does not fit beside the null block, or workers
            disagree about a layer.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_utils.py::get_kv_cache_configs.
    """
def get_kv_cache_groups(kv_cache_spec: dict[str, KVCacheSpec], *, disable_hybrid_kv_cache_manager: bool = False) -> list[KVCacheGroupSpec]:
    """
    Which layers of a model share a block table.
    
    Layers with specs that can be merged are one group; layers of different kinds are split into groups of
    equally many layers, whose blocks have equal bytes, as all take blocks from one pool.
    
    Args:
        kv_cache_spec: The spec of each layer, in order.
        disable_hybrid_kv_cache_manager: One group, whose layers all keep every token.
    
    Returns:
        The groups; none without layers.
    
    Raises:
        ValueError: layers that cannot be grouped.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_utils.py::get_kv_cache_groups.
    
    Example:
        >>> shape = dict(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
        >>> full, window = FullAttentionSpec(**shape), SlidingWindowSpec(sliding_window=1024, **shape)
        >>> layers = {f"layer.{i}": full if i % 3 == 2 else window for i in range(6)}
        >>> [group.layer_names for group in get_kv_cache_groups(layers)]
        [['layer.0', 'layer.3'], ['layer.1', 'layer.4'], ['layer.2', 'layer.5']]
    """
def get_max_concurrency_for_kv_cache_config(kv_cache_config: KVCacheConfig, *, max_model_len: int, max_in_flight_tokens: int) -> float:
    """
    Requests of `max_model_len` tokens that the blocks hold at a time.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_utils.py::get_max_concurrency_for_kv_cache_config.
    """
def hash_block_tokens(parent: bytes, token_ids: collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.integer], extra_keys: collections.abc.Sequence[collections.abc.Sequence[bytes | str | int]] | None = None) -> bytes:
    """
    sha256_cbor((parent, token_ids, extra_keys)); see paged_kv.hashing.hash_block_tokens.
    """
def hash_full_blocks(request: typing.Any, token_ids: collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.integer], block_size: int, first_block: int, parent: bytes) -> BlockHashList:
    """
    Hashes of a request's full blocks, from block `first_block` on.
    
    Args:
        request: Where the extra keys come from, as in `generate_block_hash_extra_keys`.
        token_ids: The tokens from block `first_block` on: an int32 or int64 array (not copied), or a
            sequence of ints.
        block_size: Tokens per block.
        first_block: Index of the first block in the request.
        parent: Hash of the block before it; `paged_kv.hashing.NONE_HASH` for block 0.
    
    Returns:
        One hash for each full block; a partial last block has none.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_utils.py::get_request_block_hasher.
    """
def make_block_hash_with_group_id(block_hash: bytes, group_id: int) -> bytes:
    """
    Key of the prefix cache: the hash, then the group id as 4 big-endian bytes.
    """
def num_prefix_contents() -> int:
    """
    Contents of prefixes that are kept for `xxhash_cbor`: blocks of requests, and cached ones.
    """
def sha256(message: bytes, backend: str | None = None) -> bytes:
    """
    SHA-256 of `message`, 32 bytes, for tests of the backends.
    
    Raises:
        ValueError: a backend that is not in `sha256_backends()`.
    
    Example:
        >>> sha256(b"abc").hex()[:8]
        'ba7816bf'
    """
def sha256_backends() -> list[str]:
    """
    Implementations of SHA-256 that this CPU can run, the one in use first.
    
    ``sha-ni`` uses the CPU's SHA instructions. The environment variable PAGED_KV_PORTABLE_SHA256=1 turns
    to ``portable``; it is read once, at the first hash. Both give the same digests.
    """
def sha256_cbor(value: typing.Any) -> bytes:
    """
    SHA-256 of the canonical CBOR encoding of `value`.
    
    Args:
        value: None, int of 64 bits, str, bytes, or a tuple or list of these.
    
    Raises:
        TypeError: another type.
    
    Source:
        vLLM 0.32 utils/hashing.py::sha256_cbor.
    
    Example:
        >>> sha256_cbor("vllm-none-hash").hex()[:8]
        '9bd96a48'
    """
def unify_kv_cache_spec_page_size(kv_cache_spec: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """
    The same layers with blocks of equal bytes.
    
    A page that divides the largest one gets a larger block, another is padded.
    
    Args:
        kv_cache_spec: The spec of each layer.
    
    Source:
        vLLM 0.32 v1/core/kv_cache_utils.py::unify_kv_cache_spec_page_size.
    """
def xxh3_128(message: bytes) -> bytes:
    """
    XXH3 of `message`, 16 bytes, the most significant first. For tests.
    
    Example:
        >>> xxh3_128(b"abc").hex()[:8]
        '06b05ab6'
    """
def xxhash_cbor(value: typing.Any) -> bytes:
    """
    128-bit XXH3 of the canonical CBOR encoding of `value`.
    
    Faster than `sha256_cbor`, but whoever chooses tokens or keys can make two values with one hash; a
    cache must compare more than the hash.
    
    Args:
        value: As in `sha256_cbor`.
    
    Returns:
        16 bytes.
    
    Raises:
        TypeError: another type.
    
    Source:
        vLLM 0.32 utils/hashing.py::xxhash_cbor.
    
    Example:
        >>> len(xxhash_cbor((b"parent", (1, 2, 3), None)))
        16
    """
__version__: str = '0.1.0'
