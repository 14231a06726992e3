"""Which layers of a model are held in fewer bits, where all of them are too coarse: as many as a limit allows.

What layers cost alone nearly adds up where it is measured as the square of an error, or as a divergence: so the limit
is a budget. Layers are measured in groups, as each measurement takes a few calls of the model.
"""

from typing import Any


def part_groups(products: Any, most: int) -> list[list[int]]:
    """Layers in the order of the graph, cut into at most `most` runs of about equally many `products`."""
    groups: list[list[int]] = [[] for _ in range(most)]
    done, total = 0.0, sum(products)
    for index, number in enumerate(products):
        groups[min(most - 1, int(most * (done + number / 2) / total))].append(index)
        done += number
    return [group for group in groups if group]


def part_order(gains: Any, costs: Any) -> list[int]:
    """Groups, the one that gains most for what it costs first; later ones before earlier where they are equal."""
    return sorted(range(len(gains)), key=lambda group: (-gains[group] / max(costs[group], 1e-20), -group))


def part_fitting(order: Any, costs: Any, plain: float, limit: float) -> int:
    """How many groups, the first of `order`, should fit under `limit` where everything else costs `plain`."""
    left = limit - plain
    for count, group in enumerate(order):
        left -= costs[group]
        if left < 0:
            return count
    return len(order)


def part_largest(inside: Any, first: int, most: int) -> int:
    """The largest count up to `most` that was seen to be `inside(count)`, 0 for none; asks at most five times.

    Begins at `first`, goes on in growing steps until it knows a count on either side, and halves what is between.
    """
    low, high, step = 0, most + 1, 1
    count = min(max(first, 1), most)
    for _ in range(5):
        if inside(count):
            low = count
        else:
            high = count
        if high - low == 1:
            break
        if high > most:
            count = min(low + step, most)
        elif low == 0:
            count = max(high - step, 1)
        else:
            count = (low + high) // 2
        step *= 2
    return low


def part_chosen(
    label: str, what: str, power: float, groups: Any, gains: Any, costs: Any, plain: float, limit: float, together: Any
) -> tuple[list[Any], str]:  # fmt: skip
    """The layers of as many `groups` as cost up to `limit` together, and a line about them.

    `gains` and `costs` are those of each group alone, `plain` the cost of everything else, and ``together(layers)``
    measures. The line calls a cost to this `power` `what`. RuntimeError where no group is inside.
    """
    order, total = part_order(gains, costs), sum(map(len, groups))
    made: dict[int, tuple[list[Any], float]] = {}

    def inside(count: int) -> bool:
        chosen = sorted(layer for group in order[:count] for layer in groups[group])
        made[count] = chosen, together(chosen)
        return made[count][1] <= limit

    count, most = part_largest(inside, part_fitting(order, costs, plain, limit), len(groups)), limit**power
    if count == 0:
        least = min((cost for _, cost in made.values()), default=0.0) ** power
        raise RuntimeError(f"{label}: 0 of {total} layers: the first group has {what} of {least:.3g}, above {most:.3g}")
    chosen, cost = made[count]
    said = f"{label}: {len(chosen)} of {total} layers, with {what} of {cost**power:.3g} on the calibration batches"
    if count + 1 in made:
        said += f"; one more group would take it to {made[count + 1][1] ** power:.3g}, above {most:.3g}"
    return chosen, said


PART = (part_groups, part_order, part_fitting, part_largest, part_chosen)
"""What chooses."""
