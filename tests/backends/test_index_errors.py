"""Kernels that note a wrong index: it is 0 from there on, wherever the loop keeps it."""

from __future__ import annotations

from coexec.backends.index_errors import CHECK, noted

VECTOR = f"""
for (...) {{
    auto tmp9 = decltype(tmp3)::blendv(tmp8, tmp3, tmp6.template cast<int64_t,2>());
    auto tmp10 =
    [&]
    {{
        __at_align__ std::array<int64_t, 16> tmpbuf;
        tmp9.store(tmpbuf.data(), static_cast<int64_t>(16));
        return tmpbuf;
    }}
    ()
    ;
    auto tmp11 = loadu(tmp10);
    {CHECK}tmp9((0 <= tmp11 & tmp11 < 50).all_masked(), "index out of bounds: 0 <= tmp11 < 50L");
    auto tmp13 = gather(in_ptr1, tmp10);
    atomic_add_vec(out_ptr0, tmp11, tmp13);
}}
"""
"""As Inductor of torch 2.13 writes it: memory is read by `tmp10` and written by `tmp11`."""

SCALAR = f"""
for (...) {{
    auto tmp9 = in_ptr0[x0];
    {CHECK}tmp9((0 <= tmp9) & (tmp9 < 50), "index out of bounds: 0 <= tmp9 < 50L");
    auto tmp10 = in_ptr1[tmp9];
}}
"""


def test_a_vector_the_array_of_its_elements_and_its_copy_are_reset() -> None:
    code = noted(VECTOR)
    assert (
        "coexec_index_error.store(1); tmp9 = decltype(tmp9)(0); tmp11 = decltype(tmp11)(0); tmp10.fill(0); } }(" in code
    )
    assert CHECK not in code


def test_names_of_an_earlier_loop_are_not_those_of_a_later_one() -> None:
    vector, scalar = noted(VECTOR + SCALAR).split("for (...)")[1:]
    assert vector.count("tmp10.fill(0)") == 1
    assert "tmp9 = decltype(tmp9)(0); } }(" in scalar
