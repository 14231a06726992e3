"""Each rule on evidence with its cause planted, and on evidence without it."""

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch

from fettle.cli.diagnose import _checked, _verified_json
from fettle.diagnose import (
    RULES,
    Evidence,
    Finding,
    Operation,
    Sync,
    Verified,
    advice,
    findings_of,
    roofline,
    with_gains,
)
from fettle.diagnose.collectors.waiting import LoaderClock, waiting
from fettle.diagnose.compile_health import CacheHealth, CompileHealth, GraphBreak, LimitHit, Recompile
from fettle.diagnose.evidence import Batches, Fresh, Kept, Kernel, Loading, Padding, Weights
from fettle.diagnose.rules import trace as trace_rules
from fettle.files import plain
from fettle.measure import Interval, Load, Trial
from fettle.recipe import Recipe
from fettle.result import Advice, Limits
from fettle.techniques import Facts, canonical, check_names, conflict
from fettle.verifying import verify

PEAKS = {"matmul_float32": 1e11, "matmul_bfloat16": 1e12, "copy": 1e10}


def op(name: str, group: str, seconds: float, **more: object) -> Operation:
    values = {"module": "m", "kind": "Net", "line": "net.py:1", "dtype": "bfloat16", "calls": 1, "flops": 0, "bytes": 0}
    return Operation(f"aten.{name}", group, seconds=seconds, **{**values, **more})  # type: ignore[arg-type]


def work(seconds: float = 0.006) -> Operation:
    """A product at the machine's peak."""
    return op("mm", "matrix", seconds, flops=int(seconds * 1e12), bytes=1 << 16)


def seen(*ops: Operation, facts: Facts | None = None, **more: object) -> Evidence:
    values = {"wall_s": 0.01, "peaks": PEAKS, **more}
    rest = Facts(dtype="bfloat16", samples=32) if facts is None else facts
    return Evidence(rest, operations=[work(), *ops], **values)  # type: ignore[arg-type]


def facts(**more: object) -> Facts:
    return Facts(**{"dtype": "bfloat16", "samples": 32, **more})  # type: ignore[arg-type]


def health(**more: object) -> CompileHealth:
    cache = CacheHealth("", True, 0, 0, 0, False)
    empty: dict[str, object] = dict.fromkeys(("breaks", "recompiles", "specialised", "limits", "errors"), ())
    counts = {"compilations": 1, "graphs": 1, "compile_s": 1.0, "wall_s": 1.0, "cache": cache}
    return CompileHealth(**{**empty, **counts, **more})  # type: ignore[arg-type]


PAGE = (64, 1024, 1024)
PLANTED = {
    "train-mode": seen(op("native_dropout", "pointwise", 0.004), facts=facts(training=True)),
    "grad-recorded": seen(settings={"records": "True"}, variants={"grad=inference_mode": (0.2, 0.1, 0.3)}),
    "float32": seen(op("mm", "matrix", 0.004, dtype="float32", flops=10**8)),
    "float64": seen(op("add", "pointwise", 0.004, dtype="float64")),
    "casts": seen(op("_to_copy", "cast", 0.004)),
    "copies": seen(op("clone", "layout", 0.004, largest=(4, 4))),
    "channels-first": seen(op("convolution", "matrix", 0.004, flops=10**8), facts=facts(num_4d_inputs=1, num_conv=1)),
    "not-fused": seen(op("mul", "pointwise", 0.004)),
    "other-work": seen(pauses={"net.py:3": 0.004}),
    "host-bound": seen(op("view", "other", 1e-5, calls=200)),
    "python-loop": seen(op("add", "pointwise", 0.004, calls=400, line="net.py:7", function="Net.forward")),
    "small-batch": seen(loading=Loading(1e-4, rows=1, batches=64)),
    "optimizer": seen(op("addcdiv_", "pointwise", 0.004, calls=80, line="adam.py:9")),
    "attention": seen(op("_softmax", "pointwise", 0.004, largest=(8, 128, 128)), facts=facts(manual_attention=1)),
    "threads": seen(facts=facts(threads=1, physical_cores=4), variants={"threads=4": (0.5, 0.4, 0.6)}),
    "padding": seen(padding=Padding(0.6, "attention_mask")),
    "weight-bound": seen(
        op("mm", "matrix", 0.004, flops=10**6, bytes=10**6), facts=facts(samples=1), weights=Weights(1 << 30)
    ),
    "batch-norm": seen(op("native_batch_norm", "pointwise", 0.004)),
    "small-products": seen(op("mm", "matrix", 0.02, flops=2 * 10**6, line="net.py:3"), wall_s=0.03),
    "int8": seen(op("mm", "matrix", 0.004, flops=10**9), facts=facts(cpu_flags=("avx512_vnni",), num_linear=1)),
    "indexing": seen(op("index", "index", 0.004)),
    "sorting": seen(op("sort", "other", 0.004)),
    "recomputation": seen(op("addmm", "matrix", 0.004, calls=32, repeated=0.9)),
    "duplicate-data": seen(batches=Batches(16, 8)),
    "built-in-call": seen(built={"serve.py:9": 8}),
    "random": seen(op("normal_", "pointwise", 0.004)),
    "constants": seen(op("tril", "pointwise", 0.004)),
    "parametrised": seen(op("_weight_norm_interface", "pointwise", 0.004)),
    "recurrent": seen(op("lstm", "matrix", 0.006)),
    "data-wait": seen(loading=Loading(0.004, at_hand_s=0.005)),
    "spike": seen(op("sub", "pointwise", 0.004, largest=PAGE, growth=64.0)),
    "leak": seen(op("mul", "pointwise", 0.001, written=1 << 20), kept=Kept(1, 1), fresh=Fresh(s_per_byte=1e-9)),
    "churn": seen(allocator={"num_alloc_retries": 3, "num_device_alloc": 9, "num_device_free": 9, "calls": 20}),
    "waiting": seen(slept_s=0.004),
    "fresh-memory": seen(fresh=Fresh(8192, 0.004), facts=facts(libraries={"glibc": "2.36"})),
    "garbage-collection": seen(gc_s=0.004),
    "subnormal": seen(weights=Weights(subnormal=0.5)),
    "debugging": seen(settings={"anomaly": "True"}, variants={"anomaly=off": (0.5, 0.4, 0.6)}),
    "onednn-off": seen(settings={"mkldnn": "False"}),
    "cudnn-benchmark": seen(op("convolution", "matrix", 0.004, flops=10**8), facts=facts(device="cuda", num_conv=1)),
    "no-tf32": seen(
        op("mm", "matrix", 0.004, dtype="float32", flops=10**8),
        facts=facts(device="cuda", cuda_capability=(8, 0)), settings={"matmul": "highest"},
    ),
    "graph-breaks": seen(compiled=True, compile=health(breaks=(GraphBreak("/a/net.py", 4, "print", "", 1),))),
    "recompiles": seen(compiled=True, compile=health(limits=(LimitHit("f", "/a/net.py", 4, "n == 3", 8),),
                       recompiles=(Recompile("f", "/a/net.py", 4, "n == 3", "value", 8),))),
    "syncs": seen(
        op("_local_scalar_dense", "other", 0.002, line="net.py:5"),
        syncs=[Sync("/a/net.py", 5, "f", "x.item()", "aten._local_scalar_dense", "item", "reads", 3)],
        facts=facts(device="cuda"),
    ),
    "compile-cache": seen(compile=health(cache=CacheHealth("", False, 0, 0, 0, False), compile_s=30.0)),
    "first-call": seen(first_call_s=12.0),
    "loading": seen(load_s=30.0),
    "weight-memory": seen(weights=Weights(1 << 30), facts=facts(dtype="float32")),
    "duplicate-weights": seen(weights=Weights(duplicate_bytes=1 << 28)),
}  # fmt: skip


def test_a_peak_that_was_exceeded_is_doubted() -> None:
    assert (
        replace(roofline(seen()), mfu=0.5).mfu_text
        == "MFU 50.0%: of the FLOP/s that a large bfloat16 product reaches here"
    )
    assert "other programs" in replace(roofline(seen()), mfu=2.5).mfu_text
    assert replace(roofline(seen()), mfu=math.nan).mfu_text == ""


def test_every_rule_is_here_and_nothing_is_said_of_a_healthy_workload() -> None:
    assert set(PLANTED) == set(RULES)
    assert len(RULES) >= 30
    assert findings_of(seen(wall_s=0.00605)) == []


@pytest.mark.parametrize("rule", PLANTED)
def test_a_rule_names_its_cause_the_place_the_bound_and_the_answer(rule: str) -> None:
    found = RULES[rule](PLANTED[rule])
    assert found is not None
    assert found.rule == rule
    assert 0 <= found.bound < 1
    assert found.bound > 0 or found.bound_bytes > 0 or found.startup_s > 0 or rule == "churn"  # counters hold no time
    assert found.says.endswith(".")
    assert found.evidence
    assert found.advice
    assert found.formula
    assert found.before != found.after
    assert found.before
    assert found.after


ELEMENT_WISE = ("train-mode", "float64", "python-loop", "optimizer", "attention", "batch-norm", "random", "constants",
                "parametrised", "spike", "leak")  # fmt: skip
ALSO = {
    "host-bound": {"python-loop"},  # the same small operator, again and again from one line
    "no-tf32": {"float32"},
    **{rule: {"not-fused"} for rule in ELEMENT_WISE},
}
"""Who else rightly speaks of a planted program: for instance, operators that are element-wise are not fused."""


@pytest.mark.parametrize("rule", PLANTED)
def test_of_a_planted_cause_no_other_rule_speaks(rule: str) -> None:
    assert {finding.rule for finding in findings_of(PLANTED[rule])} == {rule} | ALSO.get(rule, set())


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_speaks_in_the_modes_that_it_names(rule: str) -> None:
    """Though in a training loop its levels are named for inference, and left out where the loop cannot have them."""
    training = replace(PLANTED[rule], facts=replace(PLANTED[rule].facts, mode="training"))
    assert (rule in {finding.rule for finding in findings_of(training)}) == ("training" in RULES[rule].modes)
    assert "inference" in RULES[rule].modes


MORE = [
    *((rule, evidence) for rule, evidence in PLANTED.items()),
    ("host-bound", replace(PLANTED["host-bound"], facts=facts(device="cuda"))),
    ("int8", replace(PLANTED["int8"], facts=facts(cpu_flags=("avx2", "avx512_vnni"), num_conv=9))),
    ("threads", replace(PLANTED["threads"], facts=facts(threads=9), variants={"threads=1": (0.5, 0.4, 0.6)})),
    ("recompiles", seen(compile=health(recompiles=(Recompile("f", "/a/net.py", 4, "x.size()[0] == 3", "shape", 8),)))),
]
"""The same, and what else makes a rule name levels."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rule", "evidence"), MORE)
def test_the_levels_that_a_rule_names_can_be_had_together(rule: str, evidence: Evidence, dtype: str) -> None:
    able = {"packages": {"torchao": "1"}, "num_linear": 1, "physical_cores": 4, "calibration_batches": 2}
    evidence = replace(evidence, facts=replace(evidence.facts, dtype=dtype, **able))  # type: ignore[arg-type]
    found = RULES[rule](evidence)
    assert found is not None or (rule, dtype) == ("weight-memory", "bfloat16")
    assert found is None or conflict(canonical(Recipe(found.levels)), evidence.facts) == ""


@pytest.mark.parametrize("found", trace_rules._CAUSES.values(), ids=lambda found: found.rule)
def test_the_levels_that_a_trace_names_can_be_had_together(found: Finding) -> None:
    check_names(Recipe(found.levels))
    assert conflict(Recipe(found.levels), facts(device="cuda")) == ""


def test_a_compile_cache_that_does_not_last_is_an_opportunity() -> None:
    def of(**cache: object) -> Finding | None:
        values = {"folder": "/tmp/x", "enabled": True, "hits": 0, "misses": 2, "bypasses": 0, "temporary": True}
        compiled = health(cache=CacheHealth(**{**values, **cache}), compile_s=30.0)  # type: ignore[arg-type]
        return RULES["compile-cache"](seen(compiled=True, compile=compiled))

    found = of()
    assert found is not None
    assert found.opportunity
    assert found.startup_s == 30.0
    assert "/tmp/x" in found.evidence[0]
    assert of(hits=2, misses=0).startup_s == 0.0  # a warm cache says nothing of what a cold one costs
    assert "1 graph." in of(bypasses=1, temporary=False).says
    assert of(temporary=False) is None
    assert of(misses=0) is None  # another backend's code is in no such cache


def test_segments_given_back_and_fetched_again_by_empty_cache() -> None:
    counted = {"num_alloc_retries": 0, "num_device_alloc": 8, "num_device_free": 8, "calls": 4}
    found = RULES["churn"](seen(allocator=counted))
    assert found is not None
    assert "empty_cache" in found.advice
    assert RULES["churn"](seen(allocator={**counted, "num_device_free": 0})) is None  # still warming up


def test_static_int8_is_named_with_the_frozen_weights_that_it_needs() -> None:
    product = op("convolution", "matrix", 0.004, flops=10**9)
    found = RULES["int8"](seen(product, facts=facts(cpu_flags=("avx512_vnni",), num_conv=1)))
    assert found is not None
    assert found.levels["quantize"] == "int8-static"
    assert found.levels["freeze"] == "on"


def test_waiting_for_a_core_is_not_the_hosts_work() -> None:
    busy = replace(PLANTED["host-bound"], crowded=0.5)
    assert "host-bound" not in [finding.rule for finding in findings_of(busy)]


def test_a_line_that_breaks_the_graph_is_named_once() -> None:
    sync = Sync("/a/net.py", 4, "f", "x.item()", "aten._local_scalar_dense", "item", "reads", 3)
    both = replace(PLANTED["graph-breaks"], syncs=[sync])
    rules = [finding.rule for finding in findings_of(both)]
    assert "graph-breaks" in rules
    assert "syncs" not in rules
    assert "syncs" in [finding.rule for finding in findings_of(replace(both, compiled=False))]


def test_time_that_nobody_accounts_for_raises_a_bound_and_makes_no_finding() -> None:
    little = seen(op("clone", "layout", 1e-4, largest=(4, 4)))
    assert RULES["copies"](little) is None
    copy = RULES["copies"](seen(op("clone", "layout", 1e-3, largest=(4, 4))))
    assert copy is not None
    assert copy.bound == pytest.approx((1e-3 + (0.01 - 0.007 - 2 * 10e-6)) / 0.01)


def test_the_roof_is_the_larger_of_computing_and_moving() -> None:
    product = op("mm", "matrix", 0.004, flops=2 * 10**9, bytes=10**6, module="head", kind="Linear")
    norm = op("layer_norm", "pointwise", 0.002, flops=0, bytes=10**7, module="norm", kind="LayerNorm")
    roofs = roofline(Evidence(facts(), wall_s=0.01, operations=[product, norm], peaks=PEAKS))
    assert roofs is not None
    head, layer = roofs.modules
    assert (head.name, head.limit, layer.limit) == ("head", "compute", "memory")
    assert head.least_s == pytest.approx(0.002)  # 2 GFLOP at 1 TFLOP/s
    assert head.reached == pytest.approx(0.5)
    assert layer.least_s == pytest.approx(0.001)  # 10 MB at 10 GB/s
    assert roofs.mfu == pytest.approx(2e9 / 0.01 / 1e12)
    assert roofline(Evidence(facts(), wall_s=0.01)) is None


def test_kernels_of_one_operator_share_its_roof_by_their_time() -> None:
    product = op("convolution", "matrix", 0.004, flops=10**9, bytes=0)
    shared = [Kernel("gemm", "aten.convolution", 1, 0.003), Kernel("bias", "aten.convolution", 1, 0.001)]
    roofs = roofline(Evidence(Facts(), 0.01, [product], PEAKS), shared)
    assert roofs is not None
    assert [(roof.name, roof.flops) for roof in roofs.kernels] == [("gemm", 750_000_000), ("bias", 250_000_000)]
    assert roofs.kernels[0].reached == pytest.approx(0.25)  # 1 ms at the peak, 4 ms in both


def test_what_advice_brought_is_read_from_two_trials_that_differ_by_it_alone() -> None:
    finding = Finding("float32", "Slow.", 0.75, levels={"precision": "bf16"})
    advised = advice([finding, Finding("syncs", "No technique.", 0.5)])
    assert [item.rule for item in advised] == ["float32"]

    def trial(speedup: float, **levels: str) -> Trial:
        return Trial(Recipe(levels), "measured", speedup=Interval(speedup, 0.98 * speedup, 1.02 * speedup))

    trials = [trial(1.0), trial(1.5, compile="default"), trial(6.0, compile="default", precision="bf16")]
    (seen_beside,) = with_gains(advised, trials)
    assert seen_beside.brought is not None
    assert seen_beside.brought.estimate == pytest.approx(4.0)
    assert seen_beside.beside == Recipe({"compile": "default"})
    assert seen_beside.bound_kept
    (alone,) = with_gains(advised, [*trials, trial(3.0, precision="bf16")])
    assert alone.brought is not None
    assert alone.brought.estimate == pytest.approx(3.0)
    # What the same levels, or some of them, answer as well counts in what they may bring.
    also = advice([finding, Finding("not-fused", "Apart.", 0.2, levels={"precision": "bf16"})])
    assert [item.bound_kept for item in with_gains(also, trials)] == [True, True]
    assert [item.also for item in with_gains(also, trials)] == [0.2, 0.75]
    (nothing,) = with_gains(advised, trials[:2])
    assert nothing.brought is None
    assert nothing.bound_kept is None
    # A race that was interrupted after its first round knows no interval.
    once = [replace(item, speedup=Interval(2.0, 0.0, math.inf)) for item in trials[1:]]
    (unknown,) = with_gains(advised, [trials[0], *once])
    assert unknown.brought == Interval(1.0, 0.0, math.inf)
    assert unknown.bound_kept is None
    assert Advice("r", "s", {}, 0.1, Interval(2.0, 0.0, math.inf)).bound_kept is None
    broken = Advice("r", "s", {}, 0.1, Interval(2.0, 1.9, 2.1))
    assert broken.bound_kept is False
    # A bound is a share of the call as given: half of a call that is ten times as fast is 5% of it.
    assert replace(broken, before=Interval(10.0, 9.0, 11.0)).bound_kept is True
    assert replace(broken, brought=Interval(1.5, 0.5, 4.0)).bound_kept is None
    assert replace(broken, brought=Interval(1.0, 0.95, 1.05)).bound_kept is True


FOUND = (
    Finding("train-mode", "It is in train mode.", 0.5, levels={"mode": "eval"}),
    Finding("float32", "Slow.", 0.3, levels={"precision": "bf16"}),
    Finding("grad", "Recorded.", 0.2, levels={"grad": "inference_mode"}),
    Finding("syncs", "No technique.", 0.5),
    Finding("small-kernels", "For a GPU.", 0.5, levels={"cuda_graphs": "on"}),
)


class TestVerify:
    """Fixes raced in a comparison that is made up here."""

    def race(
        self,
        monkeypatch: pytest.MonkeyPatch,
        times: dict[str, float],
        given: Facts,
        most: int = 99,
        findings: Sequence[Finding] = FOUND,
    ) -> dict[str, Verified]:
        """`verify`, where a recipe takes its share of the time as given, and there is time for `most` trials."""

        def bench(target: str, recipes: list[Recipe], **options: object) -> SimpleNamespace:
            def trial(recipe: Recipe) -> Trial:
                if str(recipe) not in times:
                    return Trial(recipe, "failed", reason="it crashed")
                speedup = 1 / times[str(recipe)]
                return Trial(recipe, "measured", speedup=Interval(speedup, 0.99 * speedup, 1.01 * speedup))

            return SimpleNamespace(trials=[trial(one) for one in [Recipe(), *recipes][:most]], interrupted=most < 3)

        monkeypatch.setattr("fettle.verifying.bench", bench)
        answers, interrupted = verify("model.py", findings, given)
        assert interrupted == (most < 3)
        return {item.finding.rule: item for item in answers}

    def test_a_fix_by_which_the_metric_falls_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def bench(target: str, recipes: list[Recipe], limits: Limits, **options: object) -> SimpleNamespace:
            asked.append(limits)
            trials = [Trial(one, "rejected", "the metric fell", speedup=Interval(2, 1.9, 2.1)) for one in recipes]
            return SimpleNamespace(trials=[Trial(Recipe(), "measured"), *trials], interrupted=False)

        monkeypatch.setattr("fettle.verifying.bench", bench)
        (answer,), _ = verify("model.py", FOUND[1:2], Facts(is_module=True), max_metric_drop=0.01)
        assert (answer.speedup, answer.problem) == (None, "the metric fell")
        assert asked == [Limits(max_error=None, max_metric_drop=0.01)]

    def test_a_fix_raced_beside_a_neighbour_says_what_it_was_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        twice, thrice, load = Interval(2, 1.9, 2.1), Interval(3, 2.9, 3.1), Load(others=0.5)
        busy = Trial(Recipe({"precision": "bf16"}), "measured", speedup=twice, elapsed_speedup=thrice, is_quiet=False,
                     load=load)  # fmt: skip
        found = SimpleNamespace(trials=[Trial(Recipe(), "measured"), busy], interrupted=False)
        monkeypatch.setattr("fettle.verifying.bench", lambda *args, **options: found)
        (answer,), _ = verify("model.py", FOUND[1:2], Facts(is_module=True))
        assert (answer.is_quiet, answer.load, answer.elapsed_speedup) == (False, load, thrice)
        told = plain(_verified_json(answer))
        assert (told["is_quiet"], told["load"]["others"], told["elapsed_speedup"]["estimate"]) == (False, 0.5, 3)
        assert _checked(answer).startswith("On a busy machine (others took 50% of the cores), with the time spent")
        assert "; in time elapsed beside that load 3.00x [2.90, 3.10]: " in _checked(answer)

    def test_beside_the_workload_as_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times = {"": 1.0, "precision=bf16": 0.75, "grad=inference_mode": 0.5, "mode=eval": 0.9}
        found = self.race(monkeypatch, times, Facts(is_module=True, training=True))
        assert set(found) == {"train-mode", "float32", "grad", "small-kernels"}
        assert found["float32"].saved == pytest.approx(0.25)
        assert found["float32"].bound_kept
        assert found["grad"].bound_kept is False
        assert found["small-kernels"].speedup is None
        assert found["small-kernels"].problem

    def test_beside_eval_mode_where_train_mode_gives_other_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times = {"mode=eval": 0.8, "mode=eval precision=bf16": 0.55, "grad=inference_mode mode=eval": 0.5}
        found = self.race(monkeypatch, times, Facts(is_module=True, training=True, train_mode_differs=True))
        assert found["train-mode"].beside == ""
        assert found["train-mode"].saved == pytest.approx(0.2)
        assert found["float32"].beside == "mode=eval"
        assert found["float32"].saved == pytest.approx(0.25)
        assert found["float32"].bound_kept
        assert found["grad"].bound_kept is False  # 0.3 of the call as given

    def test_what_one_fix_answers_is_compared_with_all_its_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compiled = {"compile": "default", "grad": "inference_mode"}
        findings = [
            Finding("copies", "Copies.", 0.1, levels=compiled),
            Finding("not-fused", "Not fused.", 0.3, levels=compiled),
            Finding("grad", "Recorded.", 0.2, levels={"grad": "inference_mode"}),
        ]
        recipe = str(canonical(Recipe(compiled)))

        def race(compiled_takes: float) -> dict[str, Verified]:
            times = {recipe: compiled_takes, "grad=inference_mode": 0.7}
            return self.race(monkeypatch, times, Facts(is_module=True), findings=findings)

        found = race(0.45)
        assert found["copies"].recipe == found["not-fused"].recipe == recipe
        assert found["copies"].also == pytest.approx(0.5)
        assert found["copies"].bound_kept is found["not-fused"].bound_kept is True
        assert found["grad"].also == 0
        assert found["grad"].bound_kept is False
        assert race(0.3)["copies"].bound_kept is False
        assert "the bounds of all that it answers" in _checked(found["copies"])

    def test_a_fix_for_which_there_was_no_time_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.race(monkeypatch, {"": 1.0, "mode=eval": 0.9}, Facts(is_module=True, training=True), most=2)
        assert found["train-mode"].saved == pytest.approx(0.1)
        assert found["float32"].speedup is None
        assert found["float32"].problem == "there was no time for it"

    def test_a_fix_that_does_not_run_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.race(monkeypatch, {"mode=eval": 0.8}, Facts(is_module=True, training=True))
        assert found["float32"].problem == "it crashed"
        assert found["float32"].bound_kept is None


def test_what_training_needs_and_what_answers_may_need_is_no_fault() -> None:
    for rule in ("parametrised", "duplicate-weights", "small-batch"):
        assert "training" not in RULES[rule].modes
    found = RULES["random"](PLANTED["random"])
    assert found is not None
    assert found.opportunity


def test_convolutions_use_tf32_whatever_the_products_do() -> None:
    planted = PLANTED["no-tf32"]
    convolution = op("convolution", "matrix", 0.004, dtype="float32", flops=10**8)
    assert RULES["no-tf32"](replace(planted, operations=[work(), convolution])) is None


def test_what_was_not_tried_on_a_gpu_has_no_bound_of_a_trial() -> None:
    on_gpu = replace(PLANTED["debugging"], facts=facts(device="cuda"), variants={})
    found = RULES["debugging"](on_gpu)
    assert found is not None
    assert found.bound == pytest.approx(0.4)  # all that is no operator
    found = RULES["grad-recorded"](seen(settings={"records": "True"}, facts=facts(device="cuda")))
    assert found is not None
    assert found.opportunity
    assert found.bound == pytest.approx(0.4)
    assert RULES["grad-recorded"](seen(settings={"records": "True"})) is None  # a CPU where inference mode did not run


def test_threads_are_not_named_where_nothing_could_use_them() -> None:
    idle = replace(PLANTED["threads"], operations=())
    assert "threads" in {finding.rule for finding in findings_of(PLANTED["threads"])}
    assert "threads" not in {finding.rule for finding in findings_of(idle)}


def test_a_collection_that_came_once_is_not_held_against_calls() -> None:
    calls = []

    def call() -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            gc.collect()

    gc.disable()
    try:
        assert waiting(call, 1e-3)[0] == 0.0
        assert waiting(gc.collect, 1e-3)[0] > 0
    finally:
        gc.enable()


def test_a_call_may_take_out_of_its_batches_what_it_needs() -> None:
    loader = torch.utils.data.DataLoader([{"x": torch.ones(4), "y": row} for row in range(8)], batch_size=2)

    def call() -> None:
        for batch in loader:
            batch.pop("y")

    assert waiting(call, 1e-6)[2].at_hand_s > 0


def test_batches_of_arrays_are_not_kept_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fettle.diagnose.collectors.waiting._KEPT_BYTES", 1000)
    loader = torch.utils.data.DataLoader([numpy.zeros(100)] * 8, batch_size=2, collate_fn=numpy.stack)
    with LoaderClock() as clock:
        clock.calls = 1
        assert len(list(loader)) == 4
    assert not clock.kept


def test_a_loop_over_batches_is_no_loop_over_a_tensor_and_stacking_belongs_to_one_that_is() -> None:
    turn = op("add", "pointwise", 0.004, calls=400, line="net.py:7", function="Net.forward")
    assert RULES["python-loop"](seen(turn, loading=Loading(1e-4, rows=32, batches=100))) is None
    alone, stacked = (RULES["python-loop"](seen(turn, *more)) for more in ((), (op("stack", "layout", 0.001),)))
    assert alone is not None
    assert stacked is not None
    assert stacked.bound > alone.bound
