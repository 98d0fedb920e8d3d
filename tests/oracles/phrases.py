"""What random step programs are made of: expressions, writes, reads, conditions and heads of blocks.

`a` and `b` are float tensors of shape [rows, 4]; `d` is one that may be written in place (no gradient); `s` is a Python
number. `rows` is the number of rows of this call's batch, 1 to 6.
"""

from __future__ import annotations

PURE = (
    "{a} + {b}",
    "{a} * {b}",
    "{a} - {b} * 0.5",
    "torch.tanh({a})",
    "{a}.sigmoid()",
    "{a} @ {a}.t() @ {b}",
    "{a}.clone()",
    "{a}.relu() + 0.1",
    "{a} / ({b}.abs() + 1)",
    "{a}.softmax(1)",
    "{a}.cumsum(0) * 0.2",
    "torch.where({a} > 0, {a}, {b})",
    "{a} - {a}.mean(0, keepdim=True)",
    "torch.cat([{a}[:3], {b}[3:]])",
    "torch.stack([{a}, {b}]).mean(0)",
    "F.dropout({a}, 0.3)",
    "{a} + torch.rand(rows, 4)",
    "{a} * w + c",
    "F.linear({a}, m, c)",
    "F.layer_norm({a}, (4,))",
    "{a}.view(4, rows).t().contiguous().view(rows, 4)",
    "{a}.flip(0)",
    "{a}.detach()",
    "{a}.t().contiguous().t()",
    "{a}.masked_fill({b} > 0.5, 0.25)",
    "{a}[torch.randperm(rows)]",
    "{a} * {s}",
    "torch.full_like({a}, {s})",
    "{a}.double().exp().clamp(max=3).float()",
    "{a}.index_select(0, torch.arange(rows).flip(0))",
    "{a} + buf",
    "held[-1].mean(0) * 0.5 + {a}",
    "{a}.expand(2, rows, 4).sum(0) * 0.5",
    "torch.outer({a}[:, 0], {b}[0])",
)
"""Expressions of shape [rows, 4]."""

CONTAINERS = (
    "torch.stack([r * (k + 1) for k, r in enumerate({a})])",
    "sum(v.mean() for v in ({a}, {b}, *held)) + {a}",
    "[torch.tanh(v) for v in [{a}, {b}] if v.requires_grad or calls[0] % 2][-1:][0] if calls[0] % 2 else {b}",
    "dict(zip('pq', ({a}, {b} * 2)))['q']",
    "torch.stack({a}.unbind(1)[::-1], 1)",
    "torch.cat([piece * 0.5 for piece in {a}.split(2)])",
    "max(({a}, {b}), key=lambda v: v.detach().sum().item())",
    "functools.reduce(torch.add, [{a}] * (calls[0] % 3 + 1))",
    "memo.setdefault('k', {a}.detach()).mean() + {a}",
    "next(v * 2 for v in ({a}, {b}))",
    "Pair({a}, {b} * 0.5).second",
)
"""Expressions through Python's containers, comprehensions and generators."""

SPECIAL = (
    "Scale.apply({a}, {s})",
    "Scale.apply({a} * 1, 0.5)",
    "Overwrite.apply({a}.clone())",
    "net({a})",
    "torch.utils.checkpoint.checkpoint(net, {a}, use_reentrant=False)",
    "bn({a}) if rows > 1 else {a}",
    "torch.func.vmap(lambda r: r * r.sum())({a})",
    "torch.func.grad(lambda v: v.pow(2).sum())({a}.detach())",
    "torch.func.jvp(torch.sin, ({a}.detach(),), (torch.ones_like({a}),))[1]",
    "torch.sparse.mm(m.to_sparse(), {a}.detach().t()).t()",
    "torch.fft.fft({a}, dim=1).abs()",
    "{a}.bfloat16().float()",
    "torch.from_numpy(arr) * 0.1 + {a}",
    "torch.tensor([n, 0.0, 1.0, 2.0]) * 0.01 + {a}",
    "{a}.topk(2, dim=1)[0].sum(1, keepdim=True) + {a} * 0",
    "{a}.sort(0)[0]",
    "torch.rand(rows, 4, generator=gen) + {a}",
    "torch.add({a}.detach(), {b}.detach(), out=torch.empty(0))",
    "{a}[{a}[:, 0] > -9]",
    "{a}.index_put((torch.tensor([0]),), torch.ones(4))",
    "torch.nn.utils.rnn.pad_sequence([{a}[: k + 1] for k in range(rows)], batch_first=True).mean(0)",
    "copy.deepcopy({a}.detach())",
    "{a}.to(torch.complex64).real + 0.1",
    "torch.einsum('ij,kj->ik', {a}, m)",
    "{a}.unfold(1, 2, 1).sum(-1).repeat(1, 2)[:, :4]",
)
"""Expressions that leave the common path: custom functions, modules, transforms, other layouts and dtypes."""

IN_PLACE = (
    "{d}.add_({s})",
    "{d}.mul_(0.5)",
    "{d}[1:].copy_({a}[:-1].detach().clone())",
    "{d}[:, 0] = {a}[:, 1].detach()",
    "{d}.t().add_(0.1)",
    "{d}.clamp_(-2, 2)",
    "{d}[{d} > 1] = 0.5",
    "torch._foreach_mul_([{d}, buf], 0.9)",
    "{d}.detach().add_(0.25)",
    "{d}.data.mul_(0.9)",
    "buf.mul_(0.9).add_({a}.detach().mean(0), alpha=0.1)",
    "buf[1:3] += {s}",
    "scratch.zero_()[:rows].copy_({a}.detach())",
    "scratch.view(-1)[3:9].zero_()",
    "held.append({a}.detach()); del held[:-3]",
    "held[-1].add_(0.01)",
    "scratch.uniform_(-1, 1)",
    "log.append({a}.detach()[0]); del log[:-4]",
    "memo['k'] = {a}.detach().clone()",
    "memo.pop('k', None)",
    "arr[:] += 0.25",
    "torch.mul({a}.detach(), 0.5, out={d}) if {d}.shape == {a}.shape else None",
    "d = torch.empty(0).set_({a}.detach().clone())",
    "d = {d}.clone().resize_(rows, 4)",
    "w.data = w.data * 0.99",
    "c.data.copy_(c.data * 0.9)",
    "d = {d}.clone().unsqueeze_(0).squeeze_(0)",
    "d = {a}.detach().clone().t_().t_()",
    "d = {a}.detach()",
    "torch.manual_seed(calls[0])",
    "net.train(calls[0] % 3 != 0)",
    "opt.param_groups[0]['lr'] = 0.01 * (1 + calls[0] % 5)",
    "d.normal_(generator=gen)",
    "torch._foreach_lerp_([buf], [{a}.detach().mean(0)], 0.1)",
    "held.sort(key=lambda v: v.shape[0])",
    "torch.nn.init.uniform_(scratch)",
    "y.mul_(0.9)",
    "y[0].add_(n * 0.01)",
    "held.append(y)",
)
"""Statements that write."""

READS = (
    "n = round({a}.sum().item(), 3)",
    "n = float({a}.detach().abs().max())",
    "n = {a}.detach().numpy()[0].sum().item()",
    "n = len({a}.detach().tolist())",
    "n = int(({a} > 0).sum())",
    "text.append(f'{{{a}.mean():.4f}}'); del text[:-5]",
    "n = buf.sum().item()",
    "n = bool(({a} > 2).any())",
    "n = random.random()",
    "n = torch.rand(()).item()",
    "n = {a}.detach()[({a}[:, 0] > 0).nonzero()[:, 0]].shape[0]",
    "arr[:] = {a}.detach().numpy()[0]",
    "n = float(arr.sum())",
    "n = float(np.random.rand())",
    "n = int(torch.get_rng_state()[:64].sum())",
    "n = torch.randint(0, 9, (3,)).tolist()[calls[0] % 3]",
    "n = len(torch.unique(({a}.detach() * 2).round()))",
    "n = {a}.shape[0] + {a}.dim()",
    "text.append(str({a}.detach()[0, :2])); del text[:-5]",
    "n = float(np.asarray({a}.detach()).mean())",
    "n = torch.initial_seed() % 1000",
    "with torch.inference_mode(): n = ({a} * 2).sum().item()",
    "with torch.random.fork_rng(): n = torch.rand(2).sum().item()",
    "n = sum(p.detach().abs().sum().item() for p in (w, c))",
    "n = {a}.argmax().item() % 7",
    "n = {a}._version + {d}._version",
    "n = float({a}.requires_grad) + float({a}.is_contiguous())",
    "n = pickle.loads(pickle.dumps({a}.detach())).mean().item()",
)
"""Statements after which Python knows something about a tensor, or about a random stream."""

CONDITIONS = (
    "random.random() < 0.5",
    "{a}.sum() > 0.3137",
    "calls[0] % 4 == 1",
    "calls[0] % 7 == 5",
    "{a}.mean().item() > 0.1",
    "isinstance(n, float)",
    "x[0, 0] > 0.3",
    "rows > 4",
    "len(held) > 1 and not {a}.isnan().any()",
    "torch.is_grad_enabled()",
)

QUIET = ("random.random() < 0.5", "calls[0] % 4 == 1", "calls[0] % 7 == 5", "rows > 4")
"""Conditions that need no tensor."""

TRIPS = ("2", "3", "calls[0] % 3", "int(abs(n)) % 3", "rows", "random.randint(0, 3)")
"""How often a loop runs."""

MODES = (
    "torch.no_grad()",
    "torch.enable_grad()",
    "torch.set_grad_enabled(calls[0] % 3 == 0)",
    "torch.autocast('cpu', torch.bfloat16, enabled=False)",
    "torch.random.fork_rng()",
    "contextlib.suppress(RuntimeError, KeyError, IndexError)",
    "torch.autograd.profiler.record_function('part')",
)
"""Context managers whose body may make values that live on."""

FAILING = (
    "{a}.view(7, 3)",
    "{a}[99]",
    "torch.cat([{a}, {a}[0]])",
    "{a} @ {b}",
    "torch.linalg.cholesky({a}.detach()[:1, :1] * 0 - 1)",
    "raise KeyError(calls[0])",
    "torch.ones(rows, 4).add_({a}.double().to(torch.complex64))",
    "missing[calls[0]]",
)
"""Statements that raise."""

HOOKS = (
    "{a}.register_hook(lambda g: g * 0.5) if {a}.requires_grad else None",
    "{a}.register_hook(lambda g: log.append(g.detach()[0]) or None) if {a}.requires_grad else None",
    "{a}.retain_grad() if {a}.requires_grad else None",
    "handles.append(w.register_post_accumulate_grad_hook(lambda p: text.append(f'{{p.grad.sum().item():.4f}}')))",
    "handles.append(net.register_forward_hook(lambda mod, i, o: o * 0.9))",
    "handles.append(c.register_hook(lambda g: g.clamp(-1, 1)))",
)
"""Statements that hang something on the backward pass; `handles` are removed at the end of the step."""

BACKWARD = (
    ("loss.backward()", "opt.step()", "opt.zero_grad()"),
    ("opt.zero_grad()", "loss.backward()", "n = loss.item()", "opt.step()"),
    ("g = torch.autograd.grad(loss, [w, c])", "with torch.no_grad(): w.sub_(0.05 * g[0])"),
    ("loss.backward()", "if calls[0] % 2 == 0: opt.step(); opt.zero_grad()"),
    (
        "loss.backward()",
        "n = torch.nn.utils.clip_grad_norm_([w, c], 1.0).item()",
        "opt.step()",
        "sched.step()",
        "opt.zero_grad(set_to_none=False)",
    ),
    (
        "g = torch.autograd.grad(loss, [w], create_graph=True)[0]",
        "(loss + g.pow(2).sum() * 0.1).backward()",
        "opt.step()",
        "opt.zero_grad()",
    ),
    ("loss.backward(retain_graph=True)", "loss.backward()", "opt.step()", "opt.zero_grad()"),
    (
        "w.requires_grad_(calls[0] % 3 != 0)",
        "loss.backward()",
        "opt.step()",
        "opt.zero_grad()",
        "w.requires_grad_(True)",
    ),
    (
        "def closure(): opt.zero_grad(); loss = (x * w + c).pow(2).mean(); loss.backward(); return loss",
        "n = float(opt.step(closure))",
    ),
    ("loss.backward()", "for p in (w, c): p.data.add_(p.grad, alpha=-0.05); p.grad = None"),
)
"""How a step ends that trains; `loss` is there."""
