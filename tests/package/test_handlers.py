"""The ready handlers: what clients send becomes tensors, outputs become answers, and hostile bodies one line."""

import io
import json
import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fettle.errors import UsageError
from fettle.package.export import write_package
from fettle.package.handler import find_handler
from fettle.package.handlers import make, parts, settle, tensors
from fettle.package.handlers.image import Decoding, decode
from fettle.package.manifest import open_package
from fettle.package.model_runner import ModelRunner
from fettle.package.settings import ServeSettings
from fettle.package.tensors import TensorSpec
from fettle.recipe import Recipe
from fettle.workload import Workload
from tests.serve.test_server import ask
from tests.serving import running

Image = pytest.importorskip("PIL.Image")
SETTINGS = ServeSettings(max_rows=4, threads=1)


class Colours(torch.nn.Module):
    """Class scores that are the mean of each channel: red, green, blue."""

    def forward(self, x):
        return x.mean((2, 3))


class Detr(torch.nn.Module):
    """Three queries; their boxes do not depend on the image, the score of the first does."""

    def forward(self, pixel_values, pixel_mask):
        rows = pixel_values.shape[0]
        brightness = pixel_values.mean((1, 2, 3)) * pixel_mask.float().mean((1, 2))
        logits = torch.tensor([[4.0, 0, 0], [0, 5, 0], [0, 0, 9]]).repeat(rows, 1, 1)
        logits = logits + torch.zeros_like(logits).index_fill(1, torch.tensor([0]), 1.0) * brightness[:, None, None]
        boxes = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.25, 0.25, 0.5, 0.5], [0.5, 0.5, 1, 1]]).repeat(rows, 1, 1)
        return {"logits": logits, "pred_boxes": boxes + 0 * brightness[:, None, None]}


class Sums(torch.nn.Module):
    """Hidden states of tokens: each token's number and 1, nothing where the mask is 0."""

    def forward(self, input_ids, attention_mask):
        ids = input_ids.float() * attention_mask
        return {"last_hidden_state": torch.stack([ids, attention_mask.float()], -1)}


def picture(colour, size=(40, 20), form="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, form)
    return file.getvalue()


def packaged(model, inputs, path, handler, **more):
    return write_package(Workload(model.eval(), inputs), Recipe(), path, name="m", settings=SETTINGS,
                         handler=handler, **more)  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    (path / "names.json").write_text(json.dumps({"0": ["n1", "red"], "1": ["n2", "green"], "2": "blue"}))
    files = {"labels.txt": parts.labels_file(path / "names.json")}
    return packaged(Colours(), [torch.rand(2, 3, 8, 8)], path / "m", "image", files=files)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return packaged(Sums(), text_batches(), tmp_path_factory.mktemp("texts") / "m", "text",
                    files={"tokenizer.json": tokenizer()})  # fmt: skip


def text_batches():
    return [
        {"input_ids": torch.ones(2, n, dtype=torch.int64), "attention_mask": torch.ones(2, n, dtype=torch.int64)}
        for n in (3, 5)
    ]


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "[PAD]": 3}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made.to_str().encode()


def answers(package, *bodies, kind=""):
    handler = find_handler(package, ModelRunner(package), "")
    found = handler.handle(list(bodies), [kind] * len(bodies))
    return [json.loads(body) for body, _ in found]


def test_images_of_several_sizes_and_formats_share_a_batch_and_get_their_labels(images):
    found = answers(images, picture("red"), picture("blue", (9, 70), "JPEG"), picture("lime", (300, 300), "WEBP"))
    assert [rows[0]["label"] for rows in found] == ["red", "blue", "green"]
    assert all(abs(sum(row["score"] for row in rows) - 1) < 1e-6 for rows in found)
    assert [len(rows) for rows in found] == [3, 3, 3]  # as many as there are classes, though five were asked for


def test_an_image_becomes_what_its_pixels_say():
    made = decode(picture((255, 0, 51)), Decoding((4, 6), mean=(0.0, 0.5, 0.0), std=(1.0, 0.5, 0.5)))
    assert made[0].shape == (1, 3, 4, 6)
    assert made[0].dtype == np.float32
    assert made[1] == (40, 20)
    np.testing.assert_allclose(made[0][0, :, 2, 3], [1.0, -1.0, 0.4], atol=1e-6)
    grey = decode(picture((100, 100, 100)), Decoding((4, 4), mean=(0.0,), std=(1.0,)))[0]
    assert grey.shape == (1, 1, 4, 4)


def test_the_middle_of_an_image_is_seen_and_its_edges_are_cut():
    image = Image.new("RGB", (300, 100), "red")
    image.paste((0, 0, 255), (100, 0, 200, 100))
    file = io.BytesIO()
    image.save(file, "PNG")
    plain = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    middle = decode(file.getvalue(), Decoding((10, 10), resize=10, **plain))[0]
    assert middle[0, 0, :, 1:-1].max() < 0.01  # no red, but for what the filter takes of the next pixel
    whole = decode(file.getvalue(), Decoding((10, 10), **plain))[0]
    assert whole[0, 0].max() > 0.99


def test_a_small_file_that_announces_a_huge_image_is_refused_by_its_header(images):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )
    with pytest.raises(UsageError, match="pixels"):
        answers(images, bomb)
    stripe = picture("red", (1, 60_000))  # resized by its shorter side it would be 10^8 rows
    assert answers(images, stripe)[0][0]["label"] == "red"


@pytest.mark.parametrize("body", [b"", b"no image", picture("red")[:60], b"GIF89a" + b"\0" * 20, b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_image_is_one_line(images, body):
    with pytest.raises(UsageError, match="not an image") as error:
        answers(images, body)
    assert "\n" not in str(error.value)


def test_boxes_are_pixels_of_the_image_that_was_sent(tmp_path):
    inputs = [{"pixel_values": torch.rand(2, 3, 8, 8), "pixel_mask": torch.ones(2, 8, 8, dtype=torch.int64)}]
    files = {"labels.txt": b"cat\ndog\n"}
    package = packaged(Detr(), inputs, tmp_path / "m", "detection", files=files)
    bright, dark = answers(package, picture("white", (200, 100)), picture("black", (10, 10)))
    assert [(row["label"], row["box"]) for row in bright] == [
        ("dog", [0.0, 0.0, 100.0, 50.0]),
        ("cat", [50.0, 25.0, 150.0, 75.0]),
    ]  # the third query says that there is nothing
    assert bright[0]["score"] == pytest.approx(np.exp(5) / (np.exp(5) + 2), abs=1e-6)
    assert dark[0]["box"] == [0.0, 0.0, 5.0, 5.0]


def test_texts_of_several_lengths_get_the_vector_of_their_own_tokens_only(texts):
    def vector(*tokens):
        mean = np.array([np.mean(tokens), 1.0])
        return mean / np.linalg.norm(mean)

    found = answers(texts, b"one two", b"one one one one two", b"two")
    for row, wanted in zip(found, [vector(1, 2), vector(1, 1, 1, 1, 2), vector(2)], strict=True):
        np.testing.assert_allclose(row, wanted, atol=1e-6)
    several = answers(texts, json.dumps(["one", "two"]).encode(), kind="application/json")[0]
    np.testing.assert_allclose(several, [vector(1), vector(2)], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b"\xff", ""), (b"{", "application/json"), (b"[1]", "application/json"), (b"[]", "application/json"),
     (b"x" * 900_000, ""), (b'["a","b","c","d","e","f","g","h","i"]', "application/json")],
)  # fmt: skip
def test_what_is_no_text_is_one_line(texts, body, kind):
    with pytest.raises(UsageError):
        answers(texts, body, kind=kind)


def test_classes_of_texts(tmp_path):
    class First(torch.nn.Module):
        def forward(self, input_ids):
            return torch.nn.functional.one_hot(input_ids[:, 0], 4).float() * 9

    inputs = [{"input_ids": torch.ones(2, n, dtype=torch.int64)} for n in (3, 5)]
    files = {"tokenizer.json": tokenizer(), "labels.txt": b"nothing\nfirst\nsecond\n"}
    package = packaged(First(), inputs, tmp_path / "m", "text", files=files, handler_settings={"top": 1})
    assert [rows[0]["label"] for rows in answers(package, b"two one", b"one", b"three")] == [
        "second",
        "first",
        "nothing",
    ]


@pytest.mark.parametrize("masked", [True, False])
def test_a_text_is_answered_alike_whoever_else_asks(tmp_path, masked):
    class Tokens(torch.nn.Module):
        """The tokens, times how many there are where the model cannot know which are filled up."""

        def forward(self, input_ids, attention_mask=None):
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            return (input_ids * mask.sum(1, keepdim=True)).float().unsqueeze(-1)

    inputs = text_batches() if masked else [{"input_ids": batch["input_ids"]} for batch in text_batches()]
    package = packaged(Tokens(), inputs, tmp_path / "m", "text", files={"tokenizer.json": tokenizer()},
                       handler_settings={"answer": "tensor"})  # fmt: skip
    assert answers(package, b"one two", b"one one one one") == [[[2.0], [4.0]], [[4.0]] * 4]


def test_a_tensor_handler_bounds_the_rows_of_a_request(tmp_path):
    package = packaged(torch.nn.Linear(2, 1), [torch.rand(2, 2)], tmp_path / "m", "tensor")
    assert len(answers(package, json.dumps([[1, 2]] * 8).encode())[0]) == 8
    with pytest.raises(UsageError, match="8 rows"):
        answers(package, json.dumps([[1, 2]] * 9).encode())


def test_a_tensor_handler_takes_no_part_of_a_number_for_a_whole_one(tmp_path):
    package = packaged(torch.nn.Embedding(10, 2), [torch.randint(0, 10, (2, 3))], tmp_path / "m", "tensor")
    assert len(answers(package, b"[[1, 2.0, 3]]")[0][0]) == 3
    for body in (b"[[1, 2.5, 3]]", b'[["1", 2, 3]]', b"[[1, null, 3]]"):
        with pytest.raises(UsageError, match="not an array of INT64"):
            answers(package, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_tensor_handler_takes_numbers_only_that_the_input_can_hold(tmp_path, dtype):
    class Largest(torch.nn.Module):
        def forward(self, x):
            return x.argmax(1)

    package = packaged(Largest(), [torch.rand(2, 2).to(dtype)], tmp_path / "m", "tensor")
    assert answers(package, b"[[1, 2.5]]", b"[[7, 3]]") == [[1], [0]]
    if dtype == torch.float32:
        assert answers(package, b"[[100000000000000000000, 0.5]]") == [[0]]  # how JavaScript writes 1e20
    for body in (b"[[null, 2]]", b'[["1", "2"]]', b"[[1e39, 0]]", b"[[true, false]]", b"[[%s, 0]]" % (b"9" * 400)):
        with pytest.raises(UsageError, match="not an array of FP"):
            answers(package, body)


def test_ready_handlers_are_served_without_trust_and_settings_are_data(images):
    manifest = json.loads((images.folder / "manifest.json").read_text())
    assert manifest["handler"]["kind"] == "image"
    assert manifest["handler"]["decoding"]["size"] == [8, 8]
    with running([open_package(images.folder)]) as server:
        status, answer, _ = ask(server.url + "/predictions/m", picture("blue"))
        assert (status, answer[0]["label"]) == (200, "blue")
        status, answer, _ = ask(server.url + "/predictions/m", b"nonsense")
        assert (status, answer["type"]) == (400, "BadRequestException")
        assert answer["message"].startswith("the body is not an image")  # no name of ours before it


SPEC = TensorSpec("x", "FP32", (-1, 3, 8, 8))
FLAT = TensorSpec("x", "FP32", (-1, 8))
IDS = TensorSpec("input_ids", "INT64", (-1, -1))
SCORES = TensorSpec("y", "FP32", (-1, 10))


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "wanted", "why"),
    [
        ("image", [FLAT], [SCORES], {}, "takes images"),
        ("image", [SPEC], [TensorSpec("y", "FP32", (-1, 3, 8, 8))], {}, "needs an output"),
        ("image", [SPEC], [SCORES], {"topp": 3}, "no setting 'topp'"),
        ("image", [SPEC], [SCORES], {"top": "many"}, "top"),
        ("image", [SPEC], [SCORES], {"decoding": {"size": [0, 8]}}, r"decoding\.size\[0\]"),
        ("detection", [SPEC], [SCORES], {}, "needs outputs"),
        ("text", [IDS], [SCORES], {}, "give a `tokenizer`"),
        ("video", [SPEC], [SCORES], {}, "no ready handler"),
        ("image", [SPEC, FLAT], [SCORES], {}, "fills one input"),
        ("image", [SPEC], [SCORES], {"decoding": {"std": [0.0]}}, "mean and std have"),
        ("detection", [SPEC, FLAT], [SCORES], {}, "cannot fill the input x"),
        ("generate", [IDS], [SCORES], {}, "give a `tokenizer`"),
    ],
)
def test_a_handler_that_does_not_fit_the_model_is_refused(kind, inputs, outputs, wanted, why):
    with pytest.raises(UsageError, match=why):
        settle(kind, wanted, inputs, outputs, set())


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "wanted", "why"),
    [
        ("text", [FLAT], [SCORES], {}, "no input is called input_ids: x"),
        ("text", [IDS, FLAT], [SCORES], {}, r"no tokenizer fills the input x FP32\[-1, 8\]"),
        ("text", [IDS], [TensorSpec("y", "FP32", (-1,))], {}, "needs an output"),
        ("generate", [IDS], [SCORES], {"max_tokens": 3, "max_new_tokens": 9}, "at most max_tokens"),
    ],
)
def test_a_tokenizer_does_not_make_any_model_one_for_texts(kind, inputs, outputs, wanted, why):
    with pytest.raises(UsageError, match=why):
        settle(kind, wanted, inputs, outputs, {"tokenizer.json"})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "several inputs: give an object with a, b"),
        (b'{"a": [[1, 2]]}', "the input b is missing"),
        (b'{"a": [[1, 2, 3]], "b": [1]}', r"a has shape \[1, 3\]; \[-1, 2\] is wanted"),
        (b'{"a": [[1, 2]], "b": [1, 2]}', "differ in their number of rows"),
    ],
)
def test_a_body_that_is_not_the_inputs_of_the_model_is_one_line(body, why):
    specs, handler = (TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "FP32", (-1,))), make(tensors.Settings())
    handler.initialize(SimpleNamespace(runner=None, manifest=SimpleNamespace(max_rows=8, inputs=specs, outputs=specs)))
    [row] = handler.preprocess([{"body": b'{"instances": {"a": [1, 2], "b": 3}}'}])
    assert handler.postprocess([row]) == [{"a": [[1.0, 2.0]], "b": [3.0]}]
    with pytest.raises(UsageError, match=why):
        handler.preprocess([{"body": body}])


def test_settings_that_are_wrong_are_refused_while_packaging(tmp_path):
    with pytest.raises(UsageError, match="no output"):
        packaged(Colours(), [torch.rand(2, 3, 8, 8)], tmp_path / "m", "image", handler_settings={"output": "z"})
    wanted = {"decoding": {"size": [9, 9]}}
    with pytest.raises(UsageError, match="makes"):
        packaged(Colours(), [torch.rand(2, 3, 8, 8)], tmp_path / "m", "image", handler_settings=wanted)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": "b"}', '{"99999999999": "b"}', '{"-1": "b"}', '{"0": []}'])
def test_labels_that_are_none_are_one_line(tmp_path, text):
    (tmp_path / "names.json").write_text(text)
    with pytest.raises(UsageError):
        parts.labels_file(tmp_path / "names.json")
