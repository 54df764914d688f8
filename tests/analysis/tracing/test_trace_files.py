"""Files, frames, pages and commands of attribution graphs."""

import json

import numpy as np
import pytest
from command_line import succeeded
from transcoder_files import write_set

from mionnx import AttributionGraph, InputError, MIModel, TranscoderSet

TEXT, PATH = "The capital of France is", "models/world-llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transcoders")
    write_set(MIModel.from_pretrained(PATH, threads=1), folder)
    return folder


@pytest.fixture(scope="module")
def graph(folder) -> AttributionGraph:
    return MIModel.from_pretrained(PATH, threads=1).trace(TEXT, TranscoderSet.load(folder))


def test_a_file_of_circuit_tracers_holds_what_is_left(graph, tmp_path):
    """Written and read again it is the pruned graph, less errors without edges; writing that gives the same links."""
    graph = graph.group("France", [graph.sources[0]])
    best = graph.leading(1, 1)
    file = graph.to_circuit_tracer("france", nodes=1, edges=1)
    assert [*file] == ["metadata", "qParams", "nodes", "links"]
    assert file["metadata"]["scan"] == "random"
    kinds = {"cross layer transcoder", "mlp reconstruction error", "embedding", "logit"}
    assert {node["feature_type"] for node in file["nodes"]} == kinds
    (tmp_path / "france.json").write_text(json.dumps(file))
    again = AttributionGraph.read(tmp_path / "france.json")
    assert (again.tokens, again.targets, again.layers) == (graph.tokens, graph.targets, graph.layers)
    assert again.groups == graph.groups
    rows = [graph.receivers.index(name) for name in again.receivers]
    columns = [graph.sources.index(name) for name in again.sources]
    effects = np.where(best.edges, graph.effects, 0)
    assert np.array_equal(again.effects, effects[np.ix_(rows, columns)])
    assert np.count_nonzero(again.effects) == np.count_nonzero(effects) == len(file["links"])
    assert again.to_circuit_tracer("france", nodes=1, edges=1)["links"] == file["links"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda file: file.pop("links"), "KeyError"),
        (lambda file: file["nodes"].append(file["nodes"][0]), "two nodes"),
        (lambda file: file["metadata"].update(schema_version=2), "schema 2"),
        (lambda file: file["links"].append({"source": "x", "target": "y", "weight": 1}), "KeyError"),
    ],
)
def test_other_files_are_refused(graph, tmp_path, change, words):
    file = graph.to_circuit_tracer()
    change(file)
    (tmp_path / "g.json").write_text(json.dumps(file))
    with pytest.raises(InputError, match=words):
        AttributionGraph.read(tmp_path / "g.json")


def test_the_frame_has_every_source(graph):
    frame = graph.to_frame()
    assert len(frame) == graph.effects.shape[1]
    assert frame.influence.is_monotonic_decreasing
    assert frame.kind.value_counts()["feature"] == len(graph.features)
    first = frame[frame.kind == "feature"].iloc[0]
    assert first.node == f"{first.layer}_{first.feature}_{first.position}"
    assert first.token == graph.tokens[first.position]


def test_the_command_prints_circuit_tracers_file(folder, graph, tmp_path):
    page = tmp_path / "g.html"
    printed = succeeded("trace", PATH, TEXT, "--transcoders", str(folder), "--json", "--html", str(page))
    file = json.loads(printed)
    assert [node["node_id"] for node in file["nodes"]] == [node["node_id"] for node in graph.to_dict()["nodes"]]
    assert "Ways in" in page.read_text()
    own = json.loads(succeeded("trace", PATH, TEXT, "--json"))  # with the set in the model's folder
    assert own["metadata"]["scan"] == "world-llama"
    assert "http://" not in page.read_text().replace("http://www.w3.org", "")


def test_the_picture_and_the_page_name_tokens_and_logits(graph, tmp_path):
    graph.save(tmp_path / "g.png")
    page = graph.group("a supernode", [graph.top(1)[0][0]]).page()
    assert all(token in page for token in ("France", "capital", "a supernode"))
