"""Plain torch in place of SGLang's CPU kernels, for tests with tiny shapes.

`torch.ops.sgl_kernel.convert_weight_packed` must stay undefined: with it, SGLang would take the CPU
for one with AMX and leave its native layers.
"""

import ctypes

import torch

TREE_ALONE, PREFIX_AND_TREE = 1, 0
"""Layouts of a tree mask, as SGLang numbers them."""


def _spans(*columns):
    return zip(*(column.tolist() for column in columns), strict=True)


def assign_req_to_token_pool_cpu(pool_rows, req_to_token, start, end, slots, _pool_len):
    offset = 0
    for row, first, last in _spans(pool_rows, start, end):
        count = last - first
        req_to_token[row, first:last] = slots[offset : offset + count].to(req_to_token.dtype)
        offset += count


def assign_extend_cache_locs_cpu(pool_rows, req_to_token, start, end, slots, _pool_len):
    offset = 0
    for row, first, last in _spans(pool_rows, start, end):
        count = last - first
        slots[offset : offset + count] = req_to_token[row, first:last].to(slots.dtype)
        offset += count


def assign_draft_cache_locs_contiguous_cpu(
    pool_rows, req_to_token, seq_lens, slots, _pool_len, topk, num_steps
):
    blocks = slots.view(-1, topk * num_steps)
    for block, row, length in zip(blocks, pool_rows.tolist(), seq_lens.tolist(), strict=True):
        block.copy_(req_to_token[row, length : length + topk * num_steps])


def build_draft_decode_metadata_cpu(req_to_token, pool_rows, seq_lens, topk, num_steps, pool_len):
    branches = torch.zeros((len(pool_rows), topk, pool_len), dtype=req_to_token.dtype)
    for block, row, length in zip(branches, pool_rows.tolist(), seq_lens.tolist(), strict=True):
        block[:, :length] = req_to_token[row, :length]
        drafted = req_to_token[row, length : length + topk * num_steps]
        block[:, length : length + num_steps] = drafted.view(topk, num_steps)
    return branches.view(-1, pool_len)


def fill_accept_out_cache_loc_cpu(accept_index, slots, accepted_slots, size=None):
    accepted = accept_index.flatten()[:size]
    accepted = accepted[accepted >= 0].long()
    accepted_slots[: len(accepted)] = slots[accepted]


def fill_bonus_tokens_cpu(tokens, accept_lens, bonus_tokens, stride):
    rows = tokens.view(len(accept_lens), stride)
    bonus_tokens.copy_(rows.gather(1, accept_lens.long()[:, None] - 1)[:, 0])


def copy_all_layer_kv_cache_cpu(pointers, strides, destination, source):
    for pointer, stride in _spans(pointers, strides):
        rows = [ctypes.string_at(pointer + slot * stride, stride) for slot in source.tolist()]
        for slot, row in zip(destination.tolist(), rows, strict=True):
            ctypes.memmove(pointer + slot * stride, row, stride)


def rotate_input_ids_cpu(input_ids, starts, seq_lens, next_tokens, select_index=None):
    for row, (start, length) in enumerate(_spans(starts, seq_lens)):
        if length:
            block = input_ids[start : start + length]
            block[:-1] = block[1:].clone()
            last = start + length - 1 if select_index is None else int(select_index[row])
            input_ids[last] = next_tokens.flatten()[row]


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    next_token,
    next_sibling,
    topk,
    _depth,
    num_nodes,
    mode,
):
    offset = 0
    for row, length in enumerate(seq_lens.tolist()):
        selected, parents_of_groups = selected_index[row].tolist(), parent_list[row].tolist()
        parents = [0] * num_nodes
        for node in range(1, num_nodes):
            group = selected[node - 1] // topk
            if group:
                parents[node] = selected.index(parents_of_groups[group]) + 1
        retrieve_index[row] = torch.arange(row * num_nodes, (row + 1) * num_nodes)
        for node in range(num_nodes - 1, 0, -1):
            next_sibling[row, node] = next_token[row, parents[node]]
            next_token[row, parents[node]] = node
        sees = torch.eye(num_nodes, dtype=torch.bool)
        for node in range(1, num_nodes):
            sees[node] |= sees[parents[node]]
        positions[row * num_nodes : (row + 1) * num_nodes] = length + sees.sum(1) - 1
        width = num_nodes if int(mode) == TREE_ALONE else length + num_nodes
        block = tree_mask[offset : offset + num_nodes * width].view(num_nodes, width)
        block[:, width - num_nodes :] = sees
        offset += num_nodes * width


def verify_tree_greedy_cpu(
    *,
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    wanted = target_predict.flatten()
    for row in range(len(candidates)):
        node, depth = 0, 0
        while True:
            place = int(retrive_index[row, node])
            accept_index[row, depth] = place
            predicts[place] = wanted[place].to(predicts.dtype)
            child = int(retrive_next_token[row, node])
            while child != -1 and int(candidates[row, child]) != int(wanted[place]):
                child = int(retrive_next_sibling[row, child])
            if child == -1 or depth + 1 == accept_index.shape[1]:
                break
            node, depth = child, depth + 1
        accept_token_num[row] = depth


def _attend(q, keys, values, visible, scale):
    group = q.shape[1] // keys.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float().repeat_interleave(group, 1))
    weights = (scores * scale).masked_fill(~visible, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, values.float().repeat_interleave(group, 1))
    return out.to(q.dtype)


def _require_plain(logit_cap, is_cross, window, sinks):
    if logit_cap or is_cross or window > 0 or sinks is not None:
        raise NotImplementedError("stand-in attention has no cap, cross attention, window or sinks")


def _drop_scales(arguments):
    """From 0.5.20 on, two scales come first; they are 1 without a quantised cache."""
    return arguments if isinstance(arguments[0], torch.Tensor) else arguments[2:]


def extend_attention_cpu(q, _k, _v, out, key_buffer, value_buffer, *arguments):
    (
        req_to_token,
        pool_rows,
        seq_lens,
        extend_lens,
        starts,
        _max_extend_len,
        scale,
        logit_cap,
        is_cross,
        window,
        _encoder_lens,
        sinks,
        tree_mask,
        is_causal,
    ) = _drop_scales(arguments)
    _require_plain(logit_cap, is_cross, window, sinks)
    offset = 0
    for row, length, count, start in _spans(pool_rows, seq_lens, extend_lens, starts):
        slots = req_to_token[row, :length].long()
        visible = torch.ones((count, length), dtype=torch.bool)
        if tree_mask is not None:
            block = tree_mask.flatten()[offset : offset + count * count]
            visible[:, length - count :] = block.view(count, count)
            offset += count * count
        elif is_causal:
            visible = visible.tril(length - count)
        queries = slice(start, start + count)
        out[queries] = _attend(q[queries], key_buffer[slots], value_buffer[slots], visible, scale)


def decode_attention_cpu(q, key_buffer, value_buffer, *arguments):
    (
        out,
        k,
        v,
        slots,
        _logits,
        req_to_token,
        pool_rows,
        seq_lens,
        scale,
        logit_cap,
        is_cross,
        window,
        _encoder_lens,
        sinks,
    ) = _drop_scales(arguments)
    _require_plain(logit_cap, is_cross, window, sinks)
    if k is not None:
        key_buffer[slots] = k.view(-1, *key_buffer.shape[1:]).to(key_buffer.dtype)
        value_buffer[slots] = v.view(-1, *value_buffer.shape[1:]).to(value_buffer.dtype)
    for query, (row, length) in enumerate(_spans(pool_rows, seq_lens)):
        read = req_to_token[row, :length].long()
        visible = torch.ones((1, length), dtype=torch.bool)
        out[query : query + 1] = _attend(
            q[query : query + 1], key_buffer[read], value_buffer[read], visible, scale
        )


# Attributes of the namespace, not registered operators: no schema to keep in step with SGLang.
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu


def merge_state_v2(out, lse, other_out, other_lse):
    """Of attention to two sets of keys, that to both; [n, H, D] outputs, [n, H] logarithms."""
    both = torch.logaddexp(lse, other_lse)
    share, other_share = ((part - both).exp()[:, :, None] for part in (lse, other_lse))
    return (share * out + other_share * other_out).to(out.dtype), both
