"""Plain functions that cut training batches by rows and spread steps over ranks, copied into ``optimized.py``.

`fettle.parallel.strategies`, which plans strategies by themselves, uses the same ones.
"""

from typing import Any

import torch

from fettle.workload import map_tensors


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in the order in which `map_tensors` meets them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch)
    return found


def rows_in(batch: Any) -> int:
    """Rows of a batch: those of its first tensor that has any."""
    sizes = [len(tensor) for tensor in tensors_in(batch) if tensor.dim()]
    if not sizes:
        raise ValueError(f"a batch of type {type(batch).__name__} has no tensor with rows")
    return sizes[0]


def share_of(batch: Any, part: int, count: int) -> Any:
    """One of `count` equal parts of a batch: tensors with as many rows as the first are cut, the rest is the same in
    all. Rows that are left over are in none."""
    rows = rows_in(batch)
    own = slice(part * (rows // count), (part + 1) * (rows // count))
    return map_tensors(lambda tensor: tensor[own] if tensor.dim() and len(tensor) == rows else tensor, batch)


ROWS = (map_tensors, tensors_in, rows_in, share_of)


def join_ranks(device_type: str, offloaded: bool = False) -> tuple[int, int]:
    """Join the process group that torchrun describes, and return this rank and how many there are. Where parameters
    are `offloaded` to host memory, the norm of their gradients is added up there."""
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device_type)
        dist.init_process_group(f"cpu:gloo,{device_type}:{backend}" if offloaded else backend)
    return dist.get_rank(), dist.get_world_size()


def endless(data: Any) -> Any:
    """The batches of `data` again and again. Raises ValueError where a pass has none."""
    some = True
    while some:
        some = False
        for batch in data:
            some = True
            yield batch
    raise ValueError("the training data ends and cannot be gone through again: give a list or a DataLoader that can")


def own_rows(data: Any, rank: int, world: int) -> Any:
    """The rank's rows of every batch of `data`, without end: all ranks together train on the batches as given. Of a
    last batch that cannot be spread evenly the rows left over are left out: ranks that cut their rows into parts must
    have equally many, or their gradients would be added up with those of another part."""
    for batch in endless(data):
        rows = rows_in(batch)
        if rows < world:
            raise ValueError(f"a batch of {rows} rows cannot be spread over {world} ranks")
        yield share_of(batch, rank, world)


def forward_of_torch(module: torch.nn.Module) -> bool:
    """Whether the forward of a module is that of one of torch's own classes, as a `Sequential`'s is."""
    forward = getattr(type(module), "forward", None)  # a scripted module's class has none
    return str(getattr(forward, "__module__", "")).startswith("torch.nn.")


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost modules with parts of their own and parameters whose class is found twice or more in lists of
    modules. Where such a one is a `Sequential` that holds others, these are, and it is none."""
    from collections import Counter

    def is_member(parent: torch.nn.Module, child: torch.nn.Module) -> bool:
        stands_in_list = isinstance(parent, (torch.nn.ModuleList, torch.nn.Sequential))
        is_called = not isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict))
        has_parts = next(child.children(), None) is not None and next(child.parameters(), None) is not None
        return stands_in_list and is_called and has_parts

    lists = [(parent, child) for parent in model.modules() for child in parent.children()]
    counts = Counter(type(child) for parent, child in lists if is_member(parent, child))
    found: dict[int, torch.nn.Module] = {}

    def walk(parent: torch.nn.Module) -> None:
        for child in parent.children():
            is_block, before = is_member(parent, child) and counts[type(child)] >= 2, len(found)
            if not is_block or isinstance(child, torch.nn.Sequential):
                walk(child)
            if is_block and len(found) == before:
                found.setdefault(id(child), child)

    walk(model)
    return list(found.values())


def modules_by_size(model: torch.nn.Module, share: float = 0.05) -> list[torch.nn.Module]:
    """Modules to shard as units so that each new unit holds at least `share` of all parameters; inner ones first.

    A container whose children can be called is wrapped where its remaining parameters reach the size; a
    `ModuleList` is never one, as it has no forward of its own.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    never = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
    units: list[torch.nn.Module] = []
    taken: set[int] = set()

    def walk(module: torch.nn.Module) -> None:
        for child in module.children():
            walk(child)
        left = [p for p in module.parameters() if id(p) not in taken]
        if module is not model and not isinstance(module, never) and sum(p.numel() for p in left) >= share * total:
            units.append(module)
            taken.update(id(p) for p in left)

    walk(model)
    return units


def shard(model: torch.nn.Module, units: list[torch.nn.Module], mesh: Any, **options: Any) -> None:
    """FSDP2: shard each unit, then what is left in the root, over `mesh`. A mesh of two dimensions replicates over
    the first."""
    from torch.distributed.fsdp import fully_shard

    for unit in units:
        fully_shard(unit, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def is_named(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether `name` is one of `patterns`, in which a star stands for any one part between dots."""
    parts = name.split(".")
    wanted = [pattern.split(".") for pattern in patterns]
    alike = [one for one in wanted if len(one) == len(parts)]
    return any(all(a in ("*", b) for a, b in zip(one, parts, strict=True)) for one in alike)


def fewer_heads(model: torch.nn.Module, attentions: tuple[str, ...], ranks: int) -> None:
    """Tell attention modules how many heads each of `ranks` ranks has, where they keep that number themselves."""
    counts = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads",
              "n_kv_heads")  # fmt: skip
    for name, module in model.named_modules():
        if is_named(name, attentions):
            for count in counts:
                if isinstance(getattr(module, count, None), int):
                    setattr(module, count, getattr(module, count) // ranks)


def share_inputs(model: torch.nn.Module, columns: tuple[str, ...], mesh: Any) -> None:
    """Let layers beside each other that are split column-wise read one DTensor of the tensor that they all get.

    What their gradients add up to is then reduced over the ranks once, not once for each layer.
    """
    from torch.distributed.tensor import DTensor, Replicate

    def share(layers: list[torch.nn.Module]) -> None:
        seen: list[Any] = []  # the tensor, its DTensor, and how often that was read

        def before(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if not seen or seen[0] is not args[0]:
                seen[:] = [args[0], DTensor.from_local(args[0], mesh, [Replicate()], run_check=False), 0]
            whole = seen[1]
            seen[2] += 1
            if seen[2] == len(layers):
                seen.clear()
            return (whole, *args[1:])

        for layer in layers:
            layer.register_forward_pre_hook(before, prepend=True)

    for name, module in model.named_modules():
        beside = [child for own, child in module.named_children() if is_named(f"{name}.{own}".lstrip("."), columns)]
        if len(beside) > 1:
            share(beside)


def replicate(model: torch.nn.Module, mesh: Any, per_head: tuple[str, ...]) -> None:
    """Make each parameter that is not split over `mesh` a DTensor that all ranks hold, so that optimizers and clipping
    meet one kind of parameter. Weights that were shared stay shared.

    Modules compute with plain tensors as before: while its forward runs, a module sees its parameters' local ones.
    Modules named in `per_head` see a rank's heads only, so their gradients are summed over the ranks.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}

    def hold(owner: torch.nn.Module) -> list[str]:
        held = [name for name, p in owner._parameters.items() if p is not None and not isinstance(p, DTensor)]
        for name in held:
            given: Any = owner._parameters[name]
            if given not in made:
                everywhere = distribute_tensor(given.detach(), mesh, [Replicate()])
                made[given] = torch.nn.Parameter(everywhere, given.requires_grad)
            owner._parameters[name] = made[given]
        return held

    def add_up(gradient: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = DTensor.from_local(gradient, mesh, [Partial()]).full_tensor()
        return total

    def see_local(module: torch.nn.Module, owners: list[tuple[torch.nn.Module, list[str]]], is_part: bool) -> None:
        def before(*_: Any) -> None:
            for owner, names in owners:
                for name in names:
                    whole: Any = owner._parameters[name]
                    local = whole.to_local()
                    if is_part and local.requires_grad:
                        local.register_hook(add_up)
                    owner.__dict__[name] = local  # found before the parameter of that name

        def after(*_: Any) -> None:
            for owner, names in owners:
                for name in names:
                    owner.__dict__.pop(name, None)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)

    held = {module: hold(module) for module in list(model.modules())}
    for name, module in list(model.named_modules()):
        owners = [module]
        if isinstance(module, torch.nn.MultiheadAttention):
            owners.append(module.out_proj)  # it reads its weight without calling it
        if any(held[owner] for owner in owners):
            see_local(module, [(owner, held[owner]) for owner in owners], is_named(name, per_head))


def split_over(
    model: torch.nn.Module, mesh: Any, columns: tuple[str, ...], rows: tuple[str, ...], attentions: tuple[str, ...],
    per_head: tuple[str, ...],
) -> None:  # fmt: skip
    """Split a model over a mesh of one dimension: of the linear layers named in `columns` the outputs, of those in
    `rows` the inputs. For `attentions` see `fewer_heads`, for `per_head` `replicate`."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    parallelize_module(model, mesh, styles)
    share_inputs(model, columns, mesh)
    fewer_heads(model, attentions, mesh.size())
    replicate(model, mesh, per_head)


def split_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer with its state split over the ranks, each of which updates its part and sends it to all."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if len(optimizer.param_groups) != 1:
        raise ValueError("several parameter groups are not split here")
    if "initial_lr" in optimizer.param_groups[0]:
        raise ValueError("a learning rate scheduler made beside the optimizer would not reach the split one")
    named = ("params", "differentiable", "decoupled_weight_decay")
    given = {key: value for key, value in optimizer.param_groups[0].items() if key not in named}
    split = ZeroRedundancyOptimizer(optimizer.param_groups[0]["params"], optimizer_class=type(optimizer), **given)
    split._optimizer_step_pre_hooks.update(optimizer._optimizer_step_pre_hooks)
    split._optimizer_step_post_hooks.update(optimizer._optimizer_step_post_hooks)
    return split


SPLIT = (is_named, share_inputs, fewer_heads, replicate, split_over)
"""What `split_over` needs in a file of its own."""
