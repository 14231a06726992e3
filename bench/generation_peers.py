"""What a user would pick otherwise to write text: each function makes a way of `generation.py` from tokens and a model.

A way is two functions: `write(index, heard)` writes after a prompt and calls `heard` for each token, with its time
where that is past; `score(ids, forced)` gives the scores `[forced, vocabulary]` of each forced token.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Write = Callable[[int, Callable[..., None]], None]


def by_transformers(work: dict[str, Any], name: str) -> tuple[Write, Any]:
    import torch

    model, new = work["model"].eval(), work["new_tokens"]
    if "bf16" in name:
        model.to(torch.bfloat16)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}

    class Heard:
        def __init__(self, heard: Callable[..., None]) -> None:
            self.heard, self.began = heard, False

        def put(self, value: Any) -> None:
            if self.began:  # what comes first is the prompt
                self.heard()
            self.began = True

        def end(self) -> None: ...

    if "static" in name:
        from transformers import CompileConfig

        compiling = CompileConfig(dynamic=False, fullgraph=False, mode="default")
        compiling._compile_all_devices = True
        settings |= {"cache_implementation": "static", "compile_config": compiling}

    def write(index: int, heard: Callable[..., None]) -> None:
        ids = work["inputs"][index]
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), streamer=Heard(heard), **settings)

    def write_batch(index: int, heard: Callable[..., None]) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
        # Not in inference mode: its own thread is in none, and may not change what was made in one.
        prompt = [work["inputs"][index][0].tolist()]
        found = model.generate_batch(
            prompt, generation_config=config, persistent_manager=True, record_timestamps=True,
            continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.05),  # else half the machine
        )  # fmt: skip
        if not found or any(len(one.generated_tokens) != new for one in found.values()):
            said = [str(getattr(one, "error", None) or len(one.generated_tokens)) for one in found.values()]
            raise RuntimeError(f"generate_batch did not write {new} tokens: {said}")
        for at in next(iter(found.values())).timestamps:
            heard(at)

    def score(ids: Any, forced: Any) -> Any:
        with torch.inference_mode():
            return model(torch.cat([ids, forced], 1)).logits[0, ids.shape[1] - 1 : -1]

    return write_batch if "generate_batch" in name else write, score


def by_llama(work: dict[str, Any], name: str, folder: Path) -> tuple[Write, Any]:
    import numpy
    from llama_cpp import Llama

    gguf = str(folder / "gguf" / "model.gguf")
    model = Llama(gguf, n_ctx=512, n_batch=512, n_threads=2, n_threads_batch=2, verbose=False)
    scoring = Llama(gguf, n_ctx=512, n_batch=512, n_threads=2, n_threads_batch=2, verbose=False, logits_all=True)

    def write(index: int, heard: Callable[..., None]) -> None:
        model.reset()
        for count, _ in enumerate(model.generate(work["inputs"][index], temp=0.0, repeat_penalty=1.0), 1):
            heard()
            if count == work["new_tokens"]:
                break

    def score(ids: list[int], forced: list[int]) -> Any:
        scoring.reset()
        scoring.eval([*ids, *forced])
        return numpy.array(scoring.scores[len(ids) - 1 : len(ids) + len(forced) - 1])

    return write, score


def by_openvino(work: dict[str, Any], name: str, folder: Path) -> tuple[Write, Any]:
    import numpy
    import openvino
    import openvino_genai as genai

    gguf = folder / "gguf" / "model.gguf"
    pipe = genai.LLMPipeline(str(gguf), "CPU", INFERENCE_NUM_THREADS=2, enable_save_ov_model=True)
    config = genai.GenerationConfig(max_new_tokens=work["new_tokens"], do_sample=False, ignore_eos=True)

    class Heard(genai.StreamerBase):
        def __init__(self, heard: Callable[..., None]) -> None:
            super().__init__()
            self.heard = heard

        def write(self, token: Any) -> Any:
            self.heard()
            return genai.StreamingStatus.RUNNING

        def end(self) -> None: ...

    def write(index: int, heard: Callable[..., None]) -> None:
        ids = openvino.Tensor(numpy.array([work["inputs"][index]], dtype=numpy.int64))
        pipe.generate(ids, config, Heard(heard))

    scoring = openvino.compile_model(str(gguf.with_name("openvino_model.xml")), "CPU").create_infer_request()

    def score(ids: list[int], forced: list[int]) -> Any:
        scoring.reset_state()
        whole = numpy.array([[*ids, *forced]])
        given = {"input_ids": whole, "attention_mask": numpy.ones_like(whole), "beam_idx": numpy.zeros(1, numpy.int32)}
        given["position_ids"] = numpy.arange(whole.shape[1])[None]
        return scoring.infer(given)[0][0, len(ids) - 1 : -1]

    return write, score


def by_onnxruntime(work: dict[str, Any], name: str, folder: Path) -> tuple[Write, Any]:
    import numpy
    import onnxruntime_genai as genai

    own = str(folder / name)
    build = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder / "model"), "-o", own]
    if subprocess.call([*build, "-p", name.split()[-1], "-e", "cpu", "-c", str(folder / "cache")], stdout=sys.stderr):
        sys.exit(1)  # the builder has said why
    config = genai.Config(own)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": 2}}}}))
    model = genai.Model(config)

    def begun(ids: list[int], new: int) -> Any:
        params = genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, min_length=len(ids) + new, max_length=len(ids) + new)
        generator = genai.Generator(model, params)
        generator.append_tokens(ids)
        return generator

    def write(index: int, heard: Callable[..., None]) -> None:
        generator = begun(work["inputs"][index], work["new_tokens"])
        for _ in range(work["new_tokens"]):
            generator.generate_next_token()
            heard()

    def score(ids: list[int], forced: list[int]) -> Any:
        generator, found = begun(ids, len(forced)), []
        for token in forced:
            found.append(generator.get_logits()[0, -1].copy())
            generator.append_tokens([token])
        return numpy.array(found)

    return write, score


def by_optimum(work: dict[str, Any], name: str, folder: Path) -> tuple[Write, Any]:
    import torch
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    model = OVModelForCausalLM.from_pretrained(
        folder / "model", export=True, ov_config={"INFERENCE_NUM_THREADS": 2},
        quantization_config=OVWeightQuantizationConfig(bits=int(name[-1]), group_size_fallback="adjust"),
    )  # fmt: skip
    tensors = {**work, "model": model, "inputs": [torch.tensor([ids]) for ids in work["inputs"]]}
    write, score = by_transformers(tensors, name)
    return write, lambda ids, forced: score(torch.tensor([ids]), torch.tensor([forced])).float().numpy()


PLAIN = {
    "llama.cpp": ("llama", by_llama),
    "OpenVINO GenAI": ("openvino", by_openvino),
    "ONNX Runtime GenAI, int4": ("onnxruntime", by_onnxruntime),
    "ONNX Runtime GenAI, int8": ("onnxruntime", by_onnxruntime),
    "optimum-intel, int4": ("optimum", by_optimum),
    "optimum-intel, int8": ("optimum", by_optimum),
}
"""Ways with a Python of their own, by the option that names it; they get tokens and files instead of the workload."""
