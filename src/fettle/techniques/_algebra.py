"""Fewer products for the same answers: an exported graph in which nothing is computed twice that is equal along a
batch, and in which projections of attention are applied to the side with fewer tokens.

Equal along a batch: what `expand`, `repeat` and `repeat_interleave` make of one row keeps the size of one row through
all operators that treat rows alike, and meets the others by broadcasting.

Projections: with queries Q, keys X Wk and values X Wv, Q (X Wk)^T = (Q Wk^T) X^T and P (X Wv) = (P X) Wv. For few
queries and many keys the right sides are less work, and X is neither projected nor cut into heads. For few keys and
many queries so are (X Wq) K^T = X (Wq K^T) and (P V) Wo = P (V Wo). A bias of keys adds the same to all scores of a
query, of which softmax takes no notice; a bias of values is added once, since the weights of a query sum to 1.
"""

from typing import Any

import torch

from fettle.techniques._exported import exported_program


def equal_after_reshape(before: Any, after: Any, equal: set[int]) -> Any:
    """Dimensions of a reshaped tensor along which it is equal, where it was along `equal` before; None where such a
    dimension was cut or joined with another."""
    found, left, right = set(), 0, 0
    while left < len(before) or right < len(after):
        old, new = left, right
        sizes = [1, 1]
        while True:  # the next dimensions on both sides that hold as many numbers
            if left < len(before) and (sizes[0] <= sizes[1] or right == len(after)):
                sizes[0], left = sizes[0] * before[left], left + 1
            else:
                sizes[1], right = sizes[1] * after[right], right + 1
            if sizes[0] == sizes[1]:
                break
        if any(dim in equal for dim in range(old, left)):
            wide = [dim for dim in range(new, right) if after[dim] > 1]
            if sum(before[dim] > 1 for dim in range(old, left)) != 1 or len(wide) != 1:
                return None
            found.add(wide[0])
    return found


def equal_dims(node: torch.fx.Node, equal: Any) -> Any:
    """Dimensions along which an operator's answer is equal when those of its inputs are, and it can be given inputs of
    size 1 there; None where that is not known. `equal` has the dimensions of all nodes before."""
    aten, target, args = torch.ops.aten, node.target, node.args
    pointwise = {
        aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.relu.default, aten.gelu.default,
        aten.silu.default, aten.sigmoid.default, aten.tanh.default, aten.exp.default, aten.neg.default,
        aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.contiguous.default,
    }  # fmt: skip
    inputs, shape = node.all_input_nodes, node.meta["val"].shape
    own, size, rank = equal[inputs[0]], inputs[0].meta["val"].shape, len(shape)

    def in_all(dims: Any) -> set[int]:
        """Those of `dims` along which all inputs are equal, which meet from the right."""
        found = set()
        for dim in dims:
            places = [(item, dim - rank + item.meta["val"].dim()) for item in inputs]
            if shape[dim] > 1 and all(
                place < 0 or item.meta["val"].shape[place] == 1 or place in equal[item] for item, place in places
            ):
                found.add(dim)
        return found

    if target in pointwise:
        return in_all(range(rank))
    if target is aten.linear.default:
        return None if rank - 1 in own or any(equal[item] for item in inputs[1:]) else own
    if target is aten.layer_norm.default:
        return None if any(dim >= rank - len(args[1]) for dim in own) else own  # type: ignore[arg-type]
    if target is aten.softmax.int:
        return None if args[1] % rank in own else own  # type: ignore[operator]
    if target in (aten.conv2d.default, aten.conv_transpose2d.input):
        return None if own - {0} or any(equal[item] for item in inputs[1:]) else own
    if target is aten.transpose.int:
        one, other = (dim % rank for dim in args[1:3])  # type: ignore[operator]
        return {{one: other, other: one}.get(dim, dim) for dim in own}
    if target is aten.permute.default:
        order = [dim % rank for dim in args[1]]  # type: ignore[union-attr, operator]
        return {order.index(dim) for dim in own}
    if target is aten.unsqueeze.default:
        return {dim + (dim >= args[1] % rank) for dim in own}  # type: ignore[operator]
    if target in (aten.flatten.using_ints, aten.reshape.default, aten.view.default):
        return equal_after_reshape(size, shape, own)
    batched = target is aten.matmul.default or (target is aten.scaled_dot_product_attention.default and len(args) == 3)
    if batched and not node.kwargs.get("attn_mask") and all(item.meta["val"].dim() == rank for item in inputs):
        rows = not any(dim >= rank - 2 for item in inputs for dim in equal[item])
        return in_all(range(rank - 2)) if rows else None
    return None


def shares_keys(node: torch.fx.Node, equal: Any) -> bool:
    """Whether `node` is attention of a batch of queries to keys and values that are the same for all of the batch."""
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default or set(node.kwargs) - {"scale"}:
        return False
    if len(node.args) != 3 or node.meta["val"].dim() != 4:
        return False
    query, key, value = node.args
    same_heads = query.meta["val"].shape[1] == key.meta["val"].shape[1]  # type: ignore[union-attr]
    return same_heads and not equal[query] and equal[key] == equal[value] == {0}


def rows_once(traced: Any) -> tuple[Any, int]:
    """A graph module that computes once what is equal along a dimension because it was repeated, and how many of its
    operators are smaller for that. `traced` is an export with shapes in ``meta["val"]``.

    Queries of a batch that attend to the same keys become the queries of one attention, which reads the keys once."""
    aten, graph = torch.ops.aten, torch.fx.Graph()
    new: dict[Any, Any] = {}
    equal: dict[Any, set[int]] = {}  # dimensions that have size 1 in the new graph
    whole: dict[Any, Any] = {}
    smaller = 0

    def full(node: torch.fx.Node) -> Any:
        if equal[node] and node not in whole:
            whole[node] = graph.call_function(aten.expand.default, (new[node], list(node.meta["val"].shape)))
        return whole.get(node, new[node])

    for node in traced.graph.nodes:
        inputs, value = node.all_input_nodes, node.meta.get("val")
        equal[node] = set()
        plain = isinstance(value, torch.Tensor) and inputs and all("val" in item.meta for item in inputs)
        if plain and node.target in (aten.repeat_interleave.self_int, aten.expand.default, aten.repeat.default):
            size, own = inputs[0].meta["val"].shape, equal[inputs[0]]
            grown = {dim for dim in range(len(size)) if value.dim() == len(size) and value.shape[dim] != size[dim]}
            if grown and all(size[dim] == 1 or dim in own for dim in grown):
                new[node], equal[node] = new[inputs[0]], own | grown
                continue
        if plain and shares_keys(node, equal):
            query, key, value = node.args
            batch, heads, tokens, width = query.meta["val"].shape
            turned = graph.call_function(aten.permute.default, (full(query), [1, 0, 2, 3]))
            joined = graph.call_function(aten.reshape.default, (turned, [1, heads, batch * tokens, width]))
            answer = graph.call_function(node.target, (joined, new[key], new[value]), node.kwargs)
            cut = graph.call_function(aten.reshape.default, (answer, [heads, batch, tokens, node.meta["val"].shape[3]]))
            new[node], smaller = graph.call_function(aten.permute.default, (cut, [1, 0, 2, 3])), smaller + 1
            continue
        found = equal_dims(node, equal) if plain and any(equal[item] for item in inputs) else None
        if found is None:
            new[node] = graph.node_copy(node, full)
            continue
        smaller, equal[node] = smaller + bool(found), found
        if node.target in (aten.flatten.using_ints, aten.reshape.default, aten.view.default):
            sizes = [1 if dim in found else size for dim, size in enumerate(value.shape)]
            new[node] = graph.call_function(aten.reshape.default, (new[inputs[0]], sizes))
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
    return torch.fx.GraphModule(traced, graph), smaller


def with_shapes(module: Any, tensors: Any) -> Any:
    """A graph module whose nodes have their shapes in ``meta["val"]``; nothing is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    module.graph.eliminate_dead_code()
    module.recompile()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        FakeTensorProp(module, mode).propagate(*tensors)
    return module


def through(node: Any, *targets: Any) -> Any:
    """What goes into a chain of operators that ends in `node`, each read by the next alone; None for other nodes."""
    for target in targets:
        if not isinstance(node, torch.fx.Node) or node.target is not target or len(node.users) != 1:
            return None
        node = node.args[0]
    return node


def head_projection(node: Any) -> Any:
    """The linear operator that `node` [batch, heads, tokens, width] is the cut into heads of; else None."""
    aten = torch.ops.aten
    for cut in (aten.reshape.default, aten.view.default):
        linear = through(node, aten.transpose.int, cut)
        if linear is None or linear.target is not aten.linear.default or len(linear.users) != 1:
            continue
        rows, (_, heads, tokens, width) = linear.meta["val"].shape, node.meta["val"].shape
        if set(node.args[1:]) in ({1, 2}, {-2, -3}) and rows[-1] == heads * width and rows[-2] == tokens:
            return linear
    return None


def merged_projection(node: torch.fx.Node) -> Any:
    """The linear operator that the answer of attention goes to, once its heads are joined again; else None."""
    aten, (batch, heads, tokens, width) = torch.ops.aten, node.meta["val"].shape
    reshapes = (aten.reshape.default, aten.view.default, aten.contiguous.default, aten.clone.default)
    turned, last = False, node
    while len(last.users) == 1:
        after = next(iter(last.users))
        shape = last.meta["val"].shape
        if after.target is aten.linear.default:
            joined = turned and after.args[0] is last and shape[-1] == heads * width and shape[-2] == tokens
            return after if joined else None
        if after.target is aten.transpose.int and not turned and shape == (batch, heads, tokens, width):
            if set(after.args[1:]) not in ({1, 2}, {-2, -3}):
                return None
            turned = True
        elif after.target not in reshapes or (not turned and after.meta["val"].shape != shape):
            return None
        last = after
    return None


def fold_attention(traced: Any) -> tuple[int, float]:
    """Apply projections of attention to the side with fewer tokens where that is less work: at how many places of
    `traced`, which is changed, and how much of all products of attention and its projections is left, 0 to 1."""
    aten, graph = torch.ops.aten, traced.graph
    done, before, after = 0, 0, 0

    def work(linear: Any) -> int:
        return int(linear.meta["val"].numel() * linear.args[1].meta["val"].shape[1]) if linear is not None else 0

    def make(target: Any, *args: Any) -> Any:
        return graph.call_function(target, args)

    def reshape(item: Any, *sizes: int) -> Any:
        return make(aten.reshape.default, item, list(sizes))

    def turn(item: Any) -> Any:
        return make(aten.transpose.int, item, -2, -1)

    def per_head(linear: Any) -> Any:
        """Weight of a projection into heads: heads x width x inputs."""
        weight = linear.args[1]
        return reshape(weight, heads, -1, weight.meta["val"].shape[1])

    def rows(linear: Any) -> Any:
        """What is projected: batch or 1 x tokens x inputs."""
        return reshape(linear.args[0], -1, *linear.args[0].meta["val"].shape[-2:])

    def bias(linear: Any) -> Any:
        return linear.args[2] if len(linear.args) > 2 else None

    for node in [node for node in graph.nodes if node.target is aten.scaled_dot_product_attention.default]:
        if len(node.args) > 3 or set(node.kwargs) - {"scale"} or node.meta["val"].dim() != 4:
            continue
        query, key, value = node.args
        (batch, heads, queries, width), (_, kept, keys, depth) = node.meta["val"].shape, key.meta["val"].shape
        if kept != heads or value.meta["val"].shape[1] != heads:
            continue  # fewer heads for keys than for queries
        *linears, out = *map(head_projection, (query, key, value)), merged_projection(node)
        pairs = batch * heads * queries * keys
        plain_scores, plain_sums = work(linears[0]) + work(linears[1]) + pairs * depth, pairs * width
        plain_sums += work(linears[2]) + work(out)
        # The side with many tokens is left as it is; its projection is applied to what it meets.
        few_keys = keys < queries
        near, far, end = (linears[0], linears[1], out) if few_keys else (linears[1], linears[0], linears[2])
        small, large, few, many = (key, query, keys, queries) if few_keys else (query, key, queries, keys)
        scores, sums = plain_scores, plain_sums
        if near is not None:
            inputs = near.args[1].meta["val"].shape[1]
            scores = work(far) + batch * heads * few * depth * inputs + pairs * inputs
        if end is not None:
            outer = end.args[1].meta["val"].shape[0 if few_keys else 1]
            sums = (work(linears[2]) if few_keys else work(out)) + batch * heads * few * width * outer + pairs * outer
        fold_scores, fold_sums = scores < plain_scores, sums < plain_sums
        best, given = min(scores, plain_scores) + min(sums, plain_sums), plain_scores + plain_sums
        before, after = before + given, after + (best if best < 0.8 * given else given)
        if best >= 0.8 * given:
            continue
        done += 1
        scale = node.kwargs.get("scale") or depth**-0.5
        with graph.inserting_before(node):
            small = make(aten.mul.Tensor, small, scale)
            if fold_scores:
                folded = reshape(make(aten.matmul.default, small, per_head(near)), -1, heads * few, inputs)
                found = reshape(make(aten.matmul.default, folded, turn(rows(near))), batch, heads, few, many)
                if few_keys and bias(near) is not None:
                    constant = make(aten.matmul.default, small, reshape(bias(near), heads, depth, 1))
                    found = make(aten.add.Tensor, found, constant)
            else:
                found = make(aten.matmul.default, small, turn(large))
            weights = make(aten.softmax.int, found, 2 if few_keys else 3)  # few x many tokens
        last = out if few_keys and fold_sums else node
        with graph.inserting_before(last):
            if few_keys and fold_sums:
                back = reshape(turn(out.args[1]), heads, width, outer)
                small = reshape(make(aten.matmul.default, value, back), -1, heads * keys, outer)
                answer = make(aten.matmul.default, turn(reshape(weights, batch, heads * keys, queries)), small)
                if bias(out) is not None:
                    answer = make(aten.add.Tensor, answer, bias(out))
                answer = reshape(answer, *out.meta["val"].shape)
            elif fold_sums:
                answer = make(aten.matmul.default, reshape(weights, batch, heads * queries, keys), rows(end))
                answer = reshape(answer, batch, heads, queries, -1)
                answer = make(aten.matmul.default, answer, turn(per_head(end)))
                if bias(end) is not None:
                    answer = make(aten.add.Tensor, answer, reshape(bias(end), heads, 1, width))
            else:
                answer = make(aten.matmul.default, turn(weights) if few_keys else weights, value)
        last.replace_all_uses_with(answer)
        while last is not node:  # attention counts as random, so that it is not taken away as dead code
            unused, last = last, last.args[0]
            graph.erase_node(unused)
        graph.erase_node(node)
    return done, after / max(1, before)


def patches_by_products(traced: Any) -> Any:
    """Transposed convolutions whose patches do not overlap, as the plain products that they are: `traced`, changed.

    An output pixel is then one product of an input pixel's channels, and its channels lie next to each other."""
    aten, graph = torch.ops.aten, traced.graph
    for node in [node for node in graph.nodes if node.target is aten.conv_transpose2d.input]:
        defaults: tuple[Any, ...] = (None, 1, 0, 0, 1, 1)
        given: tuple[Any, ...] = (*node.args, *defaults[len(node.args) - 2 :])
        (x, weight, bias, *_), (stride, padding, more, groups, dilation) = given, given[3:]
        (count, channels, height, width), (_, outputs, *size) = x.meta["val"].shape, weight.meta["val"].shape

        def pair(step: Any) -> list[int]:
            """An argument for both dimensions: a number, or a list of one or two."""
            return [*step, *step][:2] if isinstance(step, (list, tuple)) else [step, step]

        if pair(stride) != size or pair(padding) != [0, 0] or pair(more) != [0, 0] or pair(dilation) != [1, 1]:
            continue
        if groups != 1:
            continue
        with graph.inserting_before(node):

            def make(target: Any, *args: Any) -> Any:
                return graph.call_function(target, args)

            tall, wide = size
            by_output = make(aten.reshape.default, make(aten.permute.default, weight, [2, 3, 1, 0]), [-1, channels])
            rows = make(aten.linear.default, make(aten.permute.default, x, [0, 2, 3, 1]), by_output)
            cut = make(aten.reshape.default, rows, [count, height, width, tall, wide, outputs])
            turned = make(aten.permute.default, cut, [0, 1, 3, 2, 4, 5])
            joined = make(aten.reshape.default, turned, [count, height * tall, width * wide, outputs])
            answer = make(aten.add.Tensor, joined, bias) if bias is not None else joined
            node.replace_all_uses_with(make(aten.permute.default, answer, [0, 3, 1, 2]))
        graph.erase_node(node)
    return traced


def fewer_products(flat: torch.nn.Module, tensors: Any) -> Any:
    """`flat`, a module from tensors to tensors, with what `rows_once` and `fold_attention` save, checked on `tensors`.

    Raises RuntimeError where there is nothing to save, or where the answers are not the same but for rounding.
    """
    import logging

    program = exported_program(flat, tensors)
    traced = with_shapes(program.module(check_guards=False), tensors)
    traced, smaller = rows_once(traced)
    traced = with_shapes(traced, tensors)
    folded, left = fold_attention(traced)
    if not smaller and not folded:
        raise RuntimeError("algebra: 0 operators are equal along a batch, 0 projections are less work folded")
    if any(tensor.is_cuda for tensor in tensors):  # a compiler that fuses is to follow
        patches_by_products(traced)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    for wanted, found in zip(flat(*tensors), traced(*tensors), strict=True):
        error, limit = 0.0, 1e-3
        if wanted.is_floating_point():
            error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
            limit = max(limit, 4 * torch.finfo(wanted.dtype).eps)  # sums in another order are rounded otherwise
        if found.shape != wanted.shape or not error < limit:
            raise RuntimeError(f"algebra: the answers are others, by {error:.2g}")
    logging.getLogger("optimized").info(
        "algebra: %d operators computed once for a batch, %d attentions folded; %.0f%% of their products are left",
        smaller, folded, 100 * left,
    )  # fmt: skip
    return traced


ALGEBRA = (
    equal_after_reshape, equal_dims, shares_keys, rows_once, with_shapes, through, head_projection, merged_projection,
    fold_attention, patches_by_products, fewer_products,
)  # fmt: skip
"""All that `fewer_products` needs in a file of its own."""
