"""An index that is out of range behind compiled code: eager's error, eager's state, and training goes on.

The compiled loop's own check ends the process: its exception cannot leave a parallel region.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.coexec.harness import Program
from tests.coexec.test_compiled import Pair

pytestmark = pytest.mark.compile
WORDS, CLASSES, LENGTH = 50, 9, 4096


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Only a loop on several threads is a parallel region."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("lengths", "given_as"),
    [((LENGTH,), torch.float32), ((LENGTH, 3000, 5001), torch.int64)],
    ids=["one length, labels cast", "many lengths"],
)
def test_an_index_out_of_range_in_compiled_code(lengths: tuple[int, ...], given_as: torch.dtype) -> None:
    def make() -> Program:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(WORDS, CLASSES), nn.Tanh(), nn.Hardswish())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words), labels.long())
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda i: arguments[i], lambda: model)

    arguments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for i in range(300):
        generator, length = torch.Generator().manual_seed(i), lengths[i % len(lengths)]
        words = torch.randint(WORDS, (length,), generator=generator)
        arguments[i] = words, (words % CLASSES).to(given_as)
    pair = Pair(make)
    pair.settle()
    for wrong, error in (("word", IndexError), ("negative word", IndexError), ("label", IndexError)):
        before = pair.compiled_runs()
        pair.run(6)
        assert pair.compiled_runs() > before, pair.why()
        words, labels = (t.clone() for t in arguments[pair.iteration])
        if wrong == "label":
            labels[777] = CLASSES
        else:
            words[777] = -1 if wrong == "negative word" else WORDS
        texts = []
        for step in (pair.eager.step, pair.step):
            with pytest.raises(error) as caught:
                step(words, labels)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
        labels[777], words[777] = -100, 0  # the label that is ignored is none of the classes, and right
        arguments[pair.iteration] = words, labels
    pair.run(6)
