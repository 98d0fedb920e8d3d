"""Sizes that depend on values, layouts other than strided, and types beyond float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch, function_program, labels, mlp

OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": lambda x: (x > 0.3).nonzero(),
    "nonzero tuple": lambda x: torch.nonzero(x > 0.3, as_tuple=True),
    "mask": lambda x: x[x > 0.5].sum(),
    "masked_select": lambda x: x.masked_select(x < 0),
    "mask write": lambda x: x.clone().index_put_((x > 0,), torch.tensor(9.0)),
    "empty mask": lambda x: x[x > 1e9],
    "where": lambda x: torch.where(x > 0),
    "where values": lambda x: torch.where(x > 0, x, -x),
    "unique": lambda x: torch.unique(x.round(), return_counts=True, return_inverse=True),
    "unique_consecutive": lambda x: torch.unique_consecutive(x.round().view(-1)),
    "bincount": lambda x: torch.bincount(x.abs().long().view(-1)),
    "histc": lambda x: torch.histc(x, 5),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x[:, 0].abs().long(), dim=0),
    "argwhere": lambda x: torch.argwhere(x > 0),
    "combinations": lambda x: torch.combinations(x[:, 0]),
    "masked rows": lambda x: x[x[:, 0] > 0].mean(0).nan_to_num(),
    "topk then gather": lambda x: x.gather(1, x.topk(2, 1).indices),
    "sort stable": lambda x: x.round().sort(dim=0, stable=True),
    "nms like": lambda x: x[(x.sum(1) > 0).nonzero().squeeze(1)].cumsum(0),
    "pad_sequence": lambda x: nn.utils.rnn.pad_sequence([x[: 1 + k] for k in range(3)], batch_first=True),
    "split by counts": lambda x: x.split([1, 2, 3]),
    "tensor_split": lambda x: x.tensor_split(torch.tensor([2, 4])),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "item slicing": lambda x: x[: int((x > 0).sum()) % 3 + 1].sum(0),
    "eig": lambda x: torch.linalg.eigvalsh(x.t() @ x),
    "svd": lambda x: torch.linalg.svdvals(x),
    "qr": lambda x: torch.linalg.qr(x),
    "solve": lambda x: torch.linalg.solve(x.t() @ x + torch.eye(4), torch.ones(4)),
    "matrix rank": lambda x: torch.linalg.matrix_rank(x),
    "inverse": lambda x: torch.inverse(x.t() @ x + torch.eye(4)),
    "fft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2),
    "complex": lambda x: (torch.complex(x, x * 2).conj() @ torch.complex(x, x).t()).abs(),
    "conj view": lambda x: torch.complex(x, x).conj(),
    "complex in place": lambda x: torch.complex(x, x).mul_(1j).imag,
    "negative view": lambda x: torch.complex(x, x).conj().imag,
    "polar": lambda x: torch.polar(x.abs(), x),
    "stft": lambda x: torch.stft(x.reshape(-1), 8, window=torch.ones(8), return_complex=True).abs(),
    "half": lambda x: (x.half() @ x.half().t()).float(),
    "bfloat16": lambda x: x.bfloat16().softmax(1),
    "double": lambda x: x.double().exp().float(),
    "int8": lambda x: (x * 10).to(torch.int8) // 2,
    "uint8 shift": lambda x: (x.abs() * 10).to(torch.uint8) << 1,
    "bool logic": lambda x: (x > 0) & (x < 1) | ~(x != x),
    "int overflow": lambda x: (x * 1e9).to(torch.int32) * 7,
    "integer division": lambda x: (x * 10).long() % 3,
    "nan and inf": lambda x: (x / 0).nan_to_num(1.0, 2.0, 3.0) + (x * float("inf")).isnan(),
    "float8": lambda x: x.to(torch.float8_e4m3fn).float(),
    "coo": lambda x: x.relu().to_sparse().coalesce(),
    "coo matmul": lambda x: torch.sparse.mm(x.relu().to_sparse(), x.t()),
    "coo built": lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), x[0, :2], (2, 2)).to_dense(),
    "csr": lambda x: x.relu().to_sparse_csr() @ x.t(),
    "coo values": lambda x: x.relu().to_sparse().values() * 2,
    "sparse sum": lambda x: torch.sparse.sum(x.relu().to_sparse(), 0).to_dense(),
    "nested strided": lambda x: torch.nested.nested_tensor([x[:2], x[2:]]).to_padded_tensor(0.0),
    "nested jagged": lambda x: [
        t * 2 for t in torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged).unbind()
    ],
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.qint8).dequantize() + 1,
    "quantized kept": lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
    "fake quantize": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255),
    "max_pool1d": lambda x: nn.functional.max_pool1d(x.view(1, 6, 4), 2),
    "tensor_split by tensor": lambda x: x.tensor_split((x[:, 0] > 0).long().cumsum(0)[:2]),
    "ctc of computed lengths": lambda x: nn.functional.ctc_loss(
        x.view(6, 1, 4).log_softmax(2), torch.tensor([[1, 2]]), (x[:, :1] < 99).sum(0), torch.tensor([2])
    ),
    "index by a 0-dim tensor": lambda x: x[x[:, 0].argmax()] + x[:, x[0].argmin()][:4],
    "write at a 0-dim tensor": lambda x: x.clone().index_put_((x[:, 0].argmax(),), torch.zeros(())),
    "range of a tensor": lambda x: list(range((x > 0).sum())),
    "sizes from tensors": lambda x: torch.zeros((x > 0).sum(), 2).view(-1, (x[0, 0] > -99).long() + 1).shape,
    "numbers from tensors": lambda x: (
        x.clamp(min=x.mean().item()),
        torch.add(x, x, alpha=x.sum()),
        x.pow(x[0, 0].round()),
    ),
    "fill from a tensor": lambda x: torch.full((3,), x.sum().item()) + torch.empty(3).fill_(x.sum()),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "new_zeros": lambda x: (x.new_zeros(2), x.new_full((2,), 3), x.new_empty(0)),
    "type": lambda x: (x.type(), x.type(torch.float64), x.type_as(x.double()), x.to(torch.zeros(0, dtype=torch.half))),
    "embedding_bag": lambda x: nn.functional.embedding_bag(torch.tensor([0, 2, 1]), x, torch.tensor([0, 2])),
    "ctc": lambda x: nn.functional.ctc_loss(
        x.view(6, 1, 4).log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2])
    ),
    "meta": lambda x: torch.empty(3, device="meta") * 2,
    "tensor constant": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "arange of item": lambda x: torch.arange(int(x.abs().sum()) % 4 + 1) * x[0, 0],
    "linspace": lambda x: torch.linspace(0, x.abs().max().item(), 5),
    "full like of item": lambda x: torch.full_like(x, x.mean().item()),
    "one_hot": lambda x: nn.functional.one_hot(x.argmax(1)),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    "scatter_reduce": lambda x: torch.zeros(3).scatter_reduce(0, x.argmax(1) % 3, x[:, 0], "amax"),
    "cdist": lambda x: torch.cdist(x, x),
    "grid_sample": lambda x: nn.functional.grid_sample(
        x.view(1, 1, 6, 4), x.view(1, 3, 4, 2).tanh(), align_corners=False
    ),
    "interpolate": lambda x: nn.functional.interpolate(x.view(1, 1, 6, 4), scale_factor=2.0, mode="bilinear"),
    "unfold fold": lambda x: nn.functional.fold(nn.functional.unfold(x.view(1, 1, 6, 4), 2), (6, 4), 2),
    "block_diag": lambda x: torch.block_diag(x[:2], x[2:]),
    "cartesian": lambda x: torch.cartesian_prod(x[:, 0], x[:2, 1]),
    "broadcast": lambda x: torch.broadcast_tensors(x, x[:1])[1] + 1,
    "meshgrid": lambda x: torch.meshgrid(x[:, 0], x[:2, 1], indexing="ij"),
    "pin": lambda x: x.clone().is_pinned(),
    "to device": lambda x: x.to("cpu", copy=True),
    "out kwarg": lambda x: torch.mul(x, 2, out=torch.empty(0)),
    "out kwarg sized": lambda x: torch.mul(x, 2, out=torch.empty(6, 4)),
    "out sort": lambda x: torch.sort(x, out=(torch.empty(0), torch.empty(0, dtype=torch.long))),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_op_in_the_middle_of_the_graph(name: str) -> None:
    op = OPS[name]

    def step(x: torch.Tensor) -> Any:
        h = x * 1.5
        middle = op(h)
        return middle, h + 1, h.sum()

    check(lambda: function_program(step), n=14, max_fallbacks=6)


def test_out_where_an_argument_before_it_shares_its_memory() -> None:
    """The result was taken for a view of that argument; where its memory came from outside, the process crashed."""

    def make() -> Program:
        calls, generator = itertools.count(1), torch.Generator().manual_seed(0)

        def step(x: torch.Tensor) -> Any:
            h = torch.rand(len(x), 4, generator=generator) + x  # Python waits for such a draw
            if next(calls) % 4 == 1:
                h = h + h
                bool(h.sum() > 0.3)
            else:
                h = h * 2
            into = h.detach()
            torch.mul(h.detach(), 0.5, out=into)
            return h, into, into.data_ptr() == h.data_ptr()

        return Program(step, lambda i: (batch(i),))

    check(make, n=40, max_fallbacks=4)


def test_masks_of_any_size_around_batch_norm_train() -> None:
    def make() -> Program:
        layer = nn.BatchNorm1d(4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            rows = x[x.sum(1) > -1]
            out = layer(rows) if len(rows) > 1 else rows * layer.weight
            out.pow(2).sum().backward()
            optimizer.step()
            return out.shape, out.detach()

        return Program(step, lambda i: (batch(i),), lambda: (layer, optimizer))

    check(make, n=16, max_fallbacks=8, min_co_executed=1)


def test_an_index_by_position_does_not_keep_python_waiting() -> None:
    def make() -> Program:
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            order = x.sum(1).argsort(stable=True)
            rows = layer(x[order])
            columns = rows[:, order[:3] % 4]
            columns[order // 2, None].square().sum().backward()
            optimizer.step()
            return columns.detach()

        return Program(step, lambda i: (batch(i),), lambda: (layer, optimizer))

    out = check(make, max_fallbacks=0)
    assert out.compiled._runner.wait_counts().get("sync", 0) == 0


def test_an_index_that_is_now_a_position_and_now_a_mask() -> None:
    def make() -> Program:
        def step(x: torch.Tensor, i: int) -> Any:
            h = x * 1.5
            index = h[:, 0].argsort() if i % 3 else h[:, 0] > 0.0
            return h[index] + 1.0

        return Program(step, lambda i: (batch(i), i))

    check(make, n=18, max_fallbacks=4)


def test_tensor_subclass_with_torch_function() -> None:
    class Counting(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    def make() -> Program:
        Counting.calls = 0

        def step(x: torch.Tensor) -> Any:
            c = x.as_subclass(Counting)
            y = (c * 2 + 1).sum(0)
            return type(y).__name__, y, Counting.calls

        return function_program(step)

    check(make)


def test_wrapper_subclass_with_torch_dispatch() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def step(x: torch.Tensor) -> Any:
        pair = TwoTensor(x * 1, x * 2)
        out = (pair @ pair.t()).relu()
        return out.a, out.b

    check(lambda: function_program(step), phase=None, max_fallbacks=10, min_co_executed=0)


def test_a_dispatch_mode_around_and_inside() -> None:
    class Log(TorchDispatchMode):
        def __init__(self, names: list[str]) -> None:
            super().__init__()
            self.names = names

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def make() -> Program:
        names: list[str] = []

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            with Log(names):
                y = y.relu() + 1
            return y

        return Program(step, lambda i: (batch(i),), lambda: names)

    check(make)


def test_torch_function_mode_and_default_device_and_dtype() -> None:
    def step(x: torch.Tensor) -> Any:
        with torch.device("cpu"):
            a = torch.zeros(3)
        torch.set_default_dtype(torch.float64)
        b = torch.ones(2)
        torch.set_default_dtype(torch.float32)
        return a, b, torch.zeros(2), x.new_ones(2)

    check(lambda: function_program(step))


def test_packed_sequences_of_any_length() -> None:
    def make() -> Program:
        rnn = nn.GRU(4, 5, batch_first=True)
        optimizer = torch.optim.SGD(rnn.parameters(), lr=0.1)

        def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
            optimizer.zero_grad()
            packed = nn.utils.rnn.pack_padded_sequence(x.view(2, 3, 4), lengths, batch_first=True, enforce_sorted=False)
            out, h = rnn(packed)
            padded, sizes = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
            padded.pow(2).sum().backward()
            optimizer.step()
            return sizes, h.detach(), padded.detach()

        return Program(step, lambda i: (batch(i), torch.tensor([1 + i % 3, 3])), lambda: rnn)

    check(make, n=14, max_fallbacks=8, min_co_executed=1)


@pytest.mark.parametrize("layers", ["lstm", "gru", "transformer", "attention", "conv"])
def test_layers_of_every_family(layers: str) -> None:
    def make() -> Program:
        model: nn.Module = {
            "lstm": lambda: nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True),
            "gru": lambda: nn.GRU(4, 5, batch_first=True),
            "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True),
            "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            "conv": lambda: nn.Sequential(
                nn.Conv1d(3, 4, 2), nn.GroupNorm(2, 4), nn.GELU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(4, 2)
            ),
        }[layers]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            h = x.view(2, 3, 4)
            out = model(h, h, h) if layers == "attention" else model(h)
            out = out[0] if isinstance(out, tuple) else out
            loss = out.pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (batch(i),), lambda: (model, optimizer))

    check(make)


def test_changing_batch_sizes_dtypes_and_layouts() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.float()), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        def args(i: int) -> tuple[Any, ...]:
            rows = [6, 6, 6, 3, 1, 6, 2][i % 7]
            x = batch(i, rows)
            return (x.double() if i % 5 == 4 else x.t().contiguous().t() if i % 4 == 3 else x), labels(i, rows)

        return Program(step, args, lambda: (model, optimizer))

    check(make, n=30, phase=None, max_fallbacks=14, min_co_executed=5)


def test_an_empty_last_batch() -> None:
    def make() -> Program:
        model = mlp()

        def step(x: torch.Tensor) -> Any:
            out = model(x)
            model.zero_grad()
            out.sum().backward()
            return out.shape, out.detach()

        return Program(step, lambda i: (batch(i, 0 if i % 5 == 4 else 6),), lambda: model)

    check(make, n=14)


def test_a_model_cast_half_way() -> None:
    def make() -> Program:
        model = mlp()

        def args(i: int) -> tuple[Any, ...]:
            if i == 5:
                model.double()
            if i == 9:
                model.float()
            return (batch(i).to(next(model.parameters()).dtype),)

        return Program(lambda x: model(x).sum().item(), args, lambda: model)

    check(make, n=14)


def test_custom_ops_of_torch_library() -> None:
    @torch.library.custom_op("coexec_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    @torch.library.custom_op("coexec_test::bump", mutates_args=("x",))
    def bump(x: torch.Tensor) -> None:
        x.numpy()[...] += 1

    def make() -> Program:
        state = torch.zeros(4)

        def step(x: torch.Tensor) -> Any:
            h = twice(x + 1)
            bump(state)
            bump(h)
            return h * 3, state.sum()

        return Program(step, lambda i: (batch(i),), lambda: state)

    check(make)
