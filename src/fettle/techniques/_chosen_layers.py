"""Which layers of a model are held in fewer bits, where all of them are too coarse: as many as a limit allows.

What layers cost alone nearly adds up where it is measured as the square of an error, or as a divergence: so the limit
is a budget. Layers are measured in groups, as each measurement takes a few calls of the model.
"""

from typing import Any


def layer_groups(products: Any, most: int) -> list[list[int]]:
    """Layers in the order of the graph, cut into at most `most` runs of about equally many `products`."""
    groups: list[list[int]] = [[] for _ in range(most)]
    done, total = 0.0, sum(products)
    for index, number in enumerate(products):
        groups[min(most - 1, int(most * (done + number / 2) / total))].append(index)
        done += number
    return [group for group in groups if group]


def chosen_layers(
    label: str, what: str, power: float, groups: Any, gains: Any, costs: Any, limit: float, together: Any
) -> tuple[list[Any], str]:
    """The layers of as many `groups` as cost up to `limit` together, and a line about them.

    `gains` and `costs` are those of each group alone: the one that gains most for what it costs comes first, later ones
    before earlier where they are equal. ``together(layers)`` measures, for counts of groups that halve what is between
    the largest that is inside and the least that is not. The line calls a cost to this `power` `what`. RuntimeError
    where no group is inside.
    """
    order = sorted(range(len(groups)), key=lambda group: (-gains[group] / max(costs[group], 1e-20), -group))
    made: dict[int, tuple[list[Any], float]] = {}
    count, beyond = 0, len(groups) + 1
    while beyond - count > 1:
        middle = (count + beyond) // 2
        chosen = sorted(layer for group in order[:middle] for layer in groups[group])
        made[middle] = chosen, together(chosen)
        if made[middle][1] <= limit:
            count = middle
        else:
            beyond = middle
    total, most = sum(map(len, groups)), limit**power
    if count == 0:
        least = min((cost for _, cost in made.values()), default=0.0) ** power
        raise RuntimeError(f"{label}: 0 of {total} layers: the first group has {what} of {least:.3g}, above {most:.3g}")
    chosen, cost = made[count]
    said = f"{label}: {len(chosen)} of {total} layers, with {what} of {cost**power:.3g} on the calibration batches"
    if beyond in made:
        said += f"; one more group would take it to {made[beyond][1] ** power:.3g}, above {most:.3g}"
    return chosen, said
