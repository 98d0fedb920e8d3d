"""An index that is out of range behind compiled code: eager's error, eager's state, and training goes on.

Inductor's own check ends the process: its exception cannot leave a parallel region.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.coexec.harness import Program
from tests.coexec.test_compiled import Pair

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("two_threads")]
WORDS, CLASSES, LENGTH = 50, 9, 4096


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


def apart(words: Tensor) -> Tensor:
    """The numbers from 0 on, but for words that are none: these are far from all others."""
    return torch.arange(LENGTH) + (words - words.clamp(0, WORDS - 1)) * 1000


COMPUTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "embedding": lambda table, scores, words: F.embedding(words + 1, table),
    "rows": lambda table, scores, words: table[words - 3],
    "through floats": lambda table, scores, words: table[(words * 0.5).long()],
    "columns": lambda table, scores, words: scores.gather(1, (words // 8)[:, None]),
    "labels": lambda table, scores, words: F.cross_entropy(scores, words // 8),
    "chosen rows": lambda table, scores, words: table.index_select(0, words + 1),
    "copied to rows": lambda table, scores, words: torch.zeros_like(scores).index_copy(0, apart(words), scores),
    "added to rows": lambda table, scores, words: torch.zeros_like(table).index_add(0, words + 1, scores),
    "put into rows": lambda table, scores, words: table.index_put((words + 1,), scores, accumulate=True),
    "columns overwritten": lambda table, scores, words: (scores * 2).scatter(1, (words // 8)[:, None], 0.5),
    "added to columns": lambda table, scores, words: (scores * 2).scatter_add(1, (words // 8)[:, None], scores[:, :1]),
    "flat": lambda table, scores, words: table.take(words - 3),
    "bags": lambda table, scores, words: F.embedding_bag((words + 1).view(-1, 4), table),
    "drawn before": lambda table, scores, words: table[words + 1] * F.dropout(scores, 0.5),
}
"""(float32[WORDS + 2, 8], float32[LENGTH, 8], int64[LENGTH] below WORDS) to anything: the step computes indices."""

FROM_THE_END = {"rows", "through floats", "put into rows", "flat", "drawn before"}
"""Those that take -1 for the last one."""


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_computed_index_out_of_range_in_compiled_code(kind: str) -> None:
    def make() -> Program:
        torch.manual_seed(0)
        table, scores = (nn.Parameter(torch.randn(rows, 8)) for rows in (WORDS + 2, LENGTH))
        optimizer = torch.optim.SGD([table, scores], lr=0.1)

        def step(words: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (F.hardswish(COMPUTED[kind](table, scores, words).tanh()) + 1).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda i: (arguments[i],), lambda: {"table": table, "scores": scores})

    arguments = {i: torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(i)) for i in range(200)}
    pair = Pair(make)
    pair.settle()
    for wrong in (1000, -1000, *(() if kind in FROM_THE_END else (-2,))):
        before = pair.compiled_runs()
        pair.run(3)
        assert pair.compiled_runs() > before, pair.why()
        words = arguments[pair.iteration].clone()
        words[777] = wrong
        texts, streams = [], []
        for step in (pair.eager.step, pair.step):
            torch.manual_seed(5)
            with pytest.raises((IndexError, RuntimeError)) as caught:
                step(words)
            texts.append(repr(caught.value))
            streams.append(torch.get_rng_state())
        assert texts[0] == texts[1]
        assert torch.equal(*streams)
    before = pair.compiled_runs()
    pair.run(3)
    assert pair.compiled_runs() > before, pair.why()


def test_a_read_before_a_computed_index_out_of_range() -> None:
    """What was handed to Python before the error is right, and what Python did with it happens once."""

    def make() -> Program:
        torch.manual_seed(0)
        table = nn.Parameter(torch.randn(WORDS + 1, 8))
        optimizer = torch.optim.SGD([table], lr=0.1)
        norms: list[float] = []

        def step(words: Tensor) -> Tensor:
            optimizer.zero_grad()
            norms.append((table.tanh() + 1).square().mean().item())
            loss = F.hardswish(F.embedding(words + 1, table).tanh()).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda i: (arguments[i],), lambda: {"table": table, "norms": torch.tensor(norms)})

    arguments = {i: torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(i)) for i in range(200)}
    pair = Pair(make)
    pair.settle()
    arguments[pair.iteration][5] = WORDS + 7
    for step in (pair.eager.step, pair.step):
        with pytest.raises(IndexError):
            step(arguments[pair.iteration])
    pair.iteration += 1
    before = pair.compiled_runs()
    pair.run(3)
    assert pair.compiled_runs() > before, pair.why()


def test_memory_of_the_user_is_not_written_at_an_index_out_of_range() -> None:
    """The new content is computed aside, and copied when all is well."""

    def make() -> Program:
        counts = torch.zeros(WORDS + 1, 8)
        weight = torch.linspace(0, 1, LENGTH * 8).view(LENGTH, 8)

        def step(words: Tensor) -> Tensor:
            counts.index_add_(0, words + 1, (weight.tanh() + 1).square())
            return (counts * 2).tanh().square().mean()

        return Program(step, lambda i: (arguments[i],), lambda: {"counts": counts})

    arguments = {i: torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(i)) for i in range(200)}
    pair = Pair(make)
    pair.settle()
    for step in (pair.eager.step, pair.step):
        with pytest.raises(RuntimeError, match=r"index 10\d\d is out of bounds"):
            step(arguments[0] + 1000)
    before = pair.compiled_runs()
    pair.run(3)
    assert pair.compiled_runs() > before, pair.why()


WITHOUT_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "chosen rows": lambda table, index: table.index_select(0, index),
    "along a dimension": lambda table, index: torch.take_along_dim(table, index[:, None].repeat(1, 8), 0),
    "filled rows": lambda table, index: table.index_fill(0, index, 3.0),
    "reduced rows": lambda table, index: table.index_reduce(0, index, table[:1].expand(LENGTH, -1) * 2, "amax"),
    "copied rows": lambda table, index: table.index_copy(0, index, torch.full((LENGTH, 8), 2.0)),
    "reduced": lambda table, index: table.scatter_reduce(0, index[:, None], torch.ones(LENGTH, 1), "amax"),
    "bags": lambda table, index: F.embedding_bag(index.view(-1, 4), table),
    "largest of bags": lambda table, index: F.embedding_bag(index.view(-1, 4), table, mode="max"),
    "classes": lambda table, index: F.nll_loss(table.t()[:1].expand(LENGTH, -1), index),
    "pixels": lambda table, index: F.nll_loss(table.t()[:1, :, None].expand(1, -1, LENGTH), index[None]),
    "flat": lambda table, index: table.take(index),
    "put": lambda table, index: table.put(index, torch.ones(LENGTH)),
}
"""(float32[WORDS, 8], int64[LENGTH] below WORDS) to anything."""


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")  # it is said to be in beta
def test_a_computed_index_without_gradients() -> None:
    """Below zero and above: what eager takes, and what it says of the rest."""

    def make() -> Program:
        def step(table: Tensor, *words: Tensor) -> list[Tensor]:
            table = table.tanh() + 1
            results = [use(table, index - 1) for use, index in zip(WITHOUT_GRADIENTS.values(), words, strict=True)]
            return [F.hardswish(result) * 2 for result in results]

        return Program(step, arguments.__getitem__)

    arguments = {i: [table_of(i), *(words_of(i, k) + 1 for k in range(len(WITHOUT_GRADIENTS)))] for i in range(200)}
    pair = Pair(make)
    pair.settle()
    pair.to_compiled_turn()  # what raises takes no turn
    everything, taken = list(arguments[pair.iteration]), set()
    for k, kind in enumerate(WITHOUT_GRADIENTS, 1):
        for place, wrong in ((777, -1), (778, 1000)):
            given = list(arguments[pair.iteration])
            given[k] = given[k].index_fill(0, torch.tensor([place]), wrong + 1)
            if (expected := error_of(pair.eager.step, given)) is None:
                taken.add((kind, wrong))
                everything[k] = everything[k].index_fill(0, torch.tensor([place]), wrong + 1)
            else:
                before = pair.discards()
                assert repr(error_of(pair.step, given)) == repr(expected), kind
                assert pair.discards() == before + 1, f"{kind}: {pair.why()}"
    around = {("along a dimension", -1), ("along a dimension", 1000)}  # eager takes the rest of a division
    assert taken == around | {(kind, -1) for kind in ("filled rows", "flat", "put")}
    arguments[pair.iteration], before = everything, pair.compiled_runs()
    pair.run(1)
    assert pair.compiled_runs() == before + 1, pair.why()


def error_of(step: Callable[..., object], given: list[Tensor]) -> Exception | None:
    try:
        step(*given)
    except (IndexError, RuntimeError) as error:
        return error
    return None


def table_of(i: int) -> Tensor:
    return torch.randn(WORDS, 8, generator=torch.Generator().manual_seed(i))


def words_of(i: int, k: int) -> Tensor:
    return torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(1000 * i + k))
