# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator,name-defined"
"""Attention with a decomposed relative-position bias as one kernel in Triton, which never writes the bias out.

The bias of a query and a key is ``rows[query, row of key] + columns[query, column of key]`` (Li et al., *MViTv2*,
2022; ViTDet; Segment Anything). The softmax is that of flash attention (Dao, *FlashAttention-2*, 2023): one pass over
the keys with a running maximum and sum. A block of keys holds whole rows, or a part of one row, each filled up to a
power of two: so the bias by column is the same in every block of whole rows and is read once, and where a block is one
row, that by row is one number for each query.
"""

from typing import Any

import torch


def attention_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(query key^T * scale + bias) value, with the bias written out, in the type of the arguments.

    `query`, `key`, `value`: batch x heads x tokens x channels, where tokens = height * width; `rows`: batch x heads x
    tokens x height; `columns`: batch x heads x tokens x width."""
    bias = (rows[..., :, None] + columns[..., None, :]).flatten(-2)
    return torch.softmax(query @ key.transpose(-2, -1) * scale + bias, -1) @ value


def decomposed_attention_kernels() -> Any:
    """The kernel itself, and the kernel with the block sizes that are fastest for each shape. ImportError in one line
    where Triton is not installed."""
    global tl  # Triton looks its language up among the globals
    try:
        import triton
        import triton.language as tl
    except ImportError:
        raise ImportError("attention=fused is written in Triton, which is not installed: pip install triton") from None

    @triton.jit
    def attend(
        query, key, value, rows, columns, out, scale,
        query_batch, query_head, query_token, key_batch, key_head, key_token,
        value_batch, value_head, value_token, rows_batch, rows_head, rows_token,
        columns_batch, columns_head, columns_token, out_batch, out_head, out_token,
        heads, tokens, height,
        WIDTH: tl.constexpr, PADDED: tl.constexpr, CHANNELS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
        PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        # A row of keys, WIDTH, is filled up to PADDED. Channels are handled as FIRST, a power of two, and REST, another
        # one or none: 80 as 64 + 16 and not as 128.
        TOGETHER: tl.constexpr = (BLOCK_N + PADDED - 1) // PADDED  # rows of keys in a block
        PARTS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N  # blocks in a row of keys
        LOG2_E: tl.constexpr = 1.4426950408889634

        blocks = tl.cdiv(tokens, BLOCK_M)
        which = tl.program_id(0) // blocks
        batch, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
        query += batch * query_batch + head * query_head
        key += batch * key_batch + head * key_head
        value += batch * value_batch + head * value_head
        rows += batch * rows_batch + head * rows_head
        columns += batch * columns_batch + head * columns_head
        out += batch * out_batch + head * out_head

        m = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
        m_is = m < tokens
        n = tl.arange(0, BLOCK_N)
        c = tl.arange(0, FIRST)
        c_is = c < CHANNELS
        query_1 = tl.load(query + m[:, None] * query_token + c[None], m_is[:, None] & c_is[None], 0.0)
        sum_1 = tl.zeros([BLOCK_M, FIRST], tl.float32)
        if REST:
            d = FIRST + tl.arange(0, REST)
            d_is = d < CHANNELS
            query_2 = tl.load(query + m[:, None] * query_token + d[None], m_is[:, None] & d_is[None], 0.0)
            sum_2 = tl.zeros([BLOCK_M, REST], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        scale *= LOG2_E
        if PARTS == 1:
            column = n % PADDED
            n_is = column < WIDTH
            by_column = tl.load(columns + m[:, None] * columns_token + column[None], m_is[:, None] & n_is[None], 0.0)
            by_column = by_column.to(tl.float32) * LOG2_E

        for block in range(tl.cdiv(height, TOGETHER) * PARTS):
            first = block // PARTS * TOGETHER
            row = first + n // PADDED
            if PARTS > 1:
                column = block % PARTS * BLOCK_N + n
                n_is = column < WIDTH
                by_column = tl.load(
                    columns + m[:, None] * columns_token + column[None], m_is[:, None] & n_is[None], 0.0
                ).to(tl.float32) * LOG2_E  # fmt: skip
            if TOGETHER == 1:
                by_row = tl.load(rows + m * rows_token + first, m_is, 0.0)[:, None]
                valid = n_is
            else:
                valid = n_is & (row < height)
                by_row = tl.load(rows + m[:, None] * rows_token + row[None], m_is[:, None] & valid[None], 0.0)
            token = row * WIDTH + column
            key_1 = tl.load(key + token[None] * key_token + c[:, None], valid[None] & c_is[:, None], 0.0)
            scores = tl.dot(query_1, key_1, input_precision=PRECISION)
            if REST:
                key_2 = tl.load(key + token[None] * key_token + d[:, None], valid[None] & d_is[:, None], 0.0)
                scores = tl.dot(query_2, key_2, scores, input_precision=PRECISION)
            scores = scores * scale + (by_row.to(tl.float32) * LOG2_E + by_column)
            if TOGETHER > 1 or WIDTH % BLOCK_N:
                scores = tl.where(valid[None], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(weights, 1)
            top = higher
            value_1 = tl.load(value + token[:, None] * value_token + c[None], valid[:, None] & c_is[None], 0.0)
            weights = weights.to(value_1.dtype)
            sum_1 = tl.dot(weights, value_1, sum_1 * shrink[:, None], input_precision=PRECISION)
            if REST:
                value_2 = tl.load(value + token[:, None] * value_token + d[None], valid[:, None] & d_is[None], 0.0)
                sum_2 = tl.dot(weights, value_2, sum_2 * shrink[:, None], input_precision=PRECISION)

        to = out + m[:, None] * out_token
        tl.store(to + c[None], (sum_1 / total[:, None]).to(out.dtype.element_ty), m_is[:, None] & c_is[None])
        if REST:
            tl.store(to + d[None], (sum_2 / total[:, None]).to(out.dtype.element_ty), m_is[:, None] & d_is[None])

    # Queries in a block, keys in a block, warps, stages of the loads. None spills registers: bench/kernels.py.
    half = [(128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 8, 3), (64, 32, 4, 4), (128, 16, 4, 4), (64, 16, 4, 4)]
    full = [(32, 32, 8, 2), (32, 32, 4, 2), (64, 16, 16, 2), (32, 16, 4, 2)]

    def config(m: int, n: int, warps: int, stages: int) -> Any:
        return triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)

    half_configs, full_configs = [config(*one) for one in half], [config(*one) for one in full]

    def fitting(configs: Any, arguments: Any, **more: Any) -> Any:
        # Fewer keys than a row has would read the bias by column again and again; several rows of float32 spill.
        is_full = arguments["query"].dtype == torch.float32
        some, most = (full_configs, max(16, more["PADDED"])) if is_full else (half_configs, 64)
        sizes, tokens = range(min(more["PADDED"], 32), most + 1), max(64, arguments["tokens"])
        return [one for one in some if one.kwargs["BLOCK_M"] <= tokens and one.kwargs["BLOCK_N"] in sizes]

    key = ["heads", "tokens", "height", "WIDTH", "CHANNELS", "PRECISION"]
    tuned = triton.autotune(half_configs + full_configs, key, prune_configs_by={"early_config_prune": fitting})(attend)
    return attend, tuned


def launch_decomposed_attention(
    kernel: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor,
    scale: float, **blocks: int,
) -> torch.Tensor:  # fmt: skip
    """What `attention_reference` says by one of `decomposed_attention_kernels`, `blocks` of the first; any strides. The
    result lies in memory as batch x tokens x heads x channels."""
    batch, heads, tokens, channels = query.shape
    height, width = rows.shape[-1], columns.shape[-1]
    out = query.new_empty(batch, tokens, heads, channels).transpose(1, 2)
    tensors = [item if item.stride(-1) == 1 else item.contiguous() for item in (query, key, value, rows, columns)]
    strides = [stride for item in (*tensors, out) for stride in item.stride()[:3]]
    first = 1 << channels.bit_length() - 1
    rest = max(16, 1 << (channels - first - 1).bit_length()) if channels > first else 0
    if first < 16 or rest >= first:
        first, rest = max(16, 1 << (channels - 1).bit_length()), 0
    chosen = torch.backends.cuda.matmul.fp32_precision
    if chosen == "none":  # no setting of its own
        chosen = torch.backends.fp32_precision  # type: ignore[attr-defined]
    precision = "tf32" if chosen == "tf32" else "ieee"

    def grid(chosen: Any) -> tuple[int]:
        return (-(-tokens // chosen["BLOCK_M"]) * batch * heads,)

    on: Any = torch.cuda.device_of  # Triton launches on the current device
    with on(query):
        kernel[grid](
            *tensors, out, scale, *strides, heads, tokens, height, WIDTH=width, PADDED=1 << (width - 1).bit_length(),
            CHANNELS=channels, FIRST=first, REST=rest, PRECISION=precision, enable_fp_fusion=True, **blocks,
        )  # fmt: skip
    return out


def decomposed_attention() -> Any:
    """The kernel as an operator of torch, which torch.compile and torch.export keep as it is: takes and returns what
    `attention_reference` does."""
    if hasattr(torch.ops.optimized, "decomposed_attention"):
        return torch.ops.optimized.decomposed_attention
    _, tuned = decomposed_attention_kernels()

    @torch.library.custom_op("optimized::decomposed_attention", mutates_args=())
    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        return launch_decomposed_attention(tuned, query, key, value, rows, columns, scale)

    @attend.register_fake
    def shaped(query: Any, key: Any, value: Any, rows: Any, columns: Any, scale: float) -> Any:
        batch, heads, tokens, channels = query.shape
        return query.new_empty(batch, tokens, heads, channels).transpose(1, 2)

    return attend


DECOMPOSED_ATTENTION = (decomposed_attention_kernels, launch_decomposed_attention, decomposed_attention)
