"""Tokens as characters, and which token comes next."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.package.handlers.detokenizer import Detokenizer
from fettle.package.handlers.sampling import Sampling, choose, log_probabilities, nucleus


class Bytes:
    """A tokenizer whose tokens are bytes: a character beyond ASCII takes several."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")


@given(
    prompt=st.text("aé日", max_size=9),
    text=st.text("abé日😀", max_size=30),
    stop=st.lists(st.text("abé日😀", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_pieces_are_whole_characters_and_end_before_the_first_stop_string(prompt, text, stop):
    detokenizer, said = Detokenizer(Bytes(), list(prompt.encode()), stop), []
    for token in text.encode():
        said.append(detokenizer.add(token))
        if detokenizer.stopped:
            break
    said.append(detokenizer.end())
    places = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    assert detokenizer.stopped == bool(places)
    # The first that is complete ends the text; of several that are complete at once, the one that began first.
    end = min(places, default=(0, len(text)))[0] if places else None
    wanted = text[: min(begin for done, begin in places if done == end)] if places else text
    assert "".join(said) == wanted


def test_a_character_that_never_becomes_whole_is_told_at_the_end():
    detokenizer = Detokenizer(Bytes(), b"a", ())
    assert [detokenizer.add(token) for token in "é日".encode()[:-1]] == ["", "é", "", ""]
    assert detokenizer.end() == "\ufffd"


LOGITS = np.log(np.array([0.05, 0.4, 0.3, 0.15, 0.1]))


def drawn(count=2000, written=(), **wanted):
    random = np.random.default_rng(0)
    found = [choose(LOGITS, Sampling(temperature=1.0, **wanted), random, written) for _ in range(count)]
    return np.bincount(found, minlength=5) / count


def test_tokens_are_drawn_by_what_is_left_of_their_distribution():
    assert drawn() == pytest.approx(np.exp(LOGITS), abs=0.04)
    assert drawn(top_k=2) == pytest.approx([0, 4 / 7, 3 / 7, 0, 0], abs=0.04)
    assert drawn(top_p=0.69) == pytest.approx([0, 4 / 7, 3 / 7, 0, 0], abs=0.04)
    assert drawn(top_p=0.71) == pytest.approx([0, 0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0], abs=0.04)
    assert drawn(min_p=0.3) == pytest.approx([0, 0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0], abs=0.04)
    penalised = drawn(written=[1, 1], frequency_penalty=2.0, presence_penalty=2.0)
    shares = np.exp(LOGITS) * np.exp([0, -6, 0, 0, 0])
    assert penalised == pytest.approx(shares / shares.sum(), abs=0.04)
    greedy = Sampling(presence_penalty=2.0)
    assert choose(LOGITS, greedy, np.random.default_rng(0), [1]) == 2


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0])
def test_of_a_large_vocabulary_the_fewest_likeliest_are_drawn_from(spread):
    scores = spread * np.random.default_rng(0).standard_normal(8000)
    shares = np.exp(scores) / np.exp(scores).sum()
    ordered = np.sort(shares)[::-1]
    for top_p in (1e-9, 0.10003, 0.50003, 0.90003, 0.99997):
        found = nucleus(shares, top_p)
        assert len(set(found.tolist())) == len(found) == (ordered.cumsum() - ordered < top_p).sum()
        assert shares[found] == pytest.approx(ordered[: len(found)])
    drawn = choose(scores, Sampling(temperature=1.0, top_k=7, top_p=0.9), np.random.default_rng(1), ())
    assert shares[drawn] >= ordered[6]


def test_log_probabilities_are_the_models_own():
    own, best = log_probabilities(LOGITS + 7, 3, 2)
    assert own == pytest.approx(np.log(0.15))
    assert [token for token, _ in best] == [1, 2]
    assert [value for _, value in best] == pytest.approx(np.log([0.4, 0.3]))
    assert log_probabilities(LOGITS, 0, 0)[1] == []
