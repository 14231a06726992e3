"""fettle serve load URL: what a server does under load."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fettle.cli import _options, _show
from fettle.errors import UsageError, needing
from fettle.files import check_writable, plain, read_bytes, read_text, write_text
from fettle.units import count_text

if TYPE_CHECKING:
    from ssl import SSLContext

    from fettle.load.client import Request
    from fettle.load.compare import Change
    from fettle.load.run import Run, TextLimits
    from fettle.page import Table


_MOST_REQUESTS = 10**8


def command(
    ctx: typer.Context,
    url: Annotated[
        str,
        typer.Argument(
            help="http(s)://HOST:PORT, where one model is served; .../v2/models/NAME; .../v1 for texts by OpenAI's "
            "protocol; or any URL, with --body"
        ),
    ],
    rate: Annotated[
        list[float] | None, typer.Option(min=0.01, help="open loop: requests a second. Repeated: one run for each")
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            "--concurrency", "-c", min=1, help="closed loop: this many clients at once. Repeated: one run for each"
        ),
    ] = None,
    schedule: Annotated[
        Path | None, typer.Option(help="open loop: send at the seconds in this file, one a line")
    ] = None,
    even: Annotated[bool, typer.Option("--even", help="send at even intervals, not at random (Poisson) ones")] = False,
    duration: Annotated[
        str, typer.Option("--duration", "-d", help="length of each run, for example 20s or 2m")
    ] = "20s",
    p99: _options.LatencyLimit = None,
    ttft: _options.FirstToken = None,
    itl: _options.BetweenTokens = None,
    prompt_tokens: _options.PromptTokens = "128",
    output_tokens: _options.OutputTokens = "128",
    texts: _options.Texts = None,
    model: Annotated[str, typer.Option(help="text: which model, if several are served")] = "",
    rows: Annotated[int, typer.Option(min=1, help="rows in each request")] = 1,
    body: Annotated[Path | None, typer.Option(help="send this file as the body of every request")] = None,
    content_type: Annotated[str, typer.Option(help="content type of --body")] = "application/json",
    token_file: Annotated[Path | None, typer.Option(help="a file with the server's token")] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(help="https: trust the certificates of this file (PEM) too, such as a server's own"),
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the arrival times and of the values sent")] = 0,
    as_json: _options.AsJson = False,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            help="write a report (.html), the table as Markdown (.md), or a row for each run in TorchServe's benchmark "
            "columns (.csv); for several repeat it",
        ),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(hidden=True)] = None,  # earlier spellings of --output, of any suffix
    csv_file: Annotated[Path | None, typer.Option("--csv", hidden=True)] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="compare with what an earlier --json printed; exit code 1 if it became worse")
    ] = None,
) -> None:
    """Put load on a server and say what its users would wait. Exit code 1 where the limit is not met.

    An open loop (--rate) sends each request when it is due and counts latency from that moment: what users would see.
    In a closed loop (-c) each client waits for its answer before it asks again: good for the greatest throughput, but
    it hides waiting.

    fettle serve load http://127.0.0.1:8080 --rate 80 --p99 100ms
    fettle serve load http://127.0.0.1:8080/v2/models/bert -c 1 -c 8 -c 32 --duration 5s
    fettle serve load http://127.0.0.1:8080/predictions/bert --body request.json --rate 50
    fettle serve load http://127.0.0.1:8080/v1 --rate 2 --ttft 500ms --itl 50ms --output-tokens lognormal:120:0.8
    fettle serve load http://127.0.0.1:8080/v1 -c 1 -c 8 -c 32 --ttft 500ms --itl 50ms -o report.html
    fettle serve load http://127.0.0.1:8080 --rate 80 --baseline last-week.json
    fettle serve load https://127.0.0.1:8443 -c 8 --ca-file certificate.pem
    """
    with needing("serve"):
        from fettle.load.client import trusting
        from fettle.load.compare import compare, read_baseline
        from fettle.load.run import TextLimits, as_data
        from fettle.load.texts import text_lines, text_requests
        from fettle.load.torchserve import COLUMNS, torchserve_row
    wanted = _options.outputs(output, ".html", ".md", ".csv")
    page, markdown, csv_file = wanted.get(".html"), wanted.get(".md", markdown), wanted.get(".csv", csv_file)
    check_writable(page, markdown, csv_file)
    seconds, limit_s = _options.duration_s(duration, "--duration"), _options.limit_s(p99, "--p99")
    token, tls = read_text(token_file).strip() if token_file is not None else "", trusting(ca_file)
    limits = TextLimits(_options.limit_s(ttft, "--ttft"), _options.limit_s(itl, "--itl"))
    is_text, sizes = _asks_for_texts(url), ("--prompt-tokens", "--output-tokens")
    _options.check_given(
        ctx,
        (not is_text, ("--ttft", "--itl", "--texts", "--model", *sizes),
         "for a server that writes texts: give its URL with /v1"),
        (is_text, ("--body", "--rows", "--content-type"),
         "for other URLs: prompts for /v1 are made up, or those of --texts FILE"),
        (texts is not None, sizes, "for texts that are made up: --texts FILE has its own"),
        (body is not None, ("--rows",), "for values that are made up: --body FILE is sent as it is"),
        (body is None, ("--content-type",), "for --body FILE"),
        (not rate, ("--even",), "for --rate"),
    )  # fmt: skip
    if is_text:
        lines = text_lines(prompt_tokens, output_tokens, texts, seed=seed)
        requests = text_requests(url, lines, model=model, seed=seed, token=token, tls=tls)
    else:
        requests = _requests(url, rows, seed, body, content_type, token, tls)
    plans = _plans(rate or [], concurrency or [], schedule, even, seconds, seed)
    from fettle.loop import run

    earlier = read_baseline(baseline) if baseline is not None else []
    with _show.status_line("starting", quiet=as_json) as show:
        runs = run(_run_all(requests, plans, seconds, limit_s, limits, show))
    interrupted = any(run.interrupted for run in runs)
    told = [as_data(run) for run in runs]
    changes, trouble = [], None
    try:
        changes = compare(told, earlier) if earlier and not interrupted else []
    except UsageError as error:  # what was measured is told first
        trouble = error
    data: Any = told
    if baseline is not None:
        data = {"runs": told, "changes": [plain(change) for change in changes]}
    _show.answer(as_json, lambda: data, lambda console: _print(runs, changes, console))
    if page is not None:
        from fettle.machine import this_machine
        from fettle.report import loads_page

        write_text(page, loads_page(told, _table(runs), url, this_machine().summary))
    if markdown is not None:
        write_text(markdown, _markdown(runs))
    if csv_file is not None:
        _options.write_csv(csv_file, COLUMNS, (torchserve_row(run, url) for run in told))
    if trouble is not None:
        raise trouble
    worse = any(change.verdict == "worse" for change in changes)
    _show.leave(interrupted=interrupted, missed=worse or any(_has_missed(run, limit_s) for run in runs))


def _has_missed(run: Run, limit_s: float) -> bool:
    """Whether a run is no good, or did not keep its limits: what was refused or failed was not in time either."""
    late = limit_s > 0 and run.within < 0.99
    return late or run.missed or bool(run.void) or not run.stable or not run.answered


def _plans(
    rates: list[float], clients: list[int], schedule: Path | None, even: bool, seconds: float, seed: int
) -> list[tuple[str, Any]]:
    """The runs, one after the other: closed with so many clients, or open with the moments at which to send."""
    from fettle.load.arrivals import constant, poisson, read_schedule

    for rate in rates:
        if not rate * seconds <= _MOST_REQUESTS:
            raise UsageError(
                f"--rate {rate:g}: more than {_MOST_REQUESTS:,} requests; for the greatest throughput use -c CLIENTS"
            )
    plans: list[tuple[str, Any]] = [("closed", count) for count in clients]
    plans += [("open", constant(rate, seconds) if even else poisson(rate, seconds, seed)) for rate in rates]
    if schedule is not None:
        plans.append(("open", read_schedule(schedule)))
    if not plans:
        raise UsageError("say how much load: --rate REQUESTS_A_SECOND, -c CLIENTS, or --schedule FILE")
    return plans


def _requests(
    url: str, rows: int, seed: int, body: Path | None, content_type: str, token: str, tls: SSLContext | None
) -> list[Request]:
    """What is sent in turn: the same body each time, or values of the model's own shapes."""
    from fettle.load.client import http_request, model_request

    if body is None:
        return [model_request(url, rows, seed=seed + index, token=token, tls=tls) for index in range(8)]
    headers = {"Content-Type": content_type, **({"Authorization": f"Bearer {token}"} if token else {})}
    return [http_request(url, read_bytes(body), headers, tls)]


def _asks_for_texts(url: str) -> bool:
    """Whether texts are asked for, by OpenAI's protocol."""
    return url.rstrip("/").endswith(("/v1", "/v1/completions", "/v1/chat/completions"))


async def _run_all(
    requests: Any, plans: list[tuple[str, Any]], seconds: float, limit_s: float, limits: TextLimits, show: Any
) -> list[Run]:
    from fettle.load.client import server_processes
    from fettle.load.loops import closed_loop, open_loop
    from fettle.loop import stopped_by_interrupt
    from fettle.measure import Surroundings

    stop = stopped_by_interrupt()
    server = server_processes(requests[0])
    around = Surroundings(server or ())
    runs = []
    for number, (mode, plan) in enumerate(plans, 1):
        end = seconds if mode == "closed" else float(plan[-1])

        def on_progress(now: float, waiting: int, number: int = number, end: float = end) -> None:
            show(f"run {number} of {len(plans)}: {max(0.0, end - now):.0f} s left, {waiting} requests on their way")

        how: dict[str, Any] = {"limit_s": limit_s, "limits": limits, "on_progress": on_progress, "stop": stop}
        how["patience_s"] = 60.0 if _asks_for_texts(requests[0].path) else 10.0
        around.mark()
        run = await (closed_loop(requests, plan, seconds, **how) if mode == "closed" else
                     open_loop(requests, plan, **how))  # fmt: skip
        run.load = around.look()
        if server is None:  # what it had itself would be others'
            run.load = replace(run.load, others=math.nan)
        runs.append(run)
        if stop.is_set():
            break
    return runs


def _cells(run: Run) -> dict[str, str]:
    """A run's figures by their names; empty where it has none."""
    ends = run.interval(99)
    p99 = _ms(run.percentile(99)) + (f" [{_ms(ends[0])}, {_ms(ends[1])}]" if ends else "")
    load = count_text(run.concurrency, "client")
    notes = [
        "" if run.load.is_quiet else f"on a busy machine ({run.load})",
        run.void,
        "" if run.stable else "the backlog only grew: more than the server can do",
        ", ".join(f"{kind}: {count}" for kind, count in run.errors.items()),
        run.refusal,
        "interrupted" if run.interrupted else "",
    ]
    limited = run.limit_s or run.limits != type(run.limits)()
    times = {"TTFT": run.ttft_s, "ITL": run.itl_s}
    return {
        "load": f"{run.rate:.5g}/s" if run.mode == "open" else load,
        "answers/s": f"{run.throughput:.5g}",
        **{f"p{percent} ms": _ms(run.percentile(percent)) for percent in (50, 90, 95)},
        "p99 ms": p99,
        "max ms": _ms(run.percentile(100)),
        **{f"{name} p{percent} ms": _ms(seconds(percent)) if run.texts else ""
           for name, seconds in times.items() for percent in (50, 99)},
        "tokens/s": f"{run.tokens_per_s:.5g}" if run.texts else "",
        "within": f"{run.within:.1%}" if limited else "",
        "goodput/s": f"{run.goodput:.5g}" if limited else "",
        "refused": str(run.shed),
        "failed": str(run.failed),
        "late ms": f"{run.late_s * 1e3:.2f}" if run.mode == "open" else "",
        "L / λW": f"{run.little:.2f}",
        "note": "; ".join(filter(None, notes)),
    }  # fmt: skip


def _ms(seconds: float) -> str:
    """Nothing where nothing was answered."""
    return "" if math.isnan(seconds) else f"{seconds * 1e3:.1f}"


def _table(runs: list[Run]) -> Table:
    """A column for each run: so many measures side by side would not fit a terminal."""
    from fettle.page import Table

    columns = [_cells(run) for run in runs]
    loads = [cells["load"] for cells in columns]
    rows = [[name, *(cells[name] for cells in columns)] for name in columns[0] if name not in ("load", "note")]
    return Table(("load", *loads), [row for row in rows if any(row[1:])], loads)


def _print(runs: list[Run], changes: list[Change], console: Console) -> None:
    from fettle.measure import busy_load

    load = busy_load(run.load for run in runs)
    if not load.is_quiet:
        console.print(f"{load.under}expect other figures on a quiet one.", style="yellow", markup=False)
    _show.print_table(console, _table(runs))
    for cells in map(_cells, runs):
        if cells["note"]:
            console.print(f"{cells['load']}: {cells['note']}", style="yellow", markup=False)
    if changes:
        _show.print_table(console, _changes(changes))


def _changes(changes: list[Change]) -> Table:
    """Now over then, with what may be said of it."""
    from fettle.page import Table

    rows = []
    for change in changes:
        known = math.isfinite(change.ratio)
        ratio, interval = f"{change.ratio:.3f}x", f"{change.low:.3f} to {change.high:.3f}"
        verdict = change.verdict + (f": {change.why}" if change.why else "")
        rows.append([change.load, change.measure, ratio if known else "", interval if known else "", verdict])
    columns = ("load", "measure", "now / then", "95% interval", "verdict")
    kinds = [{"better": "winner", "worse": "failed"}.get(change.verdict, "") for change in changes]
    return Table(columns, rows, columns[2:4], "against the baseline", kinds=kinds)


def _markdown(runs: list[Run]) -> str:
    cells = [_cells(run) for run in runs]
    texts = [[" ".join(text.split()).replace("|", "\\|") for text in row.values()] for row in cells]
    rows = [list(cells[0]), ["---"] * len(cells[0]), *texts]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
