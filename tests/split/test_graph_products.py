"""Products over a growth small enough to be worked out by hand: x is [n, 3, h], y is [h, 2], h named in both."""

from split.graph.growth import Elements, Extent, Growth, Step
from split.graph.products import Products
from split.tensor import TensorSpec

INPUTS = (
    TensorSpec(name="x", dtype="FP32", shape=("n", 3, "h")),
    TensorSpec(name="y", dtype="FP32", shape=("h", 2)),
)
N, H, ALL = 0, 1, 2
GROWTH = Growth(
    monomials=(),
    extents=(
        Extent(5),
        Extent(-2, (Step(H, 1, 0, 1),)),  # h - 2
        Extent(1, (Step(H, 1, 1, 2), Step(N, 3, 0, 1))),  # 1 + (h + 1) // 2 + 3 n
    ),
    whole_work=(),
    outputs=(),
    cuts={},
)


def products() -> Products:
    found = Products(GROWTH, INPUTS)
    elements, constant = found.of_elements(Elements(extents=(0, 1, 2)))
    assert constant == 1.0
    about, per_element = found.of_elements(Elements(per_input_element=0.25))
    assert per_element == 0.25
    inputs = [found.of_input(number) for number in (0, 1)]
    assert [constant for _, constant in inputs] == [3.0, 2.0]
    squared = found.of_monomial(((H, 2), (N, 1)))
    everything = found.of_monomial(((ALL, 1),))
    found.want([elements, about, *(factors for factors, _ in inputs), squared, everything, found.of_monomial(())])
    return found


def test_products_are_of_extents_sizes_and_all_inputs_in_the_order_they_were_wanted() -> None:
    assert products().at((2, 7)).tolist() == [5 * 5 * 11, 56, 14, 7, 98, 56, 1]  # 2·3·7 + 7·2 = 56
    assert products().at((1, 10)).tolist() == [5 * 8 * 9, 50, 10, 10, 100, 50, 1]


def test_an_extent_is_never_less_than_nothing() -> None:
    assert products().at((1, 1)).tolist() == [0, 5, 1, 1, 1, 5, 1]
    assert products().at((0, 0)).tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_a_growth_without_extents_has_products_of_sizes() -> None:
    found = Products(Growth(monomials=(), extents=(), whole_work=(), outputs=(), cuts={}), INPUTS)
    found.want([found.of_monomial(((N, 3),))])
    assert found.at((4, 9)).tolist() == [64]
    found.want([])
    assert found.at((4, 9)).tolist() == []
