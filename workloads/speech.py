"""A speech recogniser: a small conformer with CTC (transformers' ParakeetForCTC, as NVIDIA's Parakeet is made),
trained here on speech that is synthesised by formants: 2.6 million parameters.

An item is a row of syllables, each one of five consonants and one of five vowels, spoken at a pitch, speed and voice of
its own, in noise. How many is drawn from a log-normal distribution, from one to sixty, and a batch is padded to its
longest item: about three quarters of it are padding.

Weights are trained when they are first asked for (about three minutes of one core; `python workloads/speech.py` does
only that) and kept in the cache folder. The metric is 1 - the error rate of the letters read by CTC's best path, on
items that neither training nor calibration has seen.
"""

import math
import time
from itertools import pairwise

import numpy
import torch
from _shared import errors, training_precision, with_weights
from torch import nn
from transformers import ParakeetCTCConfig, ParakeetForCTC

LETTERS = "\0ptksmaeiou"
"""What is read; the first is CTC's blank."""
RATE, HOP, BANDS = 8000, 80, 64
VOWELS = {"a": (730, 1090), "e": (530, 1840), "i": (270, 2290), "o": (570, 840), "u": (300, 870)}
BURSTS = {"p": 600.0, "t": 3200.0, "k": 1700.0}


def voiced(length: int, formants: tuple, pitch: float, draw: numpy.random.Generator) -> numpy.ndarray:
    """Harmonics of a pitch that falls a little, as loud as two formants make them."""
    times = numpy.arange(length) / RATE
    partials = numpy.arange(1, int(3500 / pitch))[:, None]
    strength = sum(1 / (1 + ((partials * pitch - at) / 90) ** 2) / order for order, at in enumerate(formants, 1))
    phase = 2 * math.pi * pitch * (times - 0.3 * draw.random() * times**2)
    fade = numpy.minimum(1, numpy.minimum(times, times[::-1]) / 0.015)
    return (strength * numpy.sin(partials * phase + draw.uniform(0, 6.28, partials.shape))).sum(0) * fade


def noisy(length: int, low: float, high: float, draw: numpy.random.Generator) -> numpy.ndarray:
    """Noise between two frequencies."""
    spectrum = numpy.fft.rfft(draw.standard_normal(length))
    at = numpy.fft.rfftfreq(length, 1 / RATE)
    return numpy.fft.irfft(spectrum * ((low < at) & (at < high)), length)


def speak(letters: str, draw: numpy.random.Generator) -> numpy.ndarray:
    """The sound of syllables."""
    pitch, voice, pace = draw.uniform(90, 220), draw.uniform(0.9, 1.12), draw.uniform(0.8, 1.25)
    sounds = [numpy.zeros(int(RATE * draw.uniform(0.03, 0.1)))]
    for letter in letters:
        if letter in VOWELS:
            formants = tuple(voice * at * draw.uniform(0.95, 1.05) for at in VOWELS[letter])
            sounds.append(voiced(int(RATE * pace * draw.uniform(0.09, 0.17)), formants, pitch, draw))
        elif letter == "m":
            sounds.append(0.5 * voiced(int(RATE * pace * draw.uniform(0.06, 0.1)), (250, 1100), pitch, draw))
        elif letter == "s":
            sounds.append(noisy(int(RATE * pace * draw.uniform(0.07, 0.12)), 2300, 3900, draw))
        else:
            at = voice * BURSTS[letter]
            burst = 2.5 * noisy(int(RATE * draw.uniform(0.02, 0.03)), at - 500, at + 500, draw)
            sounds += [numpy.zeros(int(RATE * pace * draw.uniform(0.03, 0.06))), burst]
    sound = numpy.concatenate([*sounds, numpy.zeros(HOP)])
    return sound + draw.uniform(0.01, 0.06) * draw.standard_normal(len(sound))


def mel_filters() -> torch.Tensor:
    """Triangles on the mel scale: frequencies x bands."""
    edges = 700 * (10 ** (numpy.linspace(0, 2595 * math.log10(1 + RATE / 1400), BANDS + 2) / 2595) - 1)
    at = numpy.linspace(0, RATE / 2, 129)[:, None]
    up, down = (at - edges[:-2]) / (edges[1:-1] - edges[:-2]), (edges[2:] - at) / (edges[2:] - edges[1:-1])
    return torch.tensor(numpy.maximum(0, numpy.minimum(up, down)), dtype=torch.float32)


FILTERS = mel_filters()


def features(sound: numpy.ndarray) -> torch.Tensor:
    """Log mel energies of a sound, frames of 10 ms x bands, mean 0 and deviation 1."""
    samples = torch.tensor(sound, dtype=torch.float32)
    spectrum = torch.stft(samples, 256, HOP, window=torch.hann_window(256), return_complex=True).abs().T
    energies = (spectrum**2 @ FILTERS + 1e-4).log()
    return (energies - energies.mean()) / energies.std()


def item(seed: int, most: int, middle: float = 2.3, spread: float = 0.8) -> tuple:
    """Letters and their sound's features; the number of syllables is log-normal, `most` at most."""
    draw = numpy.random.default_rng(seed)
    count = int(numpy.clip(round(draw.lognormal(middle, spread)), 1, most))
    letters = "".join(draw.choice(list("ptksm")) + draw.choice(list("aeiou")) for _ in range(count))
    return letters, features(speak(letters, draw))


def batch_of(sounds: list) -> dict:
    """Items as one batch, padded to the longest."""
    longest = max(map(len, sounds))
    rows = torch.stack([nn.functional.pad(sound, (0, 0, 0, longest - len(sound))) for sound in sounds])
    mask = torch.arange(longest) < torch.tensor([len(sound) for sound in sounds])[:, None]
    return {"input_features": rows, "attention_mask": mask.long()}


class Recogniser(nn.Module):
    """Features and mask to logits, rows x places x letters: one place for four frames, 0 where a row has ended."""

    def __init__(self, conformer: ParakeetForCTC) -> None:
        super().__init__()
        self.conformer = conformer

    def forward(self, input_features, attention_mask):
        logits = self.conformer(input_features=input_features, attention_mask=attention_mask).logits
        place = torch.arange(logits.shape[1], device=logits.device)
        return logits * (place < steps_of(attention_mask.sum(1))[:, None])[:, :, None]


def network(hidden: int = 144, layers: int = 5, channels: int = 48) -> Recogniser:
    torch.manual_seed(0)
    encoder = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * hidden,
        "subsampling_factor": 4, "subsampling_conv_channels": channels, "num_mel_bins": BANDS, "dropout": 0.0,
        "layerdrop": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "scale_input": False,
    }  # fmt: skip
    config = ParakeetCTCConfig(vocab_size=len(LETTERS), pad_token_id=0, encoder_config=encoder)
    return Recogniser(ParakeetForCTC(config))


def steps_of(frames: torch.Tensor) -> torch.Tensor:
    """Places of the answer that so many frames give: each of two convolutions halves them."""
    return ((frames - 1) // 2 + 1 - 1) // 2 + 1


def train(model: nn.Module, steps: int = 600, rows: int = 16) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    begun = time.perf_counter()
    model.train()
    for step in range(steps):
        some = [item(1_000_000 + step * rows + row, 12, 1.6, 0.6) for row in range(rows)]
        batch = batch_of([sound for _, sound in some])
        with training_precision():
            logits = model(**batch)
        wanted = torch.tensor([LETTERS.index(letter) for letters, _ in some for letter in letters])
        sizes = torch.tensor([len(letters) for letters, _ in some])
        places = steps_of(batch["attention_mask"].sum(1))
        logs = logits.float().log_softmax(-1).transpose(0, 1)
        loss = nn.functional.ctc_loss(logs, wanted, places, sizes, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49 or step == 9:
            print(f"{step + 1}: {loss:.4f}, {time.perf_counter() - begun:.0f} s", flush=True)


def trained() -> Recogniser:
    """The model with its weights, which are trained if they are not in the cache folder."""
    model = network()
    return with_weights(model, train, "speech-1")


def decode(logits: torch.Tensor) -> list:
    """CTC's best path of each row: repetitions are one letter, blanks are none."""
    found = []
    for row in logits.argmax(-1).tolist():
        kept = [now for before, now in pairwise([0, *row]) if now != before and now != 0]
        found.append("".join(LETTERS[letter] for letter in kept))
    return found


def recogniser(model: Recogniser, rows: int, most: int, device: str, name: str) -> dict:
    """`rows` items a batch, each of `most` syllables at most."""
    items = [[item(number * rows + row, most) for row in range(rows)] for number in range(8)]
    batches = [
        {key: value.to(device) for key, value in batch_of([sound for _, sound in some]).items()} for some in items
    ]

    @torch.no_grad()
    def letters_read(run) -> float:
        wrong = count = 0
        for some, batch in zip(items[4:], batches[4:], strict=True):
            for (letters, _), text in zip(some, decode(run(**batch)), strict=True):
                wrong, count = wrong + errors(text, letters), count + len(letters)
        return 1 - wrong / count

    return {
        "model": model.to(device),
        "inputs": batches[:4],
        "check_inputs": batches[4:6],
        "metric": letters_read,
        "name": name,
    }


def workload(device: str = "cpu") -> dict:
    """32 items a batch."""
    return recogniser(trained(), 32, 60, device, "speech")


def small(device: str = "cpu") -> dict:
    """The same model on four short items a batch."""
    return recogniser(trained(), 4, 6, device, "speech-small")


if __name__ == "__main__":
    trained()
