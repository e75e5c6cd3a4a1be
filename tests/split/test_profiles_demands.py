"""What contracts ask of cuts."""

from split.profiles.contract import Contract, Data, InputContract, Resource
from split.profiles.demands import demands_of


def test_no_contract_and_one_that_limits_nothing_ask_nothing() -> None:
    for contract in (None, Contract(), Contract(data=Data(inputs=(InputContract(name="x"),)))):
        asked = demands_of(contract, ["x", "z"])
        assert (asked.memory_bytes, asked.depth_min_ratio, asked.private, str(asked)) == (None, 0.0, (), "")


def test_private_is_what_the_model_or_one_input_says() -> None:
    one = Contract(data=Data(inputs=(InputContract(name="z", privacy="no-raw-input"), InputContract(name="gone"))))
    assert demands_of(one, ["x", "z"]).private == ("z",)
    assert demands_of(Contract(data=Data(privacy="no-raw-input")), ["z", "x"]).private == ("x", "z")


def test_demands_that_differ_are_told_apart_by_their_text() -> None:
    contracts = [
        Contract(resource=Resource(memory_bytes=1_000)),
        Contract(resource=Resource(memory_bytes=1_001)),
        Contract(data=Data(depth_min_ratio=0.5)),
        Contract(data=Data(privacy="no-raw-input")),
    ]
    texts = [str(demands_of(contract, ["x"])) for contract in contracts]
    assert len(set(texts)) == len(texts)
    assert texts == [str(demands_of(contract, ["x"])) for contract in contracts]
