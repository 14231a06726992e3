"""From a recipe to a plain PyTorch training loop: the text that is measured and the file that the user is handed.

It defines ``train(model, make_optimizer, loss, data)``, a generator that makes one optimizer step each time it is
asked for the next loss.
"""

from __future__ import annotations

from fettle.techniques._base import Code, Facts

LOOP_MAIN = '''

def load():
    """Build the workload that was tuned: its model, optimizer factory, loss and data."""
    import importlib.util
    import inspect
    import sys

{made}
    get = made.get if isinstance(made, dict) else lambda name, other=None: getattr(made, name, other)
    return get("model"), get("optimizer"), get("loss"), get("data"), get("steps") or 20


if __name__ == "__main__":
    import time

{ranks}    torch.manual_seed(0)
    model, make_optimizer, loss, data, steps = load()
    torch.manual_seed(0)
    seconds = []
    start = time.perf_counter()
    for number, value in zip(range(steps), train(model, make_optimizer, loss, data)):
        last = float(value)  # waits for the step
        seconds.append(time.perf_counter() - start)
        say(f"step {{number}}: loss {{last:.4f}}, {{seconds[-1] * 1e3:.1f}} ms")
        start = time.perf_counter()
    middle = sorted(seconds)[len(seconds) // 2]  # the first steps compile and warm up
    say(f"{{len(seconds)}} steps, the last loss {{last:.4f}}, {{{samples} / middle:.5g}} samples/s at {samples} a step")
'''

LOOP_USE = """

if __name__ == "__main__":
    print("The loop that this was tuned for lives in another program, so this file cannot build it. Use it there:")
    print("    from optimized import train")
    print("    for value in train(model, make_optimizer, loss, data):  # one optimizer step, and its loss")
    print("        ...  # the four are what was tuned; break when it is enough")
"""
"""What a file without a factory says when it is run."""


def loop(titled: list[tuple[str, Code]], facts: Facts) -> list[str]:
    """The function ``train``; the loop gets its batches from `endless`."""
    found = [code for _, code in titled]
    body = [
        "def train(model, make_optimizer, loss, data):",
        '    """Train `model` in place, without end: yield the mean loss of each step, a tensor, after the step."""',
        *(f"    {line}" for code in found for line in code.setup),
        "    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]",
    ]
    for title, code in titled:
        if code.prepare:
            body += ["", f"    # {title}"] + [f"    {line}" for line in code.prepare]
    body += ["", "    optimizer = make_optimizer(parameters)"]
    body += [f"    {line}" for code in found for line in code.optimizer]
    body += ["    for batch in endless(data):"]
    loop = [line for code in found for line in code.batch]
    contexts = ", ".join(context for code in found for context in code.contexts)
    split = _last([code.parts for code in found])
    backward = _last([code.backward for code in found]) or "value.backward()"
    run = f"value = loss(model, {'part' if split else 'batch'})"
    inner = [f"with {contexts}:", f"    {run}"] if contexts else [run]
    if split:
        inner = [f"parts = {split}", "total = 0.0", "for part in parts:", *(f"    {line}" for line in inner)]
        inner += ["    value = value / len(parts)", f"    {backward}", "    total = total + value.detach()"]
    else:
        inner += [backward]
    loop += inner
    loop += [line for code in found for line in code.before_step]
    if facts.max_grad_norm is not None:
        clipped = _last([code.clipped for code in found]) or "parameters"
        loop += [f"torch.nn.utils.clip_grad_norm_({clipped}, {facts.max_grad_norm!r})"]
    loop += next((list(code.step) for code in reversed(found) if code.step), ["optimizer.step()"])
    loop += [line for code in found for line in code.after_step]
    loop += [_last([code.zero_grad for code in found]) or "optimizer.zero_grad()"]
    loop += ["yield total" if split else "yield value.detach()"]
    return body + [f"        {line}" for line in loop]


def _last(texts: list[str]) -> str:
    return next((text for text in reversed(texts) if text), "")
