"""The library's reference kernels against the oracle, over everything the specification knows."""

import judge
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Case, Drawn, draw_spec

FORWARD = [("reference/attn_fwd_reference_f64", True), ("reference/attn_fwd_reference", False)]
BACKWARD = [("reference/attn_bwd_reference_f64", True), ("reference/attn_bwd_reference", False)]
forward_specs = st.composite(lambda draw: draw_spec(Drawn(draw)))()
backward_specs = st.composite(lambda draw: draw_spec(Drawn(draw), backward=True, largest=30))()


@pytest.mark.parametrize("backend, exact", FORWARD)
def test_forward(backend, exact):
    @settings(max_examples=250)
    @given(forward_specs)
    def run(spec):
        judge.check_forward(Case(spec), dict(backend=backend), exact)

    run()


@pytest.mark.parametrize("backend, exact", BACKWARD)
def test_backward(backend, exact):
    @settings(max_examples=150)
    @given(backward_specs)
    def run(spec):
        judge.check_backward(Case(spec), dict(backend=backend), exact)

    run()
