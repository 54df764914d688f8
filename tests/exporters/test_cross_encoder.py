"""Folders of a CrossEncoder: opened by their architecture, with scores as the folder says that they are made."""

import json
import shutil

import numpy as np
import pytest
from encoder_texts import make_tokenizer
from encoders import make_encoder
from transformers import BertConfig, BertForSequenceClassification

from exporters.head_facts import activation_of
from exporters.sentence_folder import stated_activation
from exporters.transformers import export
from mionnx import ExportError, MIModel

TORCH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.activation.Tanh"
PAIRS = [("where does ann live?", "ann lives in rome now"), ("music", "it rains.")]


@pytest.fixture(scope="module")
def checkpoint_of_pairs(tmp_path_factory):
    """What sentence-transformers 6 saves of a BERT with one label."""
    folder = tmp_path_factory.mktemp("cross") / "checkpoint"
    make_encoder("bert", folder, "classes")
    config = BertConfig.from_pretrained(folder, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(folder)
    make_tokenizer(folder)
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
    settings = {"transformer_task": "sequence-classification", "module_output_name": "scores"}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return folder


def says(folder, **settings):
    table = {"model_type": "CrossEncoder", "default_prompt_name": None, "prompts": {}, **settings}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(table))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("stated", "activation"), [(TORCH[0], "identity"), (TORCH[1], "sigmoid"), (None, "sigmoid")])
def test_one_label_is_a_score_as_the_folder_says(checkpoint_of_pairs, tmp_path, stated, activation):
    """Such a folder was refused for its modules, and Identity was unknown: a sigmoid was told for raw scores."""
    folder = shutil.copytree(checkpoint_of_pairs, tmp_path / "checkpoint")
    says(folder, activation_fn=stated)
    export(folder, tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    found = model.classify(PAIRS)
    assert (model.hooked.metadata.head, model.hooked.metadata.activation) == ("classes", activation)
    expected = found.logits if activation == "identity" else 1 / (1 + np.exp(-found.logits))
    assert np.allclose(found.probabilities, expected)


def test_what_folders_say_is_found_wherever_versions_wrote_it(checkpoint_of_pairs, tmp_path):
    folder = shutil.copytree(checkpoint_of_pairs, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    assert stated_activation(folder) == ""
    for words in (
        {"sentence_transformers": {"activation_fn": TORCH[0]}},
        {"sbert_ce_default_activation_function": TORCH[0]},
    ):
        (folder / "config.json").write_text(json.dumps(config | words))
        assert stated_activation(folder) == "Identity"
    says(folder, activation_fn=TORCH[1])
    assert stated_activation(folder) == "Sigmoid"
    says(folder, activation_fn="my_package.Own")  # not imported by sentence-transformers either
    (folder / "config.json").write_text(json.dumps(config))
    assert stated_activation(folder) == ""
    for settings, message in (
        ({"activation_fn": TORCH[2]}, "scores by torch.*Tanh"),
        ({"default_prompt_name": "q"}, "prompt"),
    ):
        says(folder, **settings)
        with pytest.raises(ExportError, match=message):
            stated_activation(folder)
    assert activation_of("classes", None, 3, stated="Identity") == "softmax"  # what is written where nobody chose
    assert activation_of("classes", None, 3, stated="Sigmoid") == "sigmoid"
