"""The benchmark runner and what areas measure with; never how fast anything is."""

import doctest
import json

import pytest
import torch

from tools.bench import measures
from tools.bench.areas.import_ import Package
from tools.bench.measures import Measure, StorageMeter, alternate
from tools.bench.runner import find_areas, main, table
from tools.rails.collectives import CountCollectives
from tools.rails.ranks import run_on_ranks
from tools.rails.wheels import members


def count_known_collectives(accelerator):
    import torch.distributed as dist

    mine, both = torch.ones(2), torch.empty(4)
    dist.barrier()
    with CountCollectives() as count:
        dist.all_gather_into_tensor(both, mine)
        dist.all_gather([torch.empty(2), torch.empty(2)], mine)
        dist.all_reduce(mine)
        dist.broadcast(mine, 0)
    dist.all_reduce(mine)
    return count.gathers(), count.others()


def test_contestants_take_turns_and_medians_leave_the_first_round_out():
    turns = []
    values = {"ours": iter([900, 1, 7, 2]), "peer": iter([0, 30, 10, 20])}

    def run(name):
        turns.append(name)
        return {"seconds": next(values[name])}

    found = alternate({"ours": lambda: run("ours"), "peer": lambda: run("peer")}, rounds=3)
    assert turns == ["ours", "peer"] * 4
    assert found == {"ours": {"seconds": 2}, "peer": {"seconds": 20}}


def test_collectives_are_counted_on_every_rank_while_entered():
    assert run_on_ranks(count_known_collectives, engine="ddp") == [(2, 2), (2, 2)]


def test_the_examples_in_the_measures_run():
    assert doctest.testmod(measures) == (0, 2)


def test_storage_is_counted_with_views_frees_and_resizes():
    resized = torch.zeros(1000)
    resized.untyped_storage().resize_(0)
    weight = torch.ones(100, requires_grad=True)
    with StorageMeter() as meter:
        assert meter.current() == 0
        made = torch.zeros(100)
        view = made.view(10, 10)
        assert meter.current() == 400
        (weight * view.flatten()).sum().backward()
        assert meter.current() == 800, "the gradient"
        del made, view
        assert meter.current() == 400
        resized.untyped_storage().resize_(4000)
        resized.zero_()
        assert meter.current() == 4400
        resized.untyped_storage().resize_(0)
    assert meter.current() == 400
    assert meter.peak >= 4400


def test_the_table_shows_ratio_and_limit_and_a_dash_where_there_is_none():
    text = table([Measure("time", "s", 1.0, 4.0, 0.5), Measure("alone", "MB", 1234.56)])
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["time", "1", "4", "0.25", "0.5", "s"],
        ["alone", "1234.6", "-", "-", "-", "MB"],
    ]


def test_every_area_is_found_described_and_listed(capsys):
    assert {"import", "cycle"} <= find_areas().keys()
    assert set(find_areas()["import"].CASES) == set(members())
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    for name, area in find_areas().items():
        assert f"{name}: {area.__doc__.splitlines()[0]}" in listed
        assert all(case in listed for case in area.CASES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "Unknown area 'nowhere': choose among chatformat, cycle, embeddings, "),
        (["import/nothing"], "Unknown case 'nothing' of import: choose among trl-chatformat"),
        (["import", "--json", "no/such/folder/file.json"], "the folder does not exist"),
    ],
)
def test_bad_arguments_are_one_sentence_and_exit_code_2(arguments, said, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_chatformat_alone_is_light(tmp_path):
    package = Package("trl-chatformat", "from trl_chatformat import setup_chat_format")
    assert not package.alone.keys() & {"torch", "transformers", "numpy"}
    assert 1 < package.megabytes() < 45
    package.link_into(tmp_path)
    loaded = package.run(tmp_path)["modules"]
    assert package.run(tmp_path, "pass")["modules"] < loaded < 600


@pytest.mark.full
def test_a_case_writes_ours_and_the_peers_measures_to_a_file(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert main(["import/trl-redirect", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["device"] == "cpu"
    rows = {row["name"]: row for row in written["measures"]}
    assert rows.keys() == {"import, CPU time", "modules loaded", "installed"}
    for row in rows.values():
        assert (row["area"], row["case"]) == ("import", "trl-redirect")
        assert row["ours"] > 0
        assert row["ratio"] == row["ours"] / row["peer"]
    modules = rows["modules loaded"]
    assert modules["limit"] < modules["ours"] < modules["peer"]
    assert "import/trl-redirect, cpu" in capsys.readouterr().out
